# The fleet's authority: the server's certificate, and the certificate that nodes trust. Run again, it keeps what is there.
set -eu
umask 077
cd /srv/fleet
[ -e authority/server.pem ] || fleetfit flower certificates authority --host superlink --host localhost --host 127.0.0.1
cp authority/ca.crt authority/server.pem authority/server.key server/
cp authority/ca.crt public/

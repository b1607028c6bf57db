# Tells the SuperLink which nodes may come, once each.
set -eu
cd /srv/fleet
. scripts/lab.sh
for name in phone pi jetson; do
    until [ -e "public/$name.pub" ]; do sleep 1; done
    [ -e "public/$name.registered" ] || flwr supernode register "public/$name.pub" lab
    touch "public/$name.registered"
done

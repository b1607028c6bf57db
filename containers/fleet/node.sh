# A device: makes its own key, shows the public half, and starts once that is registered.
set -eu
umask 077
cd /srv/fleet/device
[ -e key.pub ] || fleetfit flower key key
cp key.pub "/srv/fleet/public/$1.pub"
cp "/srv/fleet/scripts/$1.toml" node.toml
until [ -e "/srv/fleet/public/$1.registered" ]; do sleep 1; done
cp /srv/fleet/public/ca.crt .
exec fleetfit flower node node.toml --superlink "$SUPERLINK" --ca ca.crt --key key

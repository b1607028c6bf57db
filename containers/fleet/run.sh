# Starts a run of run.toml; its folder is made where the server app runs.
set -eu
cd /srv/fleet
. scripts/lab.sh
out=/srv/fleet/runs/$(date +%Y%m%d-%H%M%S)
work=$(mktemp -d)
fleetfit flower init "$work/app" --run scripts/run.toml
flwr run "$work/app" lab --stream --run-config "out='$out'"
[ -e "$out/summary.json" ] || { echo "The run did not finish." >&2; exit 1; }
echo "The run folder: $out, in the volume \"runs\"."

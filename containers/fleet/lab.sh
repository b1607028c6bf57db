# Where Flower's command line finds the SuperLink.
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "lab"
[superlink.lab]
address = "superlink:8000"
root-certificates = "/srv/fleet/server/ca.crt"
END

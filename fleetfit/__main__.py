"""`python -m fleetfit` is the command `fleetfit`."""

from fleetfit.cli import main

main()

"""What FleetFit costs, as ratios of things that alternate in one process; `benchmarks/README.md` has the figures."""

"""Engines, which run jobs: one file each; a new one needs a row in `fleetfit/names.py`."""

"""Public data sets: one file per set or family; a new one needs a row in `fleetfit/names.py`."""

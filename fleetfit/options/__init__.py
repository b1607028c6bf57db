"""Options that go with any method: one file each; a new one needs a row in `fleetfit/names.py`."""

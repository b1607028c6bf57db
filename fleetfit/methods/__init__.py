"""Methods: one file and one function each; a new one needs a row in `fleetfit/names.py`."""

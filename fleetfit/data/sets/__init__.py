"""Public data sets: rows of tables, and files for those that need code. Each has a row in `fleetfit/names.py`."""

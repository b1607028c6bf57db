"""Formats of files and folders of data sets; a new one needs a row in `fleetfit/names.py`."""

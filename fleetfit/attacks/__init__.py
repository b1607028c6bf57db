"""Simulated attacks (`[attack] kind`): one file each; a new one needs a row in `fleetfit/names.py`."""

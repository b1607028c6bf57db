"""Figures that only papers have, of finished runs: teachers, attention maps, early exits."""

"""Sections of a run file become the objects of a run, one module per section."""

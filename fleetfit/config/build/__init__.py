"""Sections of a run file become objects, one module for each kind of section."""

"""Build the objects of a run from the sections of a run file, one module per section."""

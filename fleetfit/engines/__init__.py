"""Engines: where jobs run. One file each; the function of the file's name makes the engine."""

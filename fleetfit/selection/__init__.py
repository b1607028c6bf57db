"""Client selection: one file and one function each, for any method."""

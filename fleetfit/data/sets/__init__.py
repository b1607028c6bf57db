"""Public data sets by name, one in a file or a family of them as rows of its table."""

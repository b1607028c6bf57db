"""Public data sets by name, one per file, or a family as rows of a file's table."""

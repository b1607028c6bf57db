"""Kinds of files that hold data sets, and where they lie."""

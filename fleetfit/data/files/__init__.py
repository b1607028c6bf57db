"""Formats of files, and the folders of data sets."""

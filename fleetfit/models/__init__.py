"""Models: one file and one function each; `blocks.py` holds what they share."""

"""What hostile clients of a simulation do: one file, one function each, named by `[attack] kind`."""

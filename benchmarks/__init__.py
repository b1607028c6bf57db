"""Benchmarks: speed, always as a ratio against something measured in the same run."""

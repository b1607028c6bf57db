"""The command line: each module holds the verbs that its name says, and parses, calls `fleetfit.api` and prints."""

from fleetfit.cli.main import main

__all__ = ["main"]

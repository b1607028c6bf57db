"""The command line. Each module has the verbs of one subject: it parses arguments, calls `fleetfit.api` and prints."""

from fleetfit.cli.main import main

__all__ = ["main"]

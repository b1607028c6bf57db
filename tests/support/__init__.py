"""Helpers that several test modules share."""

from support.aggregation import Watched, aggregate_plainly, aggregate_updates
from support.comparisons import compare_text
from support.errors import Expected, check_error, raises
from support.verbs import Printed, run_verb

__all__ = [
    "Expected",
    "Printed",
    "Watched",
    "aggregate_plainly",
    "aggregate_updates",
    "check_error",
    "compare_text",
    "raises",
    "run_verb",
]

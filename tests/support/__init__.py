"""Helpers that several test modules share."""

from support.comparisons import compare_text
from support.errors import Expected, check_error, raises

__all__ = ["Expected", "check_error", "compare_text", "raises"]

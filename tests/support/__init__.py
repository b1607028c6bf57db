"""Helpers that several test modules share."""

from support.comparisons import compare_text
from support.errors import raises

__all__ = ["compare_text", "raises"]

"""Helpers that several test modules share."""

from support.errors import raises

__all__ = ["raises"]

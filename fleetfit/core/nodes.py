"""The description of a node, as it travels and as `nodes.json` keeps it, checked where it enters."""

import math
import re
from collections.abc import Mapping
from typing import Any

from fleetfit.core.fleet import DataDescription, NodeDescription
from fleetfit.data.splits import SPLITS
from fleetfit.errors import RunError
from fleetfit.planner import Budget

NODE_NAME = re.compile(r"[\w.-]{1,60}")
_ENCODING = re.compile(r"([0-9a-f]{64})?")
_STORED = re.compile(r"((uint8|int64|float32)( standardized)?)?")
_MAX_CHARACTERS = 300  # of a text in the description of the data
_MAX_SIZE = 2**31  # classes, tokens, and numbers in a sample


def parse_node_description(table: Any) -> NodeDescription:
    """Return a node's description of itself.

    Raises:
        RunError: An entry is missing or wrong.
    """
    if not isinstance(table, Mapping):
        raise RunError("it sent no description of itself.", key="about")
    name, examples, labels = table.get("name"), table.get("examples"), table.get("labels")
    if not isinstance(name, str) or not NODE_NAME.fullmatch(name):
        raise RunError("its name is not one of at most 60 letters, digits, dots and dashes.", key="name")
    if not isinstance(examples, Mapping) or not _is_count(examples.get("train")):
        raise RunError("its number of training samples is missing.", key="examples")
    facts, tolerance = _parse_facts(table.get("facts")), table.get("tolerance", NodeDescription.tolerance)
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or not 0 <= tolerance < 100:
        raise RunError("its tolerance must be a number of at least 0.", key="tolerance")
    if labels is not None and not (
        isinstance(labels, list) and len(labels) == facts.classes and all(map(_is_count, labels))
    ):
        raise RunError("its samples by class must be whole numbers, one for each class.", key="labels")
    if labels is not None and sum(labels) != examples["train"]:
        raise RunError("its samples by class do not add up to its training samples.", key="labels")
    held_out = {split: examples[split] for split in SPLITS[1:] if _is_count(examples.get(split))}
    return NodeDescription(name, facts, examples["train"], _parse_budget(table.get("budget")), float(tolerance),
                           None if labels is None else tuple(labels), held_out)  # fmt: skip


def _parse_facts(table: Any) -> DataDescription:
    try:
        shape, padding = table["sample_shape"], table["padding"]
        numbers = (table["classes"], table["vocabulary"], *shape)
        texts, channels_last = (table["name"], table["task"]), table.get("channels_last", False)
        encoding, stored = table.get("encoding", ""), table.get("stored", "")
        is_valid = (
            isinstance(table, Mapping)
            and all(isinstance(text, str) and 0 < len(text) <= _MAX_CHARACTERS for text in texts)
            and all(text.isprintable() for text in texts)
            and all(map(_is_count, numbers))
            and isinstance(encoding, str)
            and _ENCODING.fullmatch(encoding) is not None
            and isinstance(stored, str)
            and _STORED.fullmatch(stored) is not None
            and type(padding) is int
            and type(channels_last) is bool
            and -(2**40) < padding < 2**40
            and isinstance(shape, list)
            and len(shape) <= 8
            and 1 <= table["classes"] <= _MAX_SIZE
            and table["vocabulary"] <= _MAX_SIZE
            and math.prod(shape) <= _MAX_SIZE
        )
    except (KeyError, TypeError, IndexError, AttributeError):
        is_valid = False
    if not is_valid:
        raise RunError("its description of the data is missing or wrong.", key="facts")
    return DataDescription(*texts, tuple(shape), table["classes"], table["vocabulary"], padding,
                           channels_last, encoding, stored)  # fmt: skip


def _parse_budget(value: Any) -> Budget | None:
    if value is None or _is_amount(value):
        return value
    is_table = isinstance(value, Mapping) and 0 < len(value) <= 16 and all(map(_is_amount, value.values()))
    if is_table and all(isinstance(key, str) and 0 < len(key) <= 60 and key.isprintable() for key in value):
        return dict(value)
    raise RunError("its budget must be an amount or a table of amounts.", key="budget")


def _is_amount(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= 40 and value.isprintable()
    return type(value) in (int, float) and 0 < value < 1e30  # neither infinite nor NaN


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**40

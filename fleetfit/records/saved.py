"""What the checkpoint of a run holds: the server, what the clients remember, and the last statistics."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fleetfit.records import forms
from fleetfit.records.tensors import Damaged


def checkpoint_of(nest: Any, round: int) -> dict[str, Any]:
    """Return a checkpoint whose parts are of the right types.

    Args:
        nest: As it was read.
        round: That its file is named after.

    Raises:
        Damaged: They are not.
    """
    try:
        _CHECKPOINT(nest, "")
    except ValueError as error:
        raise Damaged(str(error)) from None
    if nest["server"]["round"] != round:
        raise Damaged(f"it is of round {nest['server']['round']}")
    return dict(nest)


def _state(value: Any, where: str) -> None:
    forms.mapped(_tensor)(value, where)


def _tensor(value: Any, where: str) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is no tensor")


def _clients(value: Any, where: str) -> None:
    """Expect each client's memory with its version; of a real fleet the versions alone."""
    forms.mapped(forms.anything)(value, where)
    known = value.get("versions") if "versions" in value else value
    forms.mapped(_version if "versions" in value else _remembered)(known, where)
    for client in known:
        if not (client.isdecimal() and client.isascii() and len(client) < 12):
            raise ValueError(f"{where}/{client[:60]} is no client")


def _version(value: Any, where: str) -> None:
    forms.count(value + 1 if type(value) is int else value, where)


def _statistics(value: Any, where: str) -> None:
    if not isinstance(value, Mapping) or not all(type(level) is int and level >= 0 for level in value):
        raise ValueError(f"{where} is no table by level")
    for level, state in value.items():
        _state(state, f"{where}/{level}")


def _trained(value: Any, where: str) -> None:
    """Expect the largest level of each client, both as numbers from 0."""
    numbers = isinstance(value, Mapping) and all(type(n) is int and n >= 0 for pair in value.items() for n in pair)
    if not numbers:
        raise ValueError(f"{where} is no table of levels by client")


_remembered = forms.table({"version": _version, "memory": forms.anything})
_CHECKPOINT = forms.table({
    "server": forms.table({"state": _state, "round": forms.count, "memory": forms.anything}, {"trained": _trained}),
    "clients": _clients,
    "statistics": forms.maybe(_statistics),
})  # fmt: skip

"""What a module returns: where the logits are."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fleetfit.errors import ModelError, quote_some


def get_logits(out: Any) -> Tensor:
    """Return the logits among what a module returns.

    Args:
        out: A tensor, a list with those of each exit, a record with `logits`, or a tuple that begins with them.

    Raises:
        ModelError: It is something else.
    """
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Mapping) and "logits" in out:
        return get_logits(out["logits"])
    if hasattr(out, "logits"):
        return get_logits(out.logits)
    fields = [str(name) for name in (out if isinstance(out, Mapping) else getattr(out, "_fields", ()))]
    fields = fields or [*getattr(out, "__dataclass_fields__", ())]
    if isinstance(out, list | tuple) and out and not fields:
        return get_logits(out[-1 if isinstance(out, list) else 0])
    got = f"{type(out).__name__} with {quote_some(fields)}" if fields else type(out).__name__
    raise ModelError(
        "forward must return logits: a tensor, a list with those of each exit, a record with `logits`, or a tuple that "
        f"begins with them; got {got}. Return the logits from forward.",
        key="model",
    )


def check_outputs(out: Any) -> None:
    """Refuse a tuple in which the logits are not the only tensor of their shape, and a list of several shapes.

    Raises:
        ModelError: It is one.
    """
    shapes = list(dict.fromkeys(str(tuple(get_logits(one).shape)) for one in out)) if isinstance(out, list) else []
    if len(shapes) > 1:
        raise ModelError(
            f"forward returns a list with tensors of the shapes {' and '.join(shapes)}. A list has the logits of each "
            "exit, of one shape; return the logits first in a tuple, or alone.",
            key="model",
        )
    if not isinstance(out, tuple) or hasattr(out, "logits"):
        return
    logits = get_logits(out)
    if any(isinstance(one, Tensor) and one.shape == logits.shape for one in out[1:]):
        raise ModelError(
            f"forward returns a tuple of {len(out)} with several tensors of shape {tuple(logits.shape)}. Return the "
            "logits alone, or a list with those of each exit.",
            key="model",
        )

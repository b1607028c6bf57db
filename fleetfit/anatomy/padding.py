"""Find the mask that an instance takes for padding, by trying.

A short text alone and the same text padded beside a longer one must get the same logits.
"""

import inspect
import math
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fleetfit.anatomy.copies import copy_instance
from fleetfit.anatomy.kernels import skip_fast_path
from fleetfit.anatomy.logits import get_logits
from fleetfit.anatomy.masks import LENGTHS, PADDING, TOKENS, InputMask, call_instance
from fleetfit.seeds import isolate_rng, make_torch_rng

_ARGUMENT = re.compile(r"mask|padding|lengths?$|lens?$")
_USUAL = "attention_mask"  # of transformers, whose models may read the tokens where they get none
_SAME = 1e-4  # a difference of logits, of their size
_ENOUGH = 0.5  # of the difference without a mask, that one without a convention may leave
_CONVENTIONS = {_USUAL: TOKENS, "src_key_padding_mask": PADDING, "key_padding_mask": PADDING}


def list_masks(
    net: nn.Module, length: int, vocabulary: int, padding: int, samples: Tensor | None = None
) -> list[tuple[InputMask | None, float]]:
    """Return the masks that an instance takes for padding, the best one first.

    Args:
        net: The instance; it is left as it is.
        length: Tokens of the longest text.
        vocabulary: Number of tokens.
        padding: The token that fills short texts.
        samples: At least two texts [N, length]; by default random ones.

    Returns:
        Masks, each with the difference of a short text's logits beside a longer one that is left, of their size; 0 for
        rounding. Where none is exact, that of a convention is the best, since what is left, such as a mean over padded
        places, depends on the weights. The argument of a mask is "" where none is needed. The last one is None where
        the logits change without a mask, or the module takes texts of one length only.
    """
    if padding < 0 or vocabulary < 2 or length < 2:
        return [(None, 0.0)]
    if samples is None:
        long = torch.randint(vocabulary - 1, (2, length), generator=make_torch_rng("padding"))
        long += long >= padding
    else:
        long = samples[(samples != padding).sum(1).argsort(descending=True, stable=True)[:2]]
    short, tokens = long.clone(), long[0][long[0] != padding]
    alone = torch.cat([tokens[: max(1, len(tokens) // 3) - 1], tokens[-1:]])[None]  # with its end mark
    short[0], short[0, : alone.shape[1]] = padding, alone
    net = copy_instance(net).eval()
    plain = InputMask(padding)
    change = _compare(net, plain, alone, short)
    is_invariant = change is not None and change <= _SAME
    left: dict[InputMask, float] = {}
    for mask in _list_candidates(net, padding):
        difference = _compare(net, mask, alone, short, None if change is None else plain)
        if difference is not None and (mask.argument == _USUAL or not is_invariant):
            left[mask] = 0.0 if difference <= _SAME else difference
    last = (plain, 0.0) if is_invariant else (None, change or 0.0)
    exact = [mask for mask in left if not left[mask]]
    usual = [mask for mask in left if _CONVENTIONS.get(mask.argument) == mask.kind and not is_invariant]
    others = [mask for mask in left if left[mask] <= (change or 0.0) * _ENOUGH]
    best = next(iter([*exact, *usual, *sorted(others, key=left.__getitem__)]), None)
    return [last] if best is None else [(best, left[best]), last]


def _list_candidates(net: nn.Module, padding: int) -> Iterator[InputMask]:
    parameters = [*inspect.signature(net.forward).parameters.values()][1:]
    names = [p.name for p in parameters if _ARGUMENT.search(p.name)]
    for name in sorted(names, key=lambda name: "mask" not in name):
        if "len" in name:
            yield InputMask(padding, name, LENGTHS)
            continue
        kinds: Sequence[str] = (PADDING, TOKENS) if "padding" in name else (TOKENS, PADDING)
        for kind in kinds:
            for dtype in ("bool", "int64", "float32") if "padding" in name else ("int64", "bool", "float32"):
                yield InputMask(padding, name, kind, dtype)


def _compare(
    net: nn.Module, mask: InputMask, alone: Tensor, padded: Tensor, reference: InputMask | None = None
) -> float | None:
    """Return the largest difference of the short text's logits, of their size; None where the module fails."""
    try:
        with torch.no_grad(), skip_fast_path(), isolate_rng(torch.device("cpu")):
            expected = get_logits(call_instance(net, alone, reference or mask))[0]
            logits = get_logits(call_instance(net, padded, mask))[0]
    except Exception:  # other people's code may fail in any way
        return None
    if expected.dim() == 2:
        logits = logits[: len(expected)]
    if logits.shape != expected.shape:
        return None
    size = (expected - expected.mean()).abs().max().clamp(min=1e-12)
    difference = float((logits - expected).abs().max() / size)
    return difference if math.isfinite(difference) else None

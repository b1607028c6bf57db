"""Whether the answers that Python reads from samples change what is computed, or only what is logged.

`if padding in tokens: warn(...)` reads yes or no. The instance is run with both answers to each such question. Where
the logits are always made by the same operations of the same tensors, the answers are for messages and checks alone.
"""

import contextlib
import dis
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fleetfit.anatomy.copies import copy_instance
from fleetfit.anatomy.kernels import skip_recomputation
from fleetfit.anatomy.known_values import iter_tensors
from fleetfit.anatomy.labels import READS, CalledOperations, is_hidden, list_tensors
from fleetfit.anatomy.logits import get_logits
from fleetfit.anatomy.masks import InputMask
from fleetfit.seeds import isolate_rng

_MOST_RUNS = 64
_MOST_MORE = 1000  # operations, so that a loop that waits for an answer ends
_SAMPLES = ""  # in the place of a name


class _Differs(Exception):
    """An answer changes what is computed."""


def find_answers(net: nn.Module, example: Tensor, mask: InputMask | None) -> tuple[bool, ...] | None:
    """Return the answers that an instance reads from samples; None where another answer changes what it computes.

    Args:
        net: The instance; it is left as it is.
        example: Samples [batch, ...].
        mask: Its mask for padding.
    """
    try:
        first = _AnsweredPass(net, example, mask)
        pending, runs = [first], 0
        while pending:
            before = pending.pop(0)
            for i in range(before.given, len(before.answers)):
                other = _AnsweredPass(
                    net, example, mask, [*before.answers[:i], not before.answers[i]], first.steps + _MOST_MORE
                )
                runs += 1
                if runs > _MOST_RUNS or (other.made_by != first.made_by and not other.has_raised):
                    return None
                pending.append(other)
    except _Differs:
        return None
    return tuple(first.answers)


class _AnsweredPass(CalledOperations):
    """Two forward passes of a copy, since the first may leave something for the second, with answers to questions.

    Answers are given to the first questions of the first pass; the samples answer all others. Afterwards `answers` has
    those to all questions of the first pass, `made_by` the operations by which the logits are made, and `has_raised`
    whether code of the person raised an error at once after the last answer that was given. Raises `_Differs` where the
    pass fails otherwise, reads something else, or takes more than `most` operations.
    """

    def __init__(
        self,
        net: nn.Module,
        example: Tensor,
        mask: InputMask | None,
        answers: Sequence[bool] = (),
        most: int | None = None,
    ) -> None:
        super().__init__()
        self.given, self.answers, self.has_raised = len(answers), [*answers], False
        self.made_by: list[Any] = []
        self.steps, self._most, self._asked, self._last, self._pass = 0, most, 0, 0, 0
        copied, x = copy_instance(net).eval(), example.clone()
        self._names: dict[int, Any] = {_get_storage(tensor): name for name, tensor in list_tensors(copied)}
        self._names[_get_storage(x)] = _SAMPLES
        self._of_samples = {_get_storage(x)}
        self._alive: list[Any] = [copied, x]  # an identity must not be used again
        arguments = {} if mask is None else mask.make_arguments(x)  # outside: a path may depend on them
        with isolate_rng(torch.device("cpu")), torch.no_grad(), skip_recomputation(), _silence():
            try:
                for self._pass in (0, 1):
                    with self:
                        out = copied(x, **arguments)
                    self.made_by += self._describe(out if isinstance(out, list) else [get_logits(out)])
            except Exception as error:  # other people's code may fail in any way
                is_at_once = 0 < self.given == self._asked and self._last == self.steps
                if isinstance(error, _Differs) or not (is_at_once and _is_raised_by_person(error)):
                    raise _Differs from error
                self.has_raised = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [*iter_tensors(args), *iter_tensors(kwargs.values())]
        read = {_get_storage(x) for x in tensors}
        for x in tensors:
            if (key := _get_storage(x)) not in self._names:
                self._names[key] = _read_bytes(x)
        call = hash(self._describe([func, args, kwargs]))
        out = func(*args, **kwargs)
        self._alive.append((out, tensors))
        is_of_samples = bool(read & self._of_samples)
        if self.is_text:
            return out
        if is_of_samples and func.overloadpacket.__name__ in READS:
            return self._answer(out)
        into = [x for argument, x in zip(func._schema.arguments, args, strict=False) if argument.is_write]
        written = list(dict.fromkeys(_get_storage(x) for x in iter_tensors([out, into])))
        if func._schema.is_mutable or not read.issuperset(written):  # no view: who reads one says what it sees
            is_for_message = self._last == self.steps and isinstance(out, Tensor) and out.numel() == 1
            self.steps, self._last = self.steps + 1, self._last + is_for_message
            self._names.update((key, (call, i)) for i, key in enumerate(written))
            self._of_samples.update(written if is_of_samples else ())
        if self._most is not None and self.steps > self._most:
            raise _Differs
        return out

    def _answer(self, out: Any) -> Any:
        if not isinstance(out, bool):
            raise _Differs
        if self._pass:
            return out
        if self._asked == len(self.answers):
            self.answers.append(out)
        self._asked, self._last = self._asked + 1, self.steps
        return self.answers[self._asked - 1]

    def _describe(self, value: Any) -> Any:
        """Return a value with the operations that made them in the place of tensors."""
        if isinstance(value, Tensor):
            made_by = self._names.get(_get_storage(value))
            return made_by, value.storage_offset(), value.shape, value.stride(), value.dtype
        if isinstance(value, dict):
            return tuple((key, self._describe(each)) for key, each in value.items())
        return tuple(map(self._describe, value)) if isinstance(value, list | tuple) else value


def _get_storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _read_bytes(x: Tensor) -> bytes:
    """Return the numbers of a tensor that no operation made, such as a constant."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy().tobytes()


def _is_raised_by_person(error: Exception) -> bool:
    """Return whether an error is from a `raise` or `assert` in a person's code."""
    traceback = error.__traceback__
    assert traceback is not None
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    return not is_hidden(code.co_filename) and dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hold back messages and warnings, which are not due to the samples."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

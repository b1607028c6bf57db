"""Rules for the meta device: each gives what PyTorch gives, and what does not fit is refused in PyTorch's words."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from small_models import SMALL, architecture_of
from support import raises
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fleetfit.anatomy import Architecture, make_input, meta, outputs
from fleetfit.cost import count

SEEN_BY_MODELS = {
    "convolution", "addmm", "mm", "bmm", "mean", "native_layer_norm", "max_pool2d_with_indices", "cat", "embedding",
    "stack", "relu_", "add", "mul", "gelu", "sigmoid",
}  # fmt: skip


def described(result: Any) -> list[Any]:
    """Return all of a result that is known without numbers."""
    parts = result if isinstance(result, tuple | list) else [result]
    return [(t.shape, t.stride(), t.dtype, t.device) if isinstance(t, Tensor) else t for t in parts]


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Have each rule's answer compared with PyTorch's; returns how often each operation had a rule."""
    apply_rule, seen = meta.apply_rule, dict[str, int]()

    def both(func: Any, args: Any, kwargs: Any) -> Any:
        out = apply_rule(func, args, kwargs)
        if out is not NotImplemented:
            name = func._schema.name.removeprefix("aten::")
            seen[name] = seen.get(name, 0) + 1
            assert described(out) == described(func(*args, **kwargs)), f"{func} on {described([*args])}"
        return out

    monkeypatch.setattr(meta, "apply_rule", both)
    return seen


def run(architecture: Architecture, shape: tuple[int, ...]) -> None:
    """Count a model with all of its exits, and compare the sum with PyTorch's counter."""
    sizes = {name: axis.size for name, axis in architecture.axes.items()}
    module, own = count.count(architecture, sizes, tuple(architecture.positions), shape)
    with torch.device("meta"):
        x = make_input(architecture, shape, 2)
    with torch.no_grad(), count._count_extra(module) as extra, FlopCounterMode(display=False) as theirs:
        outputs(module, x)
    whole = theirs.get_total_flops() + sum(extra.values())
    assert whole > 0 and sum(own.values()) == whole // 4, "two samples, two FLOPs per multiply-add"


def test_every_model_gives_what_pytorch_gives(compared: dict[str, int]) -> None:
    """Shapes, strides and types of every operation, and the multiply-adds."""
    for name, small in SMALL.items():
        if not small.family:
            run(architecture_of(name), small.shape)
    run(zoo.attention(), (6, 5))
    assert set(compared) >= SEEN_BY_MODELS


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


RIGHT: dict[str, Callable[[], Any]] = {
    "dilated, grouped": lambda: F.conv2d(empty(2, 4, 9, 8), empty(6, 2, 3, 2), empty(6), (2, 1), (1, 0), 2, 2),
    "sequence": lambda: F.conv1d(empty(2, 5, 4).transpose(1, 2), empty(3, 4, 2), padding=1),
    "volume": lambda: F.conv3d(empty(1, 2, 5, 5, 5), empty(3, 2, 2, 2, 2)),
    "transposed": lambda: F.conv_transpose2d(empty(2, 4, 5, 5), empty(4, 3, 2, 2), stride=2),
    "channels last": lambda: F.conv2d(empty(2, 4, 6, 6).to(memory_format=torch.channels_last), empty(3, 4, 1, 1)),
    "pool outside": lambda: F.max_pool2d(empty(2, 3, 7, 6), 3, 2, 1, ceil_mode=True),
    "pool dilated": lambda: F.max_pool2d(empty(2, 3, 9, 9), 2, dilation=2, return_indices=True),
    "broadcast": lambda: empty(4, 1, 3) + empty(5, 1),
    "numbers": lambda: empty(2, 3, dtype=torch.int64) / 2 + (empty(3) > 1),
    "order kept": lambda: torch.tanh(empty(2, 3, 4).permute(2, 0, 1)),
    "gaps closed": lambda: empty(4, 6)[:, ::2].sigmoid() * empty(4, 1),
    "permuted and one": lambda: empty(3, 1, 4).transpose(0, 2) * empty(4, 1, 3),
    "chosen": lambda: torch.where(empty(4, 1) > 0, empty(3), 0.5),
    "mean of all": lambda: empty(2, 3).mean(),
    "mean kept": lambda: empty(2, 3, 4).mean((-1, 0), keepdim=True),
    "mean to double": lambda: empty(2, 3).mean(1, dtype=torch.float64),
    "softmax to double": lambda: torch.softmax(empty(2, 3), -1, torch.float64),
    "a row's norm": lambda: F.layer_norm(empty(2, 5, 4)[:, 1], (4,), empty(4), empty(4)),
    "joined": lambda: torch.cat([empty(2, 3).T, empty(3, 4)], -1),
    "joined images": lambda: torch.cat([empty(1, 2, 3, 3), empty(1, 1, 3, 3)], 1),
    "joined types": lambda: torch.cat([empty(2), empty(2, dtype=torch.float64)]),
    "stacked": lambda: torch.stack([empty(2, 3), empty(2, 3)], -1),
    "repeated": lambda: empty(2, 3).repeat(2, 1, 4),
    "looked up": lambda: F.embedding(empty(2, 3, dtype=torch.int64), empty(7, 5)),
    "counted": lambda: [torch.arange(5, device="meta"), torch.arange(1.0, 4.5, device="meta")],
    "counted as": lambda: torch.arange(2, 7, dtype=torch.int32, device="meta"),
    "alike": lambda: torch.empty_like(empty(2, 3, 4).transpose(0, 2), dtype=torch.float64),
    "drawn": lambda: empty(3, 2).normal_(0, 1),
    "nothing": lambda: torch.relu(empty(0, 3)) + empty(1, 3),
}


@pytest.mark.parametrize("case", RIGHT)
def test_a_rule_gives_what_pytorch_gives(compared: dict[str, int], case: str) -> None:
    plain = described(RIGHT[case]())
    with meta.on_meta():
        assert described(RIGHT[case]()) == plain


WRONG: dict[str, Callable[[], Any]] = {
    "channels": lambda: F.conv2d(empty(1, 3, 5, 5), empty(4, 2, 3, 3)),
    "too small": lambda: F.conv2d(empty(1, 3, 2, 2), empty(4, 3, 3, 3)),
    "pool too small": lambda: F.max_pool2d(empty(1, 3, 2, 2), 3),
    "pool padding": lambda: F.max_pool2d(empty(1, 3, 8, 8), 2, padding=2),
    "linear": lambda: F.linear(empty(2, 5), empty(3, 4), empty(3)),
    "linear without bias": lambda: F.linear(empty(2, 5), empty(3, 4)),
    "batches": lambda: torch.bmm(empty(2, 3, 4), empty(3, 4, 5)),
    "sizes": lambda: empty(2, 3) + empty(2, 4),
    "into a smaller one": lambda: empty(3).add_(empty(2, 3)),
    "norm": lambda: F.layer_norm(empty(2, 5), (4,)),
    "weight of a norm": lambda: torch.native_layer_norm(empty(2, 4), (4,), empty(3), None, 1e-5),
    "mean over none such": lambda: empty(2, 3).mean(2),
    "joined": lambda: torch.cat([empty(2, 3), empty(3, 3)], 1),
    "stacked": lambda: torch.stack([empty(2), empty(3)]),
    "repeated": lambda: empty(2, 3).repeat(4),
    "looked up by numbers": lambda: F.embedding(empty(2), empty(7, 5)),
}


@pytest.mark.parametrize("case", WRONG)
def test_mismatches_are_refused_as_by_pytorch(case: str) -> None:
    with pytest.raises((RuntimeError, IndexError, ValueError)) as plain:
        WRONG[case]()
    with meta.on_meta(), pytest.raises(type(plain.value)) as ours:
        WRONG[case]()
    assert str(ours.value) == str(plain.value)


# ---- values that depend on sizes alone -------------------------------------------------------------------------------


def overwrite(write: Callable[[Tensor], Any]) -> Any:
    """Write into a view of a mask, and read the mask."""
    mask = torch.ones(2, 3)
    write(mask[:, 1])
    return mask.sum().item()


READ: dict[str, Callable[[Tensor], Any]] = {
    "positions": lambda x: (torch.arange(x.shape[1], device=x.device).diff() != 1).cumsum(-1).any().item(),
    "truth": lambda x: bool((torch.arange(3) > 5).any()),
    "steps": lambda x: [step.item() for step in torch.linspace(0, 1, x.shape[1])],
    "mask": lambda x: torch.full((3, 3), True).tril().sum().item(),
    "like the samples": lambda x: torch.ones_like(x).sum().item() + x.new_zeros(2).sum().item(),
    "compared": lambda x: torch.equal(torch.arange(2), torch.arange(2) + 0),
    "places": lambda x: tuple(torch.arange(5).nonzero().shape),
    "repeated": lambda x: torch.arange(3).repeat_interleave(torch.arange(3))[2].item(),
    "moved": lambda x: torch.arange(6, device="cpu").to(x.device).reshape(2, 3).T.reshape(-1)[1].item(),
    "a view is written": lambda x: overwrite(lambda column: column.zero_()),
    "a view is assigned": lambda x: overwrite(lambda column: column.copy_(torch.arange(2.0) + 4)),
}


@pytest.mark.parametrize("case", READ)
def test_values_of_sizes_can_be_read(case: str) -> None:
    expected = READ[case](torch.zeros(2, 3))
    with meta.on_meta():
        assert READ[case](torch.empty(2, 3)) == expected


UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "samples": lambda x: x.sum().item(),
    "samples and a mask": lambda x: (x * torch.ones(3)).sum().item(),
    "parameters": lambda x: nn.Parameter(torch.ones(3)).sum().item(),
    "random": lambda x: torch.rand(3).sum().item(),
    "redrawn": lambda x: torch.zeros(3).normal_().sum().item(),
    "nothing": lambda x: torch.empty_like(torch.ones(3)).sum().item(),
    "large": lambda x: torch.zeros(2**20 + 1).sum().item(),
    "a view is redrawn": lambda x: overwrite(lambda column: column.normal_()),
    "a view has samples": lambda x: overwrite(lambda column: column.copy_(x[:, 0])),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_values_of_samples_and_parameters_cannot_be_read(case: str) -> None:
    with meta.on_meta():
        x = make_input(architecture_of("cnn"), (3,), 2)
        with raises(RuntimeError):
            UNKNOWN[case](x)


def test_counting_does_not_import_pytorchs_compiler() -> None:
    """Of convolutional networks, transformers and LSTMs; an import of it would be an error here."""
    program = (
        "import sys; sys.modules['torch._dynamo'] = sys.modules['sympy'] = None\n"
        "from small_models import SMALL, architecture_of\n"
        "from fleetfit.cost import full_cost\n"
        "for name in ('cnn', 'resnet', 'mobilenetv2', 'vgg16', 'vit', 'bert', 'char_lstm', 'fedavg_cnn'):\n"
        "    print(name, full_cost(architecture_of(name), SMALL[name].shape).multiply_adds > 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd="tests")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("True") == 8

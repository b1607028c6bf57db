"""What it costs to derive levels from a plain module: the derivation, the proof, building a level, a training step.

ResNet-50 (64x64 images) and BERT-base are those of transformers, from their configurations, with random weights. The
proof of the package's own ResNet-20, taken for a plain module, is beside that of its architecture: with one exit, all
tensors are the same; with more, the package's early classifiers are larger. A level of half width is beside the module
that the constructor makes at half width.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.measuring import Figure, Options, amount, ratio
from fleetfit.anatomy import Architecture, infer_layout
from fleetfit.anatomy.derive import derive_architecture
from fleetfit.anatomy.numbers import Trials
from fleetfit.anatomy.observe import observe
from fleetfit.anatomy.proof import check_layout, select_exits
from fleetfit.models.resnet import resnet20

MAX_S = 5.0
WIDTH, CLASSES, BATCH = 32, 10, 32


class Block(nn.Module):
    """A residual block of one width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the same shape."""
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Residual(nn.Module):
    """Nine blocks of one width: as many layers as a ResNet-20."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.layers = nn.Sequential(*[Block(width) for _ in range(9)])
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        logits: Tensor = self.fc(self.layers(self.stem(x)).mean((2, 3)))
        return logits


def figures(options: Options) -> Iterator[Figure]:
    """Derive, prove, build and train."""
    torch.set_num_threads(1)
    for name, make, example in _list_large(options):
        net = make()
        start = time.process_time()
        Trials(observe(net, example))
        yield amount(f"deriving {name}", time.process_time() - start, "s of CPU", wanted=MAX_S)
    x = torch.randn(BATCH, 3, 16, 16)
    derived = derive_architecture(Residual(WIDTH), x)
    written = resnet20(CLASSES, 3)
    net = written.build({axis: part.size for axis, part in written.axes.items()}, (written.blocks,))
    same = derive_architecture(net, x)

    def prove(architecture: Architecture, exits: tuple[int, ...]) -> Callable[[], object]:
        seeds, layout = iter(range(10_000)), infer_layout(architecture, exits)  # a proof is remembered by its seed
        return lambda: check_layout(architecture, layout, input_shape=(3, 16, 16), seed=next(seeds))

    for name, exits in (("one exit", (written.blocks,)), ("five exits", select_exits(written))):
        yield ratio(f"the proof of a ResNet-20 with {name}, derived from the package's module, against the package's",
                    prove(same, exits), prove(written, exits), options.repetitions, wanted=1.0)  # fmt: skip
    half, last = {axis: n // 2 for axis, n in derived.plan.axes.items() if axis != "classes"}, (derived.blocks,)
    yield ratio("building a level of half width, against its constructor",
                lambda: derived.build(half, last), lambda: Residual(WIDTH // 2), options.repetitions,
                wanted=3.0)  # fmt: skip
    level, made = derived.build(half, last), Residual(WIDTH // 2)
    y = torch.randint(CLASSES, (BATCH,))
    yield ratio("a training step of a level of half width, against the constructor's module",
                _make_step(level, x, y), _make_step(made, x, y), 3 * options.repetitions, wanted=1.02)  # fmt: skip


def _make_step(module: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(module.train().parameters(), lr=0.01)

    def step() -> None:
        for _ in range(5):
            out = module(x)
            loss = F.cross_entropy(out[-1] if isinstance(out, list) else out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


def _list_large(options: Options) -> Iterator[tuple[str, Callable[[], nn.Module], Tensor]]:
    try:
        import transformers
    except ImportError:
        return
    resnet = transformers.ResNetConfig(num_labels=1000)
    yield "ResNet-50", lambda: transformers.ResNetForImageClassification(resnet), torch.randn(2, 3, 64, 64)
    if not options.quick:
        bert = transformers.BertConfig()
        yield "BERT-base", lambda: transformers.BertForSequenceClassification(bert), torch.randint(1000, (2, 32))

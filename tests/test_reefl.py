"""ReeFL: Eqs. 2 to 6 by hand, the running estimate, whose part Ree is, what it refuses."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from support import raises
from tiny import plain, tiny, tiny_federation
from torch import Tensor, nn

from fleetfit.aggregate import Mean
from fleetfit.anatomy import Architecture, build_module, infer_layout, named_tensors, outputs
from fleetfit.anatomy.proof import check_layout
from fleetfit.core import LocalResult, Update
from fleetfit.core.tasks import NOT_SCORED, classification, next_token
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError, ModelError
from fleetfit.hooks import FEDAVG, build
from fleetfit.hooks.losses import best_exit_distillation
from fleetfit.methods.depthfl import ramp_up
from fleetfit.models.bert import bert
from fleetfit.models.ree import POSITION_AXIS, Ree, recurrent
from fleetfit.models.resnet import resnet20
from fleetfit.models.vim import vim
from fleetfit.models.vit import deit_s, vit
from fleetfit.rounds import Settings, run, run_round, start
from fleetfit.rounds.report import sum_client_counters
from fleetfit.submodel import Submodel
from fleetfit.training import run_job

SHAPE = (1, 8, 8)


def backbone(depth: int = 4) -> Architecture:
    return vit(5, SHAPE, hidden=16, depth=depth, attention_heads=2, patch=4)


def texts() -> Architecture:
    return bert(3, (7,), vocabulary=11, hidden=12, layers=3, attention_heads=3, max_positions=8, dropout=0.0, padding=0)


def mamba() -> Architecture:
    return vim(3, SHAPE, depth=3, hidden=8, patch=4, state=2)


def module_of(architecture: Architecture, exits: tuple[int, ...]) -> Any:
    torch.manual_seed(1)
    module = build_module(architecture, architecture.sizes(1.0), exits).eval()
    rng = torch.Generator().manual_seed(2)
    for _, tensor, _ in named_tensors(module):  # nothing at zero or one
        tensor.data = 0.3 * torch.randn(tensor.shape, generator=rng)
    return module


# ---- Eq. 2: the block -------------------------------------------------


def naive(ree: Ree, queue: list[Tensor], places: list[int], heads: int) -> Tensor:
    """A whole pre-norm transformer block over all tokens, with plain loops over samples, heads and tokens."""

    def norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
        mean, var = x.mean(), ((x - x.mean()) ** 2).mean()
        return (x - mean) / torch.sqrt(var + layer.eps) * layer.weight + layer.bias

    every = []
    for b in range(len(queue[0])):
        tokens = [ree.meta + ree.positions[0], *(q[b] + ree.positions[p] for q, p in zip(queue, places, strict=True))]
        normed = [norm(t, ree.norm1) for t in tokens]
        q, k, v = ([layer.weight @ t + layer.bias for t in normed] for layer in (ree.query, ree.key, ree.value))
        size = len(q[0]) // heads
        after = []
        for i, token in enumerate(tokens):
            mixed = []
            for h in range(heads):
                own = slice(h * size, (h + 1) * size)
                scores = torch.stack([q[i][own] @ k[j][own] / math.sqrt(size) for j in range(len(tokens))])
                weights = scores.exp() / scores.exp().sum()
                mixed.append(sum(w * v[j][own] for j, w in enumerate(weights)))
            token = token + ree.out.weight @ torch.cat(mixed) + ree.out.bias
            inner = ree.fc1.weight @ norm(token, ree.norm2) + ree.fc1.bias
            inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
            after.append(token + ree.fc2.weight @ inner + ree.fc2.bias)
        every.append(torch.stack(after))
    return torch.stack(every)


def test_the_block_reads_the_whole_queue() -> None:
    """Only two tokens' results are computed, and they are those of the whole block (Eq. 2)."""
    torch.manual_seed(0)
    ree = Ree(12, 16, 6, heads=4, bottleneck=8)
    for p in ree.parameters():
        p.data = 0.4 * torch.randn(p.shape)
    queue, places = [torch.randn(3, 12) for _ in range(4)], [1, 2, 4, 5]
    first, last = ree(queue, places)
    expected = naive(ree, queue, places, heads=4)
    torch.testing.assert_close(first, expected[:, 0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last, expected[:, -1], atol=1e-5, rtol=1e-5)


def test_rees_size_at_deit_s() -> None:
    """430,646 for 12 blocks of width 384, whatever the depth; the classifier of 100 classes has 39,268."""
    architecture = recurrent(deit_s(classes=100), (3, 224, 224))
    with torch.device("meta"):
        module: Any = build_module(architecture, architecture.sizes(1.0), (3, 12))
    assert sum(p.numel() for p in module.ree.parameters()) == 430_646
    assert sum(p.numel() for p in module.classifier.parameters()) == 39_268
    assert not [n for n, _ in module.named_parameters() if ".heads." in n]
    layout = infer_layout(architecture)
    shapes = {d: layout.shapes({}, (d,)) for d in (3, 12)}
    own = {n for n in layout.tensors if n.startswith(("ree.", "classifier."))}
    assert len(own) == 22 and all(own <= set(shape) for shape in shapes.values())


def test_a_backbone_keeps_its_segments_below_ree() -> None:
    """Of a Vision Mamba with 64 tokens and more blocks than its smallest copy has channels."""
    family = vim(3, (3, 32, 32), depth=4, hidden=64, patch=4)
    own, below = infer_layout(family, input_shape=(3, 32, 32)), recurrent(family, (3, 32, 32))
    layout = infer_layout(below, input_shape=(3, 32, 32))
    name = "blocks.0.mixer.in_proj.weight"
    assert layout.tensors[f"backbone.{name}"].dims == own.tensors[name].dims and len(own.tensors[name].dims[0]) == 2


# ---- how it begins -------------------------------------------------


def of_pytorch(ree: Ree) -> Ree:
    """Let the linear layers begin as PyTorch's do."""
    for part in ree.modules():
        if isinstance(part, nn.Linear):
            part.reset_parameters()
    return ree


def test_initial_weights_are_truncated_normal() -> None:
    """Ree, its positions and the shared classifier; a normal of 0.02 cut off there has 0.88 of its deviation."""
    torch.manual_seed(0)
    architecture = recurrent(deit_s(classes=100, depth=3), (3, 224, 224))
    module: Any = build_module(architecture, architecture.sizes(1.0), (1, 3))
    norms = {id(p) for part in module.modules() if isinstance(part, nn.LayerNorm) for p in part.parameters()}
    own = [
        (n, p.detach())
        for part in (module.ree, module.classifier)
        for n, p in part.named_parameters()
        if id(p) not in norms
    ]
    assert len(own) == 16
    for name, tensor in own:
        if name.endswith("bias"):
            assert not bool(tensor.any()), name
        else:
            assert float(tensor.abs().max()) <= 0.04 + 1e-6, name
            assert float(tensor.std()) == pytest.approx(0.0176, rel=0.15), name


@pytest.mark.parametrize("seed", range(3))
def test_modulation_begins_small(seed: int) -> None:
    """Of a token as long as a pretrained MiniLM's (384 numbers of deviation 0.4), at each of its 6 blocks.

    With PyTorch's linear layers it is moved by 0.6 to 0.9 of its length, which leaves a frozen backbone at chance; as
    the authors begin, by 0.17 to 0.24.
    """
    rng = torch.Generator().manual_seed(seed)
    tokens = [0.4 * torch.randn(32, 384, generator=rng) for _ in range(6)]

    def moved(ree: Ree) -> list[float]:
        queue: list[Tensor] = []
        distances = []
        for block, token in enumerate(tokens, 1):
            _, last = ree([*queue, token], list(range(1, block + 1)))
            queue.append(last)
            distances.append(float(((last - token).norm(dim=1) / token.norm(dim=1)).mean()))
        return distances

    torch.manual_seed(seed)
    with torch.no_grad():
        ours, theirs = moved(Ree(384, 518, 7, 8, 16)), moved(of_pytorch(Ree(384, 518, 7, 8, 16)))
    assert all(0.17 <= share <= 0.24 for share in ours), ours
    assert all(0.6 <= share <= 0.95 for share in theirs), theirs


# ---- the kind of classifier -------------------------------------------------


@pytest.mark.parametrize("kind", ["linear", "pooler", "norm"])
@pytest.mark.parametrize("make", [
    lambda head: bert(3, (7,), vocabulary=11, hidden=12, layers=3, attention_heads=3, max_positions=8, head=head),
    lambda head: vit(5, SHAPE, hidden=16, depth=3, attention_heads=2, patch=4, head=head),
    lambda head: vim(3, SHAPE, depth=3, hidden=8, patch=4, state=2, head=head),
])  # fmt: skip
def test_the_shared_classifier_is_the_backbones_kind(kind: str, make: Any) -> None:
    """What other methods train at each exit, ReeFL trains once, for all exits: the same tensors, the same function."""
    plain = make(kind)
    shape = (7,) if plain.tokens else SHAPE
    torch.manual_seed(0)
    theirs: Any = build_module(plain, plain.sizes(1.0), (1, 3)).eval()
    ours: Any = build_module(recurrent(plain, shape), recurrent(plain, shape).sizes(1.0), (1, 3)).eval()
    own = {n.removeprefix("heads.3."): tuple(p.shape) for n, p in theirs.named_parameters() if n.startswith("heads.3.")}
    assert {n: tuple(p.shape) for n, p in ours.classifier.named_parameters()} == own
    ours.classifier.load_state_dict(theirs.heads["3"].state_dict())
    x = torch.randint(11, (2, 7)) if plain.tokens else torch.randn(2, *SHAPE)
    carry = theirs.segment(1, theirs.segment(0, theirs.start(x)))
    torch.testing.assert_close(ours.classifier(theirs.token(carry)), outputs(theirs, x)[1])
    check_layout(recurrent(plain, shape), input_shape=shape)


# ---- Eqs. 3 and 4: the model -------------------------------------------------


def forward_by_hand(
    module: Any, x: Tensor, exits: tuple[int, ...], modulate: bool, original: bool, at: tuple[int, ...]
) -> Any:
    """The forward pass of a ViT with Ree, block by block."""
    inner, logits = module.backbone, []
    tokens = inner.embeddings(x)
    queue: list[Tensor] = []
    places: list[int] = []
    for i, block in enumerate(inner.blocks):
        tokens = block(tokens)
        z = tokens[:, 0]
        if i + 1 in at:
            places.append(i + 1)
            m = naive(module.ree, [*queue, z], places, module.ree.heads)
            queue.append(m[:, -1] if modulate and not original else z)
            if modulate:
                tokens = torch.cat([m[:, -1:], tokens[:, 1:]], dim=1)
            if i + 1 in exits:
                fused = m[:, 0] + z
                head = module.classifier
                normed = nn.functional.layer_norm(fused, (len(fused[0]),), head.norm.weight, head.norm.bias, 1e-12)
                logits.append(normed @ head.fc.weight.T + head.fc.bias)
    return logits


@pytest.mark.parametrize("modulate", [True, False])
@pytest.mark.parametrize("queue", ["modulated", "original"])
@pytest.mark.parametrize("at", ["blocks", "exits"])
@pytest.mark.parametrize("exits", [(1, 2, 3, 4), (2, 4), (3,)])
def test_the_forward_pass_is_the_equations(modulate: bool, queue: Any, at: Any, exits: tuple[int, ...]) -> None:
    architecture = recurrent(backbone(), SHAPE, modulate=modulate, queue=queue, at=at)
    module = module_of(architecture, exits)
    x = torch.randn(3, *SHAPE)
    places = exits if at == "exits" else tuple(range(1, exits[-1] + 1))
    expected = forward_by_hand(module, x, exits, modulate, queue == "original", places)
    for ours, theirs in zip(outputs(module, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_without_ree_only_a_classifier_is_shared() -> None:
    """Appendix G."""
    module = module_of(recurrent(backbone(), SHAPE, ree=False), (2, 4))
    x = torch.randn(3, *SHAPE)
    tokens, expected = module.backbone.embeddings(x), []
    for i, block in enumerate(module.backbone.blocks):
        tokens = block(tokens)
        if i + 1 in (2, 4):
            expected.append(module.classifier(tokens[:, 0]))
    assert not [n for n, _ in module.named_parameters() if n.startswith("ree.")]
    for ours, theirs in zip(outputs(module, x), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_class_token_of_other_backbones() -> None:
    """BERT's first token, Vision Mamba's in the middle, the state itself of a model without tokens."""
    for architecture, x in (
        (texts(), torch.randint(11, (2, 7))), (mamba(), torch.randn(2, *SHAPE)), (tiny(), torch.randn(2, 1, 4, 4)),
    ):  # fmt: skip
        module: Any = build_module(architecture, architecture.sizes(1.0), (1, architecture.blocks))
        carry = module.segment(0, module.start(x))
        token = module.token(carry)
        changed = module.with_token(carry, token + 1)
        torch.testing.assert_close(module.token(changed), token + 1)
        back = module.with_token(changed, token)
        pairs = zip(back, carry, strict=True) if isinstance(carry, tuple) else [(back, carry)]
        assert all(torch.equal(a, b) for a, b in pairs)
    middle: Any = build_module(mamba(), mamba().sizes(1.0), (3,))
    tokens = torch.arange(5.0)[None, :, None].expand(1, 5, 8)
    assert middle.class_position == 2 and torch.equal(middle.token(tokens), torch.full((1, 8), 2.0))


@pytest.mark.parametrize(
    ("architecture", "shape"),
    [
        (backbone(), SHAPE), (texts(), (7,)), (mamba(), SHAPE), (tiny(norm=False), (1, 4, 4)),
        (vit(5, SHAPE, hidden=16, depth=3, attention_heads=2, patch=4, heads="fixed"), SHAPE),
    ],
)  # fmt: skip
@pytest.mark.parametrize("at", ["blocks", "exits"])
def test_its_layout_is_proven(architecture: Architecture, shape: tuple[int, ...], at: Any) -> None:
    wrapped = recurrent(architecture, shape, at=at)
    report = check_layout(wrapped, input_shape=shape)
    assert max(report.permutation.values()) < 1e-9
    assert report.cuts and all(error < 1e-9 for error in report.cuts.values())
    assert not report.not_proved


def test_ree_begins_as_its_backbone() -> None:
    plain, wrapped = backbone(), recurrent(backbone(), SHAPE)
    theirs = {n: t for n, t, _ in named_tensors(module_of(plain, (2, 4)))}
    adopted = wrapped.rename_tensors(theirs)
    assert torch.equal(adopted["backbone.blocks.2.norm1.weight"], theirs["blocks.2.norm1.weight"])
    assert torch.equal(adopted["classifier.fc.weight"], theirs["heads.4.fc.weight"])
    assert set(adopted) <= set(infer_layout(wrapped).tensors)
    assert wrapped.rename_tensors(adopted).keys() == adopted.keys()  # one of its own stays as it is


# ---- what it refuses -------------------------------------------------


def test_backbones_of_changing_size_are_refused() -> None:
    with raises(ModelError, "(2, 16, 8, 8)"):
        recurrent(resnet20(channels=1), SHAPE)
    growing = Growing()
    with raises(ModelError, 4, 6, 2):
        recurrent(growing, (3,))


class GrowingModule(nn.Module):
    def __init__(self, exits: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.exits, widths = exits, (4, 4, 6)
        self.stem = nn.Linear(3, 4)
        self.blocks = nn.ModuleList(nn.Linear(widths[i], widths[i + 1]) for i in range(exits[-1]))
        self.heads = nn.ModuleDict({str(e): nn.Linear(widths[e], classes) for e in exits})

    def start(self, x: Tensor) -> Tensor:
        return self.stem(x)

    def segment(self, i: int, carry: Tensor) -> Tensor:
        for b in range(self.exits[i - 1] if i else 0, self.exits[i]):
            carry = self.blocks[b](carry)
        return carry

    def head(self, i: int, carry: Tensor) -> Tensor:
        return self.heads[str(self.exits[i])](carry)

    def token(self, carry: Tensor) -> Tensor:
        return carry

    def with_token(self, carry: Tensor, token: Tensor) -> Tensor:
        return token

    def forward(self, x: Tensor) -> list[Tensor]:
        carry, logits = self.start(x), []
        for i in range(len(self.exits)):
            carry = self.segment(i, carry)
            logits.append(self.head(i, carry))
        return logits


class Growing(Architecture):
    blocks = 2

    @property
    def axes(self) -> Any:
        return tiny().axes

    def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
        return GrowingModule(exits, axes["classes"])


def test_a_module_without_blocks_is_refused() -> None:
    class Whole(Architecture):
        blocks = 1
        axes = tiny().axes

        def build(self, axes: Mapping[str, int], exits: tuple[int, ...]) -> nn.Module:
            return nn.Sequential(nn.Flatten(), nn.Linear(16, 4))

    with raises(ModelError, "with_token"):
        recurrent(Whole(), (1, 4, 4))


@pytest.mark.parametrize(
    "wrong",
    [{"heads": 3}, {"mlp": 0.0}, {"heads": 0}, {"at": "end"}, {"queue": "new"}, {"zeta": 0.0}, {"weight": -1.0},
     {"temperature": 0.0}, {"ramp": -1}, {"teacher": "deepest"}, {"estimate": "zero"}],
)  # fmt: skip
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    kind = ModelError if wrong.keys() & {"heads", "mlp"} else ConfigError
    with raises(kind, next(iter(wrong))):
        tiny_federation({"name": "reefl", **wrong})


# ---- Eqs. 5 and 6: the loss -------------------------------------------------


@pytest.mark.parametrize("teacher", [0, 2])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_loss_is_equations_5_and_6(teacher: int, temperature: float) -> None:
    """sum_e CE_e + eta / N sum_{e != e~} sum_j sum_c p~ log(p~ / p) tau^2, p softened by tau."""
    torch.manual_seed(0)
    logits = [torch.randn(3, 4, requires_grad=True) for _ in range(3)]
    y, share = torch.tensor([0, 3, 1]), 0.7

    def softmax(row: Any, tau: float) -> list[float]:
        e = [math.exp(float(v) / tau) for v in row]
        return [v / sum(e) for v in e]

    expected = 0.0
    for e, z in enumerate(logits):
        for j in range(3):
            row, best = z[j].tolist(), logits[teacher][j].tolist()
            expected -= math.log(softmax(row, 1.0)[y[j]]) / 3
            if e != teacher:
                p, q = softmax(best, temperature), softmax(row, temperature)
                kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
                expected += share * kl * temperature**2 / 3
    losses = torch.stack([classification.loss(z, y) for z in logits])
    total = best_exit_distillation(logits, losses, torch.tensor(teacher), y, classification, share, temperature)
    assert float(total.detach()) == pytest.approx(expected, abs=1e-5)
    total.backward()
    alone = logits[teacher].detach().clone().requires_grad_()
    classification.loss(alone, y).backward()
    torch.testing.assert_close(logits[teacher].grad, alone.grad)  # the teacher learns from its labels only


def test_unscored_positions_are_not_distilled() -> None:
    """With half of the tokens left out, the loss is that of the other half alone."""
    torch.manual_seed(0)
    logits = [torch.randn(2, 6, 5) for _ in range(3)]
    y = torch.tensor([[1, 2, 0, NOT_SCORED, NOT_SCORED, NOT_SCORED]] * 2)

    def total(logits: list[torch.Tensor], y: torch.Tensor) -> float:
        losses = torch.stack([next_token.loss(z, y) for z in logits])
        return float(best_exit_distillation(logits, losses, torch.tensor(1), y, next_token, 0.5, 2.0))

    assert total(logits, y) == pytest.approx(total([z[:, :3] for z in logits], y[:, :3]), rel=1e-6)
    assert total(logits, y) != pytest.approx(total(logits, y.clamp(min=0)), rel=1e-3)


# ---- the running estimate -------------------------------------------------


def job_and_device(spec: Mapping[str, Any], client: int = 2) -> Any:
    federation, simulation = tiny_federation(spec)
    server = start(federation)
    seen: list[Any] = []

    class Engine:
        def run(self, jobs: Any) -> Any:
            for job in jobs:
                seen.append(job)
                yield from local_engine(simulation).run(iter([job]))

        def commit_memory(self, update: Any) -> None:
            pass

    run_round(federation, Engine(), Settings(1, plain(lr=0.1, batch_size=8)), server)  # type: ignore[arg-type]
    job = next(j for j in seen if len(j.submodel.exits) == 3)
    return job, simulation.device(job.client), build(spec)


class Given(nn.Module):
    """Logits whose losses are as wanted: log(1 + 3 exp(-s)) for the right class at s and three others at 0."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([-math.log((math.exp(v) - 1) / 3) for v in losses]))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [torch.stack([s, s * 0, s * 0, s * 0])[None] for s in self.scale]


def test_the_estimate_begins_at_zero_in_every_round() -> None:
    """e <- 0.8 e + 0.2 new from 0 on, as in the authors' code; worked by hand, and nothing is remembered."""
    job, device, method = job_and_device({"name": "reefl", "ramp": 0})
    assert method.update_client_memory is FEDAVG.update_client_memory
    y = torch.tensor([0])
    for memory in (None, {"exit_losses": {"exits": [1, 2, 3], "losses": torch.tensor([9.0, 0.0, 0.0])}}):
        loss: Any = method.make_loss(job, replace(device, memory=memory))
        loss(Given([1.0, 0.9, 1.1]), None, y)
        assert loss.estimate.tolist() == pytest.approx([0.2, 0.18, 0.22], abs=1e-5)
        loss(Given([0.5, 1.3, 1.0]), None, y)
        assert loss.estimate.tolist() == pytest.approx([0.26, 0.404, 0.376], abs=1e-5)
        assert loss.count_teachers() == {"1": 1, "2": 1, "3": 0}


def test_the_teacher_has_the_lowest_estimate() -> None:
    """e <- 0.8 e + 0.2 new from the first batch's losses on; worked by hand."""
    job, device, method = job_and_device({"name": "reefl", "ramp": 0, "estimate": "kept"})
    loss: Any = method.make_loss(job, device)
    y = torch.tensor([0])
    loss(Given([1.0, 0.9, 1.1]), None, y)
    assert loss.estimate.tolist() == pytest.approx([1.0, 0.9, 1.1], abs=1e-5)
    loss(Given([0.9, 1.3, 1.0]), None, y)  # 0.98, 0.98 - but 0.9 * 0.8 + 1.3 * 0.2 = 0.98, 1.08
    assert loss.estimate.tolist() == pytest.approx([0.98, 0.98, 1.08], abs=1e-5)
    loss(Given([0.2, 0.5, 0.1]), None, y)  # the batch says exit 3, the estimate exit 1: 0.824, 0.884, 0.884
    assert loss.estimate.tolist() == pytest.approx([0.824, 0.884, 0.884], abs=1e-5)
    counts = loss.count_teachers()
    assert sum(counts.values()) == 3 and counts["3"] == 0 and counts["1"] >= 1 and counts["2"] >= 1
    batch: Any = build({"name": "reefl", "ramp": 0, "teacher": "batch"}).make_loss(job, device)
    for losses in ([1.0, 0.9, 1.1], [0.9, 1.3, 1.0], [0.2, 0.5, 0.1]):
        batch(Given(losses), None, y)
    assert batch.count_teachers() == {"1": 1, "2": 1, "3": 1}


def test_estimates_are_remembered() -> None:
    job, device, method = job_and_device({"name": "reefl", "estimate": "kept"})
    loss: Any = method.make_loss(job, device)
    loss(Given([1.0, 2.0, 3.0]), None, torch.tensor([0]))
    memory = method.update_client_memory(job, device, LocalResult({}, loss))
    assert memory["exit_losses"]["exits"] == [1, 2, 3]
    again: Any = method.make_loss(job, replace(device, memory=memory))
    again(Given([2.0, 2.0, 2.0]), None, torch.tensor([0]))
    assert again.estimate.tolist() == pytest.approx([1.2, 2.0, 2.8], abs=1e-5)
    piece = replace(job.submodel, exits=(1, 2))  # a shallower job: what is known of exit 3 stays
    short = replace(job, submodel=piece)
    shallow: Any = method.make_loss(short, replace(device, memory=memory))
    shallow(Given([1.0, 1.0]), None, torch.tensor([0]))
    next_memory = method.update_client_memory(short, replace(device, memory=memory), LocalResult({}, shallow))[
        "exit_losses"
    ]
    assert next_memory["exits"] == [1, 2, 3] and next_memory["losses"].tolist() == pytest.approx(
        [1.0, 1.8, 3.0], abs=1e-5
    )


def test_estimates_begin_with_the_first_loss() -> None:
    """A client that afforded two exits so far gets three: at 0 the new one would be the teacher for a long time."""
    job, device, method = job_and_device({"name": "reefl", "estimate": "kept", "ramp": 0})
    estimate = {"exit_losses": {"exits": [1, 2], "losses": torch.tensor([1.0, 2.0])}}
    loss: Any = method.make_loss(job, replace(device, memory=estimate))
    loss(Given([1.0, 2.0, 3.0]), None, torch.tensor([0]))
    assert loss.estimate.tolist() == pytest.approx([1.0, 2.0, 3.0], abs=1e-5)
    assert loss.count_teachers() == {"1": 1, "2": 0, "3": 0}
    assert method.update_client_memory(job, replace(device, memory=estimate), LocalResult({}, loss))["exit_losses"][
        "exits"
    ] == [
        1,
        2,
        3,
    ]


def test_estimate_and_feddyn_are_both_remembered() -> None:
    """Each as it is alone: what one part of a method remembers is none of the other's business."""
    memories = {}
    for name, spec in {
        "reefl": {"name": "reefl", "weight": 0.0, "estimate": "kept"},
        "both": {"name": "reefl", "weight": 0.0, "estimate": "kept", "options": {"feddyn": {}}},
        "feddyn": {"name": "reefl", "weight": 0.0, "options": {"feddyn": {}}},
    }.items():
        job, device, _ = job_and_device(spec)
        for round in (0, 1):
            reply, memory = run_job(replace(job, round=round), device)
            assert isinstance(reply, Update)
            device = replace(device, memory=memory)
        memories[name] = memory
    assert set(memories["reefl"]) == {"exit_losses"} and set(memories["feddyn"]) == {"gradient"}
    assert set(memories["both"]) == {"exit_losses", "gradient"}
    assert memories["both"]["exit_losses"]["exits"] == [1, 2, 3]
    both, alone = (memories[name]["gradient"]["state"] for name in ("both", "feddyn"))
    assert both.keys() == alone.keys() and all(torch.equal(both[name], tensor) for name, tensor in alone.items())
    assert bool(both["ree.query.weight"].any())


def test_the_distillation_grows_over_rounds() -> None:
    job, device, method = job_and_device({"name": "reefl", "ramp": 10})
    values = []
    for round in (0, 5, 10):
        loss = method.make_loss(replace(job, round=round), device)
        values.append(float(loss(Given([0.5, 1.0, 2.0]), None, torch.tensor([0])).detach()))
    plain = 3.5
    full = values[2] - plain
    assert values[0] - plain == pytest.approx(full * ramp_up(0, 10), abs=1e-5)
    assert values[1] - plain == pytest.approx(full * math.exp(-5 * 0.25), abs=1e-5)


def test_teachers_are_counted_by_level_in_the_report() -> None:
    federation, simulation = tiny_federation({"name": "reefl"}, clients=6, cohort=6)
    *_, last = run(federation, local_engine(simulation), Settings(2, plain(lr=0.1, batch_size=8)), start(federation))
    counts = last.report["counts"]["teachers"]
    assert set(counts) == {"1", "2", "3"} and set(counts["3"]) == {"1", "2", "3"} and set(counts["1"]) == {"1"}
    steps = [math.ceil(len(simulation.parts[c]["train"]) / 8) for c in range(6)]
    assert sum(counts["1"].values()) == steps[0] + steps[3]


def test_only_tables_of_numbers_are_added_up() -> None:
    """What else a method puts into an update's metrics is none of the report's business."""
    piece = Submodel({}, (1,))
    updates = [
        Update(0, i, i, 0, piece, piece, {}, 1, metrics)
        for i, metrics in enumerate(({"seen": {"a": 1, "b": 2}}, {"seen": {"a": 3}, "said": {"a": "text"}}))
    ]
    assert sum_client_counters(updates, (1, 2)) == {"seen": {"1": {"a": 4, "b": 2}}}


# ---- whose part Ree is -------------------------------------------------


def test_ree_belongs_to_every_sub_model() -> None:
    """All clients train Ree and the classifier; a row of the position table, those who are deep enough."""
    federation, simulation = tiny_federation({"name": "reefl"}, clients=6, cohort=6)
    problem = federation.problem
    by_depth = [replace(level, submodel=problem.submodel(1.0, level.submodel.exits)) for level in federation.levels]
    federation = replace(federation, levels=tuple(by_depth))
    assert POSITION_AXIS in federation.levels[0].submodel.channels
    engine, seen = local_engine(simulation), []

    class Watching:
        def run(self, jobs: Any) -> Any:
            for reply in engine.run(jobs):
                seen.append(reply)
                yield reply

        def commit_memory(self, update: Any) -> None:
            engine.commit_memory(update)

    server = start(federation)
    after, _ = run_round(federation, Watching(), Settings(1, plain(lr=0.1, batch_size=8)), server)  # type: ignore[arg-type]
    mean = Mean(problem.layout, torch.device("cpu"))
    for update in seen:
        mean.add(update.submodel, update.state, update.num_examples)
    coverage, samples = mean.result().coverage, [u.num_examples for u in seen]
    depth = {1: 0, 2: 1, 3: 2}
    assert bool((coverage["ree.query.weight"] == sum(samples)).all())
    assert bool((coverage["classifier.fc.weight"] == sum(samples)).all())
    for row in range(4):
        deep = sum(u.num_examples for u in seen if u.level >= depth.get(row, 0))
        assert bool((coverage["ree.positions"][row] == deep).all()), row
    shallow = [u for u in seen if u.level == 0]
    assert shallow[0].state["ree.positions"].shape[0] == 2
    only = Mean(problem.layout, torch.device("cpu"))
    for update in shallow:
        only.add(update.submodel, update.state, 1.0)
    assert not bool(only.result().coverage["ree.positions"][2:].any())
    assert not torch.equal(after.state["ree.positions"], server.state["ree.positions"])

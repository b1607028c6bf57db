"""Vision Mamba: its scan against plain loops and transformers' mixer, its sizes by hand, its layout."""

from collections.abc import Sequence

import pytest
import torch
from sklearn.datasets import load_digits
from support import raises
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from zoo import arrange

from fleetfit.anatomy import Segment, build_module, infer_layout
from fleetfit.anatomy.proof import check_layout
from fleetfit.cost import submodel_cost
from fleetfit.errors import ModelError
from fleetfit.models import selective_scan
from fleetfit.models.selective_scan import SelectiveScan, scan
from fleetfit.models.vim import Mixer, vim, vim_ti

TINY = vim(5, (3, 8, 8), depth=3, hidden=12, patch=4, rank=3, state=4)


def make_inputs(tokens: int, batch: int, channels: int, states: int) -> tuple[Tensor, ...]:
    """Return x, step, A, B and C of a scan in float64, with gradients."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    x, step = normal(tokens, batch, channels), normal(tokens, batch, channels).exp() / 2
    tensors = (x, step, -normal(channels, states).exp(), normal(tokens, batch, states), normal(tokens, batch, states))
    return tuple(t.requires_grad_() for t in tensors)


# ---- the scan -----------------------------------------------------------------------------------------------------


def test_the_scan_is_the_recurrence_written_with_loops() -> None:
    x, step, a, b, c = (t.detach() for t in make_inputs(5, 2, 3, 2))
    expected = torch.zeros_like(x)
    for k in range(2):
        for d in range(3):
            for n in range(2):
                h = 0.0
                for t in range(5):
                    decay = float(torch.exp(step[t, k, d] * a[d, n]))
                    h = decay * h + float(step[t, k, d] * b[t, k, n] * x[t, k, d])
                    expected[t, k, d] += c[t, k, n] * h
    torch.testing.assert_close(scan(x, step, a, b, c), expected)


@pytest.mark.parametrize("room", [1, 12, 30, 10**6])
def test_gradients_of_the_scan(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Seven tokens in chunks of one, two (the last is shorter), five and all of them."""
    monkeypatch.setattr(selective_scan, "_CPU_CHUNK", room)
    inputs = make_inputs(7, 1, 3, 2)
    lengths = [s.stop - s.start for s in selective_scan._split_tokens(inputs[0], 2)]
    assert lengths == {1: [1] * 7, 12: [2, 2, 2, 1], 30: [5, 2], 10**6: [7]}[room]
    assert torch.autograd.gradcheck(scan, inputs)


def test_gradients_that_arrive_in_another_memory_order() -> None:
    inputs = make_inputs(6, 3, 4, 2)
    weight = torch.randn(3, 6, 4, dtype=torch.float64).transpose(0, 1)
    assert not weight.is_contiguous()
    ours = torch.autograd.grad((scan(*inputs) * weight).sum(), inputs)
    theirs = torch.autograd.grad((selective_scan._scan_by_doubling(*inputs) * weight).sum(), inputs)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9])
def test_doubling_gives_the_same(tokens: int) -> None:
    inputs = make_inputs(tokens, 2, 3, 2)
    torch.testing.assert_close(selective_scan._scan_by_doubling(*inputs), scan(*inputs))


def test_export_takes_few_nodes_and_any_batch() -> None:
    architecture = vim(4, (1, 8, 8), depth=1, hidden=8, patch=1, state=2)  # 65 tokens
    module = build_module(architecture, architecture.sizes(1.0), (1,)).eval()
    shapes = ({0: torch.export.Dim("batch")},)
    exported = torch.export.export(module, (torch.randn(2, 1, 8, 8),), dynamic_shapes=shapes)
    assert len(exported.graph.nodes) < 300  # a loop over tokens makes more than a thousand
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(exported.module()(x), module(x))


# ---- transformers' mixer ------------------------------------------------------------------------------------------


def library_mixer(hidden: int, inner: Sequence[Tensor], own: SelectiveScan) -> MambaMixer:
    """Return the library's mixer with one direction's tensors and the projections in and out of the block."""
    settings = {"hidden_size": hidden, "state_size": own.state, "expand": 2, "conv_kernel": 4}
    mixer = MambaMixer(MambaConfig(**settings, time_step_rank=own.rank), 0)
    state = {**own.state_dict(), "in_proj.weight": inner[0], "out_proj.weight": inner[1]}
    mixer.load_state_dict(state)
    return mixer


def redrawn(module: nn.Module) -> nn.Module:
    """Give every parameter numbers that make a difference."""
    rng = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=rng)
    return module


def mixer_and_library() -> tuple[Mixer, MambaMixer, MambaMixer]:
    architecture = vim(5, (3, 8, 8), depth=1, hidden=8, patch=4, rank=2, state=3)
    mixer = redrawn(Mixer(architecture, architecture.sizes(1.0)))
    around = (mixer.in_proj.weight, mixer.out_proj.weight)
    return mixer, library_mixer(8, around, mixer.forwards), library_mixer(8, around, mixer.backwards)


def test_one_direction_equals_the_library() -> None:
    mixer, library, _ = mixer_and_library()
    x = torch.randn(2, 9, 8, requires_grad=True)
    stream, gate = mixer.in_proj(x).chunk(2, dim=-1)
    ours = mixer.out_proj(mixer.forwards(stream.transpose(1, 2)).transpose(0, 1) * F.silu(gate))
    theirs = library(x)
    torch.testing.assert_close(ours, theirs)
    weight = torch.randn_like(ours)
    (of_x,) = torch.autograd.grad((ours * weight).sum(), x, retain_graph=True)
    (ours * weight).sum().backward()
    torch.testing.assert_close(of_x, torch.autograd.grad((theirs * weight).sum(), x, retain_graph=True)[0])
    (theirs * weight).sum().backward()
    pairs = {**dict(mixer.forwards.named_parameters()), "in_proj.weight": mixer.in_proj.weight,
             "out_proj.weight": mixer.out_proj.weight}  # fmt: skip
    assert pairs.keys() == dict(library.named_parameters()).keys()
    for name, parameter in pairs.items():
        torch.testing.assert_close(parameter.grad, library.get_parameter(name).grad, msg=name)


def test_the_model_equals_library_mixers() -> None:
    """Projecting back is linear, so a block is the mean of a mixer on the tokens and one on the flipped tokens."""
    module = redrawn(build_module(TINY, TINY.sizes(1.0), (2, 3)))
    x = torch.randn(2, 3, 8, 8)
    patches = F.conv2d(x, module.patch_embedding.weight, module.patch_embedding.bias, stride=4)
    rows = [patches[:, :, 0, 0], patches[:, :, 0, 1], patches[:, :, 1, 0], patches[:, :, 1, 1]]
    rows.insert(2, module.class_token[0].expand(2, -1))  # in the middle
    h = torch.stack(rows, dim=1) + module.position_embedding
    expected = []
    for block in module.blocks:
        around = (block.mixer.in_proj.weight, block.mixer.out_proj.weight)
        there, back = (library_mixer(12, around, d) for d in (block.mixer.forwards, block.mixer.backwards))
        normed = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-5) * block.norm.weight
        h = h + (there(normed) + back(normed.flip(1)).flip(1)) / 2
        expected.append(h[:, 2])
    for logits, token, head in zip(module(x), expected[1:], module.heads.values(), strict=True):
        normed = token * torch.rsqrt(token.square().mean(-1, keepdim=True) + 1e-5) * head.norm.weight
        torch.testing.assert_close(logits, F.linear(normed, head.fc.weight, head.fc.bias))


# ---- sizes --------------------------------------------------------------------------------------------------------


def block_by_hand(hidden: int, inner: int, rank: int, state: int, kernel: int) -> int:
    one_way = inner * (kernel + 1) + inner * (rank + 2 * state) + (rank + 1) * inner + inner * state + inner
    return hidden + hidden * 2 * inner + inner * hidden + 2 * one_way


def test_parameters_of_vim_t() -> None:
    """Zhu et al. print 7 M: 24 blocks, 197 positions, a class token, patches of 16x16x3, a norm and 1,000 classes."""
    assert block_by_hand(192, 384, 12, 16, 4) == 282_048
    expected = 24 * 282_048 + 197 * 192 + 192 + (768 + 1) * 192 + 192 + (192 + 1) * 1000
    assert expected == 7_148_008
    assert submodel_cost(vim_ti(1000), ({}, (24,)), (3, 224, 224)).parameters == expected


def test_narrow_and_shallow_sizes_by_hand() -> None:
    architecture = vim_ti(100, (3, 32, 32), patch=4)
    sizes = architecture.sizes(0.4)
    assert sizes == {"hidden": 76, "inner": 153, "rank": 4, "classes": 100}
    expected = 6 * block_by_hand(76, 153, 4, 16, 4) + 65 * 76 + 76 + (48 + 1) * 76 + 2 * (76 + 77 * 100)
    assert submodel_cost(architecture, (sizes, (3, 6)), (3, 32, 32)).parameters == expected


@pytest.mark.parametrize(("classes", "side", "patch", "width"), [(1000, 224, 16, 1.0), (10, 32, 4, 0.5)])
def test_multiply_adds_by_hand(classes: int, side: int, patch: int, width: float) -> None:
    """Per token and direction: the projections, four for each channel and state in the scan, and the convolution, which
    also runs over the three places behind the last token.

    Zhu et al. print 1.5 G for Vim-T at 224x224.
    """
    architecture = vim_ti(classes, (3, side, side), patch)
    sizes = architecture.sizes(width)
    hidden, inner, rank, patches = sizes["hidden"], sizes["inner"], sizes["rank"], (side // patch) ** 2
    tokens = patches + 1
    one_way = tokens * (inner * (rank + 32) + rank * inner + 4 * inner * 16) + (tokens + 3) * inner * 4
    block = tokens * (hidden * 2 * inner + inner * hidden) + 2 * one_way
    expected = patches * hidden * 3 * patch**2 + 24 * block + hidden * classes
    multiply_adds = submodel_cost(architecture, (sizes, (24,)), (3, side, side)).multiply_adds
    assert multiply_adds == expected
    if side == 224:
        assert multiply_adds == pytest.approx(1.5e9, rel=0.03)


def test_heads_and_patches_follow_the_input() -> None:
    assert vim(input_shape=(1, 28, 28), patch=7).patches == 16
    assert vim(input_shape=(1, 32, 16), patch=8).patches == 8
    assert vim(hidden=200).rank == 13


# ---- layout, initial weights, training ----------------------------------------------------------------------------


def test_the_layout_passes_all_parts() -> None:
    architecture = vim(3, (1, 6, 6), depth=2, hidden=9, patch=2, expand=1, rank=2, state=1)
    report = check_layout(architecture, input_shape=architecture.input_shape)
    assert report.permutation.keys() == architecture.axes.keys()
    assert not report.not_proved and report.cuts
    assert max([*report.permutation.values(), *report.cuts.values()]) < 1e-12


def test_a_wrong_order_of_projections_is_refused() -> None:
    architecture = vim(5, (3, 8, 8), depth=1, hidden=12, patch=4, rank=3, state=4)
    layout = infer_layout(architecture, input_shape=(3, 8, 8))
    wrong = arrange(layout, {("blocks.0.mixer.in_proj.weight", 0): (Segment("inner", per=2),)})
    with raises(ModelError, '"inner"', "in_proj"):
        check_layout(architecture, wrong, example=torch.randn(2, 3, 8, 8))


def test_exits_read_the_class_token() -> None:
    module = redrawn(build_module(TINY, TINY.sizes(1.0), (1,)))
    x = torch.randn(1, 3, 8, 8, requires_grad=True)
    module(x)[0].sum().backward()
    assert module.class_position == 2
    assert all(patch.abs().sum() > 0 for patch in x.grad.unfold(2, 4, 4).unfold(3, 4, 4).flatten(1, 3)[0])
    ways = torch.randn(1, 24, 5, requires_grad=True)
    module.blocks[0].mixer.forwards(ways)[2].sum().backward()  # nothing from behind
    assert ways.grad[..., :3].abs().min() > 0
    assert not ways.grad[..., 3:].any()


def test_initial_weights_are_the_authors() -> None:
    torch.manual_seed(0)
    architecture = vim(10, (3, 32, 32), depth=4, hidden=64, patch=4)
    module = build_module(architecture, architecture.sizes(1.0), (4,)).requires_grad_(False)
    for block in module.blocks:
        for way in (block.mixer.forwards, block.mixer.backwards):
            torch.testing.assert_close(way.A_log.exp(), torch.arange(1.0, 17).expand(128, -1))
            steps = F.softplus(way.dt_proj.bias)
            assert 0.00099 < float(steps.min()) < 0.003
            assert 0.04 < float(steps.max()) < 0.1001
            assert bool((way.D == 1).all())
            assert float(way.dt_proj.weight.abs().max()) == pytest.approx(4**-0.5, rel=0.05)
    bound = 128**-0.5 / 4**0.5  # uniform up to 1 / sqrt(inputs), over the root of the depth
    assert float(module.blocks[3].mixer.out_proj.weight.abs().max()) == pytest.approx(bound, rel=0.01)
    assert float(module.position_embedding.std()) == pytest.approx(0.02, rel=0.1)
    assert float(module.patch_embedding.weight.std()) == pytest.approx(48**-0.5, rel=0.1)
    assert not module.heads["4"].fc.bias.any()


@pytest.mark.slow
def test_it_learns_the_digits() -> None:
    """Two narrow blocks over sixteen patches, trained centrally, classify unseen digits from either exit."""
    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    x = (x.float().view(-1, 1, 8, 8) / 16 - 0.5) / 0.25
    architecture = vim(10, (1, 8, 8), depth=2, hidden=24, patch=2, state=4)
    torch.manual_seed(0)
    module = build_module(architecture, architecture.sizes(1.0), (1, 2))
    order = torch.randperm(len(x))
    train, test = order[:1400], order[1400:]
    optimizer = torch.optim.AdamW(module.parameters(), 5e-3)
    for _ in range(6):
        for batch in train[torch.randperm(len(train))].split(32):
            optimizer.zero_grad()
            sum(F.cross_entropy(out, y[batch]) for out in module(x[batch])).backward()
            optimizer.step()
    with torch.no_grad():
        accuracies = [float((out.argmax(1) == y[test]).float().mean()) for out in module.eval()(x[test])]
    assert accuracies[0] > 0.8
    assert accuracies[1] > 0.9

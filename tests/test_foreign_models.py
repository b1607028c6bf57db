"""Models as other people write them: each goes from `check-model` to a run, its modules unedited."""

from pathlib import Path

import numpy as np
import pytest
import torch
from foreign_models import FOREIGN, Foreign
from support import run_verb

from fleetfit.anatomy import build_module, infer_layout, named_tensors
from fleetfit.methods.inclusivefl import find_own_blocks
from fleetfit.submodel import Submodel

HERE = Path(__file__).parent
ROUNDS = 2


@pytest.mark.parametrize("name", FOREIGN)
def test_every_depth_has_the_tensors_of_its_layout(name: str) -> None:
    """Names and shapes of every prefix of the exits at two widths, against what the builder makes."""
    family = FOREIGN[name].build_architecture()
    layout = infer_layout(family, input_shape=FOREIGN[name].input_shape)
    for width in (0.4, 0.75, 1.0):
        for n in range(1, len(layout.exits) + 1):
            piece = Submodel({axis: range(k) for axis, k in family.sizes(width).items()}, layout.exits[:n])
            with torch.device("meta"):
                module = build_module(family, piece.sizes, piece.exits)
            built = {key: tuple(t.shape) for key, t, _ in named_tensors(module) if key not in layout.aliases}
            assert built == layout.shapes(piece.sizes, piece.exits)


PLACES = {
    "ViT": {"vit.layers.2.1.1.weight": (2, None), "norms.3.weight": (None, 3), "to_logits.4.bias": (None, 4)},
    "Text": {"text.encoder.layers.1.linear1.bias": (1, None), "classifiers.0.weight": (None, 1)},
    "Residual": {"net.layer3.0.downsample.0.weight": (2, None), "fc2.2.weight": (None, 2), "fc3.2.bias": (None, 3)},
    "Unet": {"net.up2.weight": (1, None), "net.dec1.0.weight": (2, None), "out.3.2.weight": (None, 3)},
    "Gru": {"net.second.weight_hh_l0": (1, None), "readouts.2.weight": (None, 2)},
    "Convnext": {"net.stages.1.down.weight": (2, None), "net.stages.1.blocks.1.gamma": (3, None)},
    "Dense": {"net.denselayer3.conv.weight": (2, None), "classifier3.weight": (None, 3)},
    "Mixer": {"mixer.3.norm1.weight": (3, None), "fcs.0.weight": (None, 1), "norms.3.bias": (None, 4)},
    "Decoder": {"layers.2.w1.weight": (2, None), "norms.1.weight": (None, 1), "tok_embeddings.weight": (None, None)},
    "Fused": {"bridge.weight": (3, None), "middle_score.weight": (None, 2), "h.0.ln.bias": (None, None)},
}


@pytest.mark.parametrize("name", PLACES)
def test_blocks_and_exits_need_no_names(name: str) -> None:
    tensors = infer_layout(FOREIGN[name].build_architecture(), input_shape=FOREIGN[name].input_shape).tensors
    assert {key: (tensors[key].block, tensors[key].exit) for key in PLACES[name]} == PLACES[name]


def settings(foreign: Foreign, folder: Path) -> list[str]:
    """What a run needs beside the model: digits, or sequences of tokens that are made up."""
    if "vocabulary" not in foreign.arguments:
        return ["data.name=digits"]
    rng = np.random.default_rng(0)
    x = rng.integers(30, size=(160, 12))
    y = x if foreign.task == "next_token" else (x[:, 0] > 14).astype(int)
    np.savez(folder / "words.npz", x=x, y=y)
    task = ["data.task=next_token", "data.partition.kind=iid"] if foreign.task == "next_token" else []
    return ["data.name=arrays", f"data.file={folder / 'words.npz'}", "data.vocabulary=30", *task]


def test_blocks_of_own_levels_are_found() -> None:
    """InclusiveFL's levels hand on the movement of blocks like their last one, whatever the blocks are called."""
    layout = infer_layout(FOREIGN["Wave"].build_architecture(), input_shape=FOREIGN["Wave"].input_shape)
    blocks = find_own_blocks(layout, (1, 2, 3))
    assert set(blocks.top[2]) == set(blocks.top[3]) and not blocks.top[3].keys() & layout.tensors.keys()
    assert blocks.top[3]["block:skip.weight"] == "dilated.2.skip.weight"
    assert len(blocks.further[3]) == 1


def test_ordered_classifiers_need_first_exits(tmp_path: Path) -> None:
    values = ["data.name=digits", "data.partition.clients=2", "rounds=1", "method.name=inclusivefl",
              "fleet.groups=[{budget=0.5}, {budget=1.0}]", "fleet.tolerance=0.5"]  # fmt: skip
    model = f"model.name={HERE / 'foreign_models.py'}:Mixer"
    err = run_verb("run", "--out", tmp_path / "run", *(f"--set={value}" for value in [model, *values]), code=2).err
    assert "fcs.0.bias" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_models_are_checked_and_trained(name: str, tmp_path: Path) -> None:
    foreign, model = FOREIGN[name], f"{HERE / 'foreign_models.py'}:{name}"
    arguments = [f"--set=model.vocabulary={n}" for key, n in foreign.arguments.items() if key == "vocabulary"]
    shape = ",".join(map(str, foreign.input_shape))
    run_verb("check-model", model, "--input-shape", shape, "--task", foreign.task, *arguments, code=0)
    values = [
        f"model.name={model}",
        f"rounds={ROUNDS}",
        "fleet.groups=[{budget=0.4},{budget=1.0}]",
        "fleet.tolerance=0.5",
        "data.partition.clients=4",
        "local.lr=0.02",
        "local.batch_size=64",
        *settings(foreign, tmp_path),
    ]
    out = tmp_path / "run"
    run_verb("run", "--out", out, *(f"--set={value}" for value in values), code=0)
    assert "level" in run_verb("eval", out, code=0).out
    assert len((out / "metrics.jsonl").read_text().splitlines()) >= ROUNDS

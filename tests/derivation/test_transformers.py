"""Six classes of transformers, from a configuration: four levels, worker processes, resumed runs, exported levels."""

import functools
from pathlib import Path
from typing import Any

import plain_transformers
import pytest
import torch
from sampling import some_quick
from support.bits import have_same_state

import fleetfit as ff
from fleetfit.anatomy import outputs
from fleetfit.anatomy.derive import derive_architecture
from fleetfit.cost import submodel_cost, training_memory
from fleetfit.data import Data

pytest.importorskip("transformers", reason="the extra transformers is not installed")

IMAGES, TEXTS, NEXT = "images", "texts", "next"
CLASSES = {"bert": TEXTS, "distilbert": TEXTS, "vit": IMAGES, "resnet": IMAGES, "llama": NEXT, "gpt2": NEXT}
VOCABULARY, LENGTH, CLIENTS = 30, 8, 4


def make_data(kind: str) -> Data:
    rng = torch.Generator().manual_seed(0)
    splits = {"train": torch.arange(80), "test": torch.arange(80, 100)}
    if kind == IMAGES:
        x, y = torch.randn(100, 1, 8, 8, generator=rng), torch.randint(3, (100,), generator=rng)
        return Data(kind, x, y, splits, 3)
    x = torch.randint(1, VOCABULARY, (100, LENGTH), generator=rng)
    if kind == TEXTS:
        return Data(kind, x, x[:, 0] % 3, splits, 3, vocabulary=VOCABULARY)
    return Data(kind, x, x.roll(-1, 1), splits, VOCABULARY, task="next_token", vocabulary=VOCABULARY)


def make_texts() -> Data:
    return make_data(TEXTS)


def make_images() -> Data:
    return make_data(IMAGES)


def make_next() -> Data:
    return make_data(NEXT)


def describe(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "seed": 0,
        "rounds": 2,
        "data": {
            "name": f"{Path(__file__)}:make_{CLASSES[name]}",
            "partition": {"kind": "iid", "clients": CLIENTS},
        },
        "model": {"name": f"plain_transformers:{name}"},
        "method": {"name": "heterofl"},
        "fleet": {"tolerance": 0.6, "groups": [{"budget": b} for b in (0.25, 0.4, 0.6, 1.0)]},
        "evaluate": {"every": 2},
        **changes,
    }


class Stop(Exception):
    pass


QUICK = ["llama"]


@functools.cache
def train(name: str, folder: Path) -> ff.Run:
    return ff.run(describe(name), out=folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("transformers")


@pytest.mark.parametrize("name", some_quick(list(CLASSES), QUICK))
def test_four_levels_train_in_processes_and_resume(name: str, folder: Path, tmp_path: Path) -> None:
    def stop(report: Any) -> None:
        raise Stop

    whole = train(name, folder)
    levels = whole.assembly.federation.levels
    assert len(levels) == 4 and all(r["failures"] == [] for r in whole.metrics)
    counts = [sum(t.numel() for t in whole.model(i + 1).parameters()) for i in range(4)]
    assert counts == sorted(counts) and counts[0] < 0.6 * counts[-1]
    workers = ff.run(describe(name, engine={"name": "processes", "workers": 2}), out=tmp_path / "processes")
    assert have_same_state(whole, workers)
    with pytest.raises(Stop):
        ff.run(describe(name), out=tmp_path / "broken", on_round=stop)
    assert have_same_state(whole, ff.resume(tmp_path / "broken"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_every_level_is_exported(name: str, folder: Path, tmp_path: Path) -> None:
    """A program holds the level's own parameters, and gives its logits at other batch sizes than that of tracing."""
    run = train(name, folder)
    x = make_data(CLASSES[name]).x[:7]
    for level in (1, 2, 3, 4):
        out = tmp_path / str(level)
        run.export(out, level, forms=())
        program, module = torch.export.load(out / "model.pt2"), run.model(level)
        assert sum(p.numel() for p in program.parameters()) <= sum(p.numel() for p in module.parameters())
        for samples in (x, x[:1]):
            with torch.no_grad():
                expected = outputs(module, samples)
            torch.testing.assert_close([*program.module()(samples)], expected, rtol=1e-4, atol=1e-5)


def count_by_hand(width: int, keys: int, inner: int, matrices: int, exits: int) -> int:
    """Return the multiply-adds of two blocks and their classifiers on `LENGTH` tokens.

    Args:
        width: Of the stream, the queries and the values after attention.
        keys: Rows of the keys, and as many of the values.
        inner: Of the layers between attentions.
        matrices: Of such a layer.
        exits: Classifiers at each token.
    """
    block = LENGTH * width * (2 * width + 2 * keys + matrices * inner) + 2 * LENGTH * LENGTH * width
    return 2 * block + exits * LENGTH * width * VOCABULARY


@pytest.mark.parametrize(("name", "keys", "inner", "matrices"), [("gpt2", 32, 128, 2), ("llama", 16, 48, 3)])
def test_masks_of_sizes_are_counted(name: str, keys: int, inner: int, matrices: int) -> None:
    """A causal mask looks at its positions; the level of half the width has half of everything."""
    torch.manual_seed(0)
    net = getattr(plain_transformers, name)(VOCABULARY)
    architecture = derive_architecture(net, torch.randint(VOCABULARY, (2, LENGTH)))
    full, half = architecture.sizes(1.0), architecture.sizes(0.5)
    for sizes, exits, n in ((full, (2,), 32), (full, (1, 2), 32), (half, (1, 2), 16)):
        cost = submodel_cost(architecture, (sizes, exits), (LENGTH,))
        assert cost.multiply_adds == count_by_hand(n, keys * n // 32, inner * n // 32, matrices, len(exits))
        level = architecture.build(sizes, exits)
        assert cost.parameters == sum(p.numel() for p in level.parameters())
        weights = 4 * sum(p.numel() for p in level.parameters())
        assert training_memory(architecture, sizes, exits, (LENGTH,), 4) > 3 * weights


def test_a_local_folder_is_enough(tmp_path: Path) -> None:
    """Training starts from the weights of the folder."""
    import transformers
    from plain_transformers import bert

    saved = bert(3)
    saved.save_pretrained(tmp_path / "folder")
    net = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "folder")
    finished = ff.run({**describe("bert", rounds=1), "model": {"name": net}}, out=tmp_path / "run")
    assert any("BertForSequenceClassification" in note for note in finished.notes)
    derived = finished.assembly.federation.problem.architecture
    assert torch.equal(derived.net.classifier.weight, saved.classifier.weight)

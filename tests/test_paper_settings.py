"""Every file in experiments/ has its paper's augmentation, normalisation and weights, or says that it differs."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from fleetfit import names
from fleetfit.api.comparison import ComparisonPlan
from fleetfit.config.assembly import spec_of_method
from fleetfit.config.reading import anchored, checked, read_table
from fleetfit.method import build, by_count, by_samples

ROOT = Path(__file__).parents[1] / "experiments"
FILES = [path for path in sorted(ROOT.rglob("*.toml")) if not path.name.startswith(("plan-", "claims"))]


@dataclass(frozen=True)
class Paper:
    """What a paper, or its authors' code where that says more, does to images and updates.

    Attributes:
        augment: What training images go through, by data set; None is nothing.
        normalise: "own" mean and deviation of the set, or "fixed" ones (0.5 and 0.25).
        counted: The methods whose updates count alike; the others weigh by samples. None: all of them.
    """

    augment: Mapping[str, str | None]
    normalise: str
    counted: tuple[str, ...] | None


SCALEFL = Paper({"cifar10": "crop-flip", "cifar100": "crop-flip", "imagenet": "crop-flip", "images": "crop-flip"},
                "fixed", None)  # fmt: skip
ADAPTIVEFL = Paper({}, "own", ())
REEFL = Paper(dict.fromkeys(("cifar10", "cifar100", "femnist"), "resized-crop"), "own", ("scalefl", "depthfl"))
FEDAVG = Paper({}, "own", ())
HETEROFL = Paper({"cifar10": "crop-flip"}, "fixed", ("heterofl",))
PAPERS = {
    "scalefl-": SCALEFL,
    "cifar10-resnet20": SCALEFL,
    "agnews-bert": SCALEFL,
    "adaptivefl-": ADAPTIVEFL,
    "reefl-": REEFL,
    "fedavg-": FEDAVG,
    "shakespeare-lstm": FEDAVG,
    "heterofl-original": HETEROFL,
}
OF_OUR_OWN = {"ablation-scalefl", "client-choice", "deadlines", "demo", "backbone-tiny-imagenet", "compression",
              "overfitting", "ship-cifar10", "fast-equals-exact", "fast-equals-exact-text"}  # fmt: skip
"""Files that ask something that no table of a paper asks."""


def paper_of(path: Path) -> Paper | None:
    return next((paper for prefix, paper in PAPERS.items() if path.stem.startswith(prefix)), None)


def experiments(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every row in every setting, with its label."""
    table = anchored(read_table(path), path.parent)
    if "compare" not in table:
        yield path.stem, checked(table)
        return
    for entry in ComparisonPlan(table, path.stem).entries():
        yield f"{entry.row}, {entry.setting}", checked(entry.table)


def key_of(section: Any, key: str) -> Any:
    """Return a key of a data section, or its data set's default; None for none, and where there is no such key."""
    found = inspect.signature(names.resolve("data", section.name)).parameters.get(key)
    value = section.settings.get(key, None if found is None else found.default)
    return None if value == "none" else value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_as_its_paper_or_says_how_it_differs(path: Path) -> None:
    paper = paper_of(path)
    assert (paper is None) == (path.stem in OF_OUR_OWN), "a new file: say whose settings it has"
    if paper is None:
        return
    said = read_table(path).get("compare", {}).get("differs", "")
    wrong: dict[str, Any] = {}
    for label, experiment in experiments(path):
        data, method = experiment.data, experiment.method.name
        augment = key_of(data, "augment")
        if augment != paper.augment.get(data.name) and not re.search("crop|shifted|mirrored", said):
            wrong[f"{label}: augment"] = augment
        pixels = "resize" in inspect.signature(names.resolve("data", data.name)).parameters
        if pixels and (key_of(data, "normalise") or "own") != paper.normalise and "normalised" not in said:
            wrong[f"{label}: normalise"] = key_of(data, "normalise")
        counts = paper.counted is None or method in paper.counted
        plain = experiment.method.hooks.get("weight") == "by_samples" and path.stem.startswith("reefl-")
        if build(spec_of_method(experiment)).weight is not (by_samples if plain or not counts else by_count):
            wrong[f"{label}: weight"] = method
    assert not wrong


def test_adaptivefl_is_compared_with_both_rules_of_credit() -> None:
    """Wherever the method itself is a row, so that nothing hangs on a line of its Algorithm 1."""
    for path in FILES:
        table = read_table(path)
        rows = [row.get("method", {}) for row in table.get("compare", {}).get("row", [])]
        found = {row.get("credit", "printed") for row in rows if row.get("name") == "adaptivefl"}
        assert found in (set(), {"printed", "authors"}), path.name


def test_decoupled_is_that_of_the_paper_whose_table_it_stands_in() -> None:
    seen = set()
    for path in FILES:
        rows = [row.get("method", {}) for row in read_table(path).get("compare", {}).get("row", [])]
        for row in rows:
            if row.get("name") == "decoupled":
                ours = (row.get("split", "width"), row.get("trained_by", "own"))
                seen.add(ours)
                assert ours == (("pool", "able") if path.stem.startswith("adaptivefl-") else ("width", "own")), path
    assert len(seen) == 2

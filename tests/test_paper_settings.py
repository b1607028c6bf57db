"""Every file in experiments/ has its paper's augmentation, normalization and weights, or says that it differs."""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fleetfit import names
from fleetfit.api.comparison import plan_comparison
from fleetfit.config.assemble.method import build_method_spec
from fleetfit.config.load import complete_experiment, resolve_tables
from fleetfit.config.toml import read_toml
from fleetfit.hooks import build, weigh_by_samples, weigh_equally

ROOT = Path(__file__).parents[1] / "experiments"
FILES = [path for path in sorted(ROOT.rglob("*.toml")) if not path.name.startswith(("plan-", "claims"))]


@dataclass(frozen=True)
class Paper:
    """What a paper, or its authors' code where that says more, does to images and updates.

    Attributes:
        augment: What training images go through, by data set; None is nothing.
        normalize: "own" mean and deviation of the set, or "fixed" ones (0.5 and 0.25).
        counted: The methods whose updates count alike; the others weigh by samples. None: all of them.
    """

    augment: Mapping[str, str | None]
    normalize: str
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
OF_OUR_OWN = {"ablation-scalefl", "client-choice", "deadlines", "backbone-tiny-imagenet", "compression",
              "overfitting", "ship-cifar10", "fast-equals-exact", "fast-equals-exact-text", "trust-scalefl", "links",
              "trust-adaptivefl", "privacy-scalefl", "fleetfit-cifar10", "fleetfit-femnist", "fleetfit-shakespeare",
              "fleetfit-splits", "fleetfit-ablation"}  # fmt: skip
"""Files that ask something that no table of a paper asks."""


def paper_of(path: Path) -> Paper | None:
    return next((paper for prefix, paper in PAPERS.items() if path.stem.startswith(prefix)), None)


get_plan = cache(plan_comparison)


def experiments(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every row in every setting, with its label."""
    table = resolve_tables(read_toml(path), path.parent)
    if "compare" not in table:
        yield path.stem, complete_experiment(table)
        return
    plan = get_plan(path)
    assert not plan.has_implied_smallest, "stored results would not be those of the file"
    for entry in plan.runs:
        yield f"{entry.row}, {entry.setting}", entry.experiment


def key_of(section: Any, key: str) -> Any:
    """Return a key of a data section, or its data set's default; None for none, and where there is no such key."""
    parameter = inspect.signature(names.resolve("data", section.name)).parameters.get(key)
    value = section.settings.get(key, None if parameter is None else parameter.default)
    return None if value == "none" else value


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_as_its_paper_or_says_how_it_differs(path: Path) -> None:
    paper = paper_of(path)
    own = path.stem in OF_OUR_OWN or path.parent.name == "proof"
    assert (paper is None) == own, "a new file: say whose settings it has"
    if paper is None:
        return
    differs = read_toml(path).get("compare", {}).get("note", "")
    wrong: dict[str, Any] = {}
    for label, experiment in experiments(path):
        data, method = experiment.data, experiment.method.name
        augment = key_of(data, "augment")
        if augment != paper.augment.get(data.name) and not re.search("crop|shifted|mirrored", differs):
            wrong[f"{label}: augment"] = augment
        pixels = "resize" in inspect.signature(names.resolve("data", data.name)).parameters
        if pixels and (key_of(data, "normalize") or "own") != paper.normalize and "normalized" not in differs:
            wrong[f"{label}: normalize"] = key_of(data, "normalize")
        counts = paper.counted is None or method in paper.counted
        plain = experiment.method.hooks.get("weigh") == "by_samples" and path.stem.startswith("reefl-")
        weight = weigh_by_samples if plain or not counts else weigh_equally
        if build(build_method_spec(experiment)).weigh is not weight:
            wrong[f"{label}: weight"] = method
    assert not wrong


def test_adaptivefl_is_compared_with_both_rules_of_credit() -> None:
    """Wherever the paper's claims on it are judged, so that none hangs on a line of its Algorithm 1."""
    for path in (path for path in FILES if path.parent.name != "proof"):
        table = read_toml(path)
        rows = [row.get("method", {}) for row in table.get("compare", {}).get("row", [])]
        credits = {row.get("credit", "printed") for row in rows if row.get("name") == "adaptivefl"}
        assert credits in (set(), {"printed", "authors"}), path.name


def test_decoupled_is_that_of_the_paper_whose_table_it_stands_in() -> None:
    seen = set()
    for path in FILES:
        rows = [row.get("method", {}) for row in read_toml(path).get("compare", {}).get("row", [])]
        for row in rows:
            if row.get("name") == "decoupled":
                ours = (row.get("scaling", "width"), row.get("trained_by", "own"))
                seen.add(ours)
                assert ours == (("pool", "able") if path.stem.startswith("adaptivefl-") else ("width", "own")), path
    assert len(seen) == 2


# ---- rounds, epochs, rates, clients of the full-size files -----------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """What a paper says of training; None where it is silent.

    Attributes:
        rounds: Rounds of a run.
        epochs: e or E.
        batch_size: Samples of a step.
        lr: Learning rate, and that of FedDyn where it has one of its own.
        falls: The schedule: its rounds, or what the rate falls to.
        momentum: Of SGD.
        clients: K by data set and setting.
        share: p or C, or the number of clients in a round.
        alphas: The Dirichlet parameters of the table.
        budgets: What the groups of clients afford.
    """

    rounds: int | None
    epochs: int
    batch_size: int
    lr: tuple[float, ...]
    falls: Any
    momentum: float | None
    clients: Mapping[str, tuple[int, ...]]
    share: float
    alphas: tuple[float, ...] = ()
    budgets: tuple[float, ...] | None = None


QUARTERS, HALVES = (0.125, 0.25, 0.5, 1.0), (0.25, 0.5, 1.0)
CIFAR = {"cifar10": (100,), "cifar100": (100,)}
# ScaleFL 4.2 and 4.3; AdaptiveFL 4.1, Figure 4 and 4.5; ReeFL appendix A and its section on data (FedDyn's rate: the
# authors' configurations). What FedAvg's tables vary stands in the labels of their rows and settings.
SCALEFL_IMAGES = Training(400, 5, 16, (0.1,), [100, 200], None, CIFAR, 0.1, (100.0, 1.0), QUARTERS)
SCALEFL_IMAGENET = Training(90, 5, 64, (0.1,), [30, 60], None, {"imagenet": (50,)}, 0.2, (100.0, 1.0), QUARTERS)
SCALEFL_TEXTS = Training(
    100, 5, 16, (3e-5,), None, None, {"sst2": (50,), "ag_news": (50,)}, 0.2, (100.0, 1.0), QUARTERS
)
POOLS = Training(None, 5, 50, (0.01,), 0.998, 0.5, CIFAR | {"femnist": (180,)}, 0.1, (0.6, 0.3), HALVES)
EXITS = Training(
    1000, 1, 32, (0.05, 0.1), (0.001, 0.01), 0.0,
    {"cifar100": (100,), "femnist": (381,), "speech_commands": (250,)}, 0.1, (1000.0, 1.0, 0.1),
)  # fmt: skip
TRAINING = {
    "scalefl-cifar10": replace(SCALEFL_IMAGES, alphas=(1.0,)),
    "scalefl-table3": SCALEFL_IMAGES,
    "scalefl-table4": SCALEFL_IMAGENET,
    "scalefl-table5": SCALEFL_TEXTS,
    "adaptivefl-table2": POOLS,
    "adaptivefl-table3": replace(POOLS, alphas=()),
    "adaptivefl-table4": POOLS,
    "adaptivefl-figure4": replace(POOLS, alphas=(0.6,), clients={"cifar10": (50, 100, 200, 500)}),
    "adaptivefl-figure5": replace(POOLS, alphas=()),
    "adaptivefl-testbed": replace(POOLS, alphas=(), clients={"widar": (17,)}, share=10, budgets=None),
    "reefl-appendix-g": replace(EXITS, alphas=(1000.0,)),
    "reefl-figure7": replace(EXITS, alphas=()),
    **dict.fromkeys([f"reefl-table{n}" for n in (1, 2, 3, 4, 5, 8, 9)], EXITS),
    "heterofl-original": Training(800, 5, 10, (0.1,), [300, 500], 0.9, {"cifar10": (100,)}, 0.1),
}
FULL = [path for path in FILES if path.parent == ROOT]
ELSEWHERE = {"ablation-scalefl", "client-choice", "deadlines", "reefl-grid"}
"""Full files that ask what no paper has settings for, and the grid that is tuned."""


def tables_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield label and tables of every row in every setting."""
    table = read_toml(path)
    if "compare" not in table:
        yield path.stem, table
        return
    for entry in get_plan(path).runs:
        yield f"{entry.row}; {entry.setting}", dict(entry.tables)


def falls_to(local: Mapping[str, Any]) -> Any:
    """Return what a schedule says that papers print: its rounds, its factor, or the last rate."""
    schedule = local.get("schedule", {"kind": "constant"})
    if schedule["kind"] == "step":
        return schedule["at"] if schedule["factor"] == 0.1 else schedule
    if schedule["kind"] == "cosine":
        return round(schedule["minimum"] * local["lr"], 9)
    return schedule.get("factor")


@pytest.mark.parametrize("stem", sorted(TRAINING))
def test_a_full_file_trains_as_its_paper(stem: str) -> None:
    trained, wrong, alphas = TRAINING[stem], {}, set()
    for label, table in tables_of(ROOT / f"{stem}.toml"):
        local, data, cohort = table["local"], table["data"], table["cohort"]
        partition = data["partition"]
        fed_dyn = table["method"]["name"] == "depthfl" and table["method"].get("alpha", 0.1) > 0
        number = 1 if fed_dyn and len(trained.lr) > 1 else 0
        falls = trained.falls[number] if isinstance(trained.falls, tuple) else trained.falls
        ours = {
            "epochs": (local["epochs"], trained.epochs),
            "batch_size": (local["batch_size"], trained.batch_size),
            "lr": (local["lr"], trained.lr[number]),
            "falls": (falls_to(local), falls),
            "share": (cohort.get("count", cohort.get("fraction")), trained.share),
        }
        if trained.rounds is not None:
            ours["rounds"] = (table["rounds"], trained.rounds)
        if trained.momentum is not None:
            ours["momentum"] = (local["momentum"], trained.momentum)
        if trained.budgets is not None and "matched in multiply-adds" not in label:  # which the paper has not
            ours["budgets"] = (tuple(group["budget"] for group in table["fleet"]["groups"]), trained.budgets)
        wrong |= {f"{label}: {key}": pair for key, pair in ours.items() if pair[0] != pair[1]}
        if partition["clients"] not in trained.clients[data["name"]]:
            wrong[f"{label}: clients"] = partition["clients"]
        alphas.add(partition.get("alpha"))
    assert not wrong, "what the file has, what the paper says"
    assert alphas - {None} == set(trained.alphas)


def test_every_full_file_is_held_to_its_paper() -> None:
    held = {*TRAINING, *ELSEWHERE} | {path.stem for path in FULL if path.stem.startswith("fedavg-")}
    assert {path.stem for path in FULL} == held


@pytest.mark.parametrize("path", [p for p in FULL if p.stem.startswith("fedavg-")], ids=lambda path: path.stem)
def test_fedavg_trains_as_the_labels_say(path: Path) -> None:
    """E, B and C stand in the labels of rows and settings, as in the paper's tables; K is 100, or the paper's roles."""
    for label, table in tables_of(path):
        if label.startswith("SGD"):
            continue  # the yardstick, one client
        local, cohort = table["local"], table.get("cohort", {})
        batch, epochs, share = (re.search(f"{key} = ([0-9.]+|all)", label) for key in "BEC")
        sgd = table["method"]["name"] == "fedsgd"
        if batch and not sgd:
            assert str(local["batch_size"]) == batch[1], label
        if epochs and not sgd:
            assert local["epochs"] == int(epochs[1]), label
        if share and share[1] == "0":
            assert cohort == {"count": 1}, label
        else:
            assert cohort == {"fraction": float(share[1]) if share else 0.1}, label
        assert local["momentum"] == 0.0, label
        roles = path.stem == "fedavg-shakespeare"
        partition = table["data"]["partition"]
        assert partition.get("clients") in ((1146, None) if roles else (100,)), label
        assert partition["kind"] != "shards" or partition["shards_per_client"] == 2, label


# ---- what differs, said in each file ---------------------------------------------------------------------------------


def said_by(path: Path) -> str:
    return str(read_toml(path).get("compare", {}).get("note", ""))


@pytest.mark.parametrize("path", [p for p in FILES if said_by(p)], ids=lambda path: str(path.relative_to(ROOT)))
def test_what_differs_from_a_paper_is_said(path: Path) -> None:
    """Hold-out, batch-norm statistics, weights of exits, crops, weight decay and rounds where a paper is silent."""
    differs, wrong = said_by(path), []
    for label, experiment in experiments(path):
        data, method = experiment.data, experiment.method
        held = key_of(data, "validation") or 0.0
        if (
            path.stem.startswith(("adaptivefl-", "fedavg-"))
            and held
            and not re.search("held out|a tenth|450|540", differs)
        ):
            wrong.append(f"{label}: {held} of the training data is held out, the paper holds nothing out")
        if path.parent.name == "small" and held and "held out" not in differs and paper_of(path):
            wrong.append(f"{label}: {held} of the small file's training data is held out")
        if path.stem.startswith("scalefl-") and data.name == "imagenet" and "held out" not in differs:
            wrong.append(f"{label}: {held} held out for the paper's 25,000 images")
        if path.stem.startswith("scalefl-") and method.name == "scalefl" and "twice the printed weight" not in differs:
            wrong.append(f"{label}: Eq. 5's weights")
        normed = path.stem.startswith(("scalefl-", "adaptivefl-")) and data.name not in ("sst2", "ag_news")
        if normed and "static batch-norm" not in differs:
            wrong.append(f"{label}: batch statistics in the paper")
        if path.stem.startswith("scalefl-") and "weight decay" not in differs:
            wrong.append(f"{label}: weight decay is the authors' code's")
        if path.stem.startswith("adaptivefl-") and not re.search("rounds", differs):
            wrong.append(f"{label}: rounds, decay and weight decay are the authors' code's")
        if (
            path.stem.startswith("adaptivefl-")
            and "shares of classes" not in differs
            and "alpha" in data.partition.settings
        ):
            wrong.append(f"{label}: their weak clients have the smallest shares of the data")
    assert not sorted(set(wrong))

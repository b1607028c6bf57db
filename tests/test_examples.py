"""Every example runs and does what it says; every file in experiments/ resolves into levels, clients and a method."""

import csv
import io
import runpy
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from run_folders import TINY
from support import raises
from tiny import tiny_federation

import fleetfit as ff
from experiments.paper_plans import make_scalefl_table_1
from fleetfit import rounds
from fleetfit.api.comparison import plan_comparison
from fleetfit.architecture import check_layout
from fleetfit.callbacks import scalars
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.components import check_keys
from fleetfit.config.load import resolve_tables
from fleetfit.config.toml import read_toml
from fleetfit.engines.local import local as local_engine
from fleetfit.errors import ConfigError
from fleetfit.planner import Plan
from fleetfit.rounds import start

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.toml"))
RUN_FILES = [path for path in EXPERIMENTS if not path.name.startswith(("plan-", "claims"))]

# Stand-ins for data sets that are not in the package: classes, channels and side, which is all that planning needs.
SHAPES = {
    "cifar10": (10, 3, 32),
    "cifar100": (100, 3, 32),
    "mnist": (10, 1, 28),
    "fashion_mnist": (10, 1, 28),
    "femnist": (62, 1, 28),
    "imagenet": (1000, 3, 224),
    "widar": (22, 22, 20),
    "speech_commands": (35, 1, 64),
}
TEXTS = ("ag_news", "sst2", "shakespeare", "images")


def lines_of_code(source: str) -> int:
    """Count lines that hold code: no blank lines, comments or docstrings."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        docstring = begins and token.type == tokenize.STRING
        if token.type not in skip and not docstring:
            lines |= set(range(token.start[0], token.end[0] + 1))
        begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL, tokenize.COMMENT) and not docstring
    return len(lines)


def stand_in(classes: int, channels: int, side: int, samples: int = 6000) -> ff.Data:
    """Return one image many times, of the right shape, with labels for 500 clients and groups as the real sets have."""
    x = torch.zeros(1, channels, side, side, dtype=torch.uint8).expand(samples, -1, -1, -1)
    train, test = torch.arange(samples).split([samples - 500, 500])
    groups = torch.arange(samples) % {62: 400, 22: 17, 35: 300}.get(classes, 120)  # FEMNIST, Widar, words, digits
    y = torch.arange(samples) % classes
    return ff.Data("stand-in", x, y, {"train": train, "test": test}, classes, groups=groups)


def entries(path: Path) -> list[tuple[str, dict]]:
    """Return label and tables of every row of a run file with every data set."""
    table = resolve_tables(read_toml(path), path.parent)
    if "compare" not in table:
        return [(path.stem, table)]
    sections = {}
    for entry in plan_comparison(path).runs:  # what differs in seed or partition only has the same levels
        data, model = (str(entry.tables.get(part, {}).get("name")) for part in ("data", "model"))
        key = (entry.row, data, model, str(entry.tables.get("fleet")))
        if "peft" in entry.tables:  # there levels are given, which neither data nor what is fine-tuned change
            key = (entry.tables["method"]["name"], *key[2:])
        sections.setdefault(key, (str(entry.subfolder.parent), dict(entry.tables)))
    return list(sections.values())


# ---- examples ------------------------------------------------------------------------------------------------------


def test_lines_of_code_are_counted():
    assert (
        lines_of_code(
            '"""Text\nof two lines."""\n\nimport a  # why\n\n\ndef f(\n    x,\n):\n    """Say."""\n    return x\n'
        )
        == 5
    )


def test_an_own_tracker_takes_ten_lines_and_keeps_every_number(tmp_path, monkeypatch):
    script = EXAMPLES / "own_tracker.py"
    head = [line for line in script.read_text().splitlines() if line.startswith(("import", "from"))]
    assert lines_of_code(script.read_text()) - len(head) <= 10
    run = ff.run(
        TINY, out=tmp_path / "run", callbacks=[{"name": f"{script}:CsvTracker", "file": "all.csv"}]
    )  # fmt: skip
    with (run.folder / "all.csv").open() as file:
        read = [(int(number), name, float(value)) for number, name, value in csv.reader(file)]
    assert read == [(m["round"], name, value) for m in run.metrics for name, value in scalars(m).items()]


def test_optuna_searches_and_prunes(tmp_path, monkeypatch):
    """With fewer rounds; the third trial's accuracies are made the worst, and it is cut off at its first evaluation."""
    optuna = pytest.importorskip("optuna", reason="the example searches with Optuna: pip install optuna")
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    script = runpy.run_path(str(EXAMPLES / "optuna_search.py"))
    script["BASE"].update(TINY, rounds=2, evaluate={**script["BASE"]["evaluate"], "every": 1})
    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda **keys: WorstOfThree(optuna))
    study = script["search"](trials=3)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "COMPLETE", "PRUNED"]
    for trial in study.trials[:2]:
        run = ff.load(tmp_path / "runs" / "search" / f"trial-{trial.number}")
        assert trial.value == run.accuracy("local") and run.columns["split"] == "validation"
        assert run.experiment.local.lr == trial.params["lr"] and run.experiment.method.beta == trial.params["beta"]
        assert trial.intermediate_values == {m["round"]: m["evaluate"]["static"]["local"] for m in run.metrics}
    cut = ff.load(tmp_path / "runs" / "search" / "trial-2")
    assert len(cut.metrics) == 1 and not cut.finished


class WorstOfThree:
    """A pruner that cuts the third trial off."""

    def __init__(self, optuna):
        self._kind = optuna.pruners.BasePruner

    def prune(self, study, trial):
        return trial.number == 2


@pytest.mark.slow
def test_own_model_and_data_take_under_30_lines_and_learn(tmp_path, monkeypatch, capsys):
    script = EXAMPLES / "own_model_and_data.py"
    assert lines_of_code(script.read_text()) < 30
    monkeypatch.chdir(tmp_path)
    namespace = runpy.run_path(str(script), run_name="__main__")
    assert namespace["run"].accuracy("local") > 0.6, "chance is 0.2"
    assert "level 1" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["runs"], "an example leaves a run folder and nothing else"


def test_the_layout_of_the_own_model_is_right():
    module = runpy.run_path(str(EXAMPLES / "own_model_and_data.py"))
    from fleetfit.anatomy.proof import check_layout

    assert not check_layout(module["Family"](), input_shape=(20,)).not_proved


PLAIN = {"own_module": "Net", "resnet": "resnet"}


@pytest.mark.parametrize("model", PLAIN)
def test_an_example_of_a_plain_module_is_derived(model):
    module = runpy.run_path(str(EXAMPLES / f"{model}.py"))
    net = ff.derive(module[PLAIN[model]](classes=10, channels=1), "digits")
    assert not net.plan.whole and net.blocks >= 4


@pytest.mark.slow
@pytest.mark.parametrize("model", PLAIN)
def test_an_example_of_a_plain_module_learns_at_four_levels(model, tmp_path):
    run = ff.run(load_experiment(EXAMPLES / f"{model}.toml", ["evaluate.every=0"]), out=tmp_path / "run")
    losses = [line["train"]["loss"] for line in run.metrics]
    assert losses[-1] < 0.5 * losses[0]
    assert len({level.parameters for level in run.plan.levels}) == 4


@pytest.mark.slow
def test_the_examples_of_transformers_learn_and_come_from_a_folder(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the examples are models of transformers")
    monkeypatch.chdir(tmp_path)
    module = runpy.run_path(str(EXAMPLES / "transformers_models.py"))
    for run in module["run_all"](rounds=3):
        losses = [line["train"]["loss"] for line in run.metrics]
        assert losses[-1] < losses[0]
        assert len({level.parameters for level in run.plan.levels}) == 4
    model = module["classify_texts"](classes=3, vocabulary=30)
    model.save_pretrained(tmp_path / "folder")
    again = module["classify_texts"](classes=3, vocabulary=30, checkpoint=str(tmp_path / "folder"))
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


MODELS = {"plain_cnn": "PlainCnn", "concatenation": "DenseNet", "hugging_face_model": "convnext"}


def needs_transformers(model: str) -> None:
    if model == "hugging_face_model":
        pytest.importorskip("transformers", reason="the example is a model of transformers")


@pytest.mark.parametrize("model", MODELS)
def test_the_layout_of_an_example_is_right(model):
    needs_transformers(model)
    module = runpy.run_path(str(EXAMPLES / f"{model}.py"))
    family = module[MODELS[model]](classes=10, channels=1)
    report = check_layout(family, input_shape=(1, 8, 8))
    assert set(report.permutation) == set(family.axes)
    assert report.cuts and not report.not_proved


@pytest.mark.slow
@pytest.mark.parametrize("method", ["scalefl", "heterofl"])
@pytest.mark.parametrize("model", MODELS)
def test_an_example_of_a_model_learns_at_four_levels(model, method, tmp_path, monkeypatch):
    needs_transformers(model)
    few = ("rounds=3", "local.epochs=2", "data.partition={kind='dirichlet', alpha=100.0, clients=4}", "data.test=0.6",
           "cohort.count=4", "evaluate.every=0")  # fmt: skip
    name = f"{EXAMPLES / model}.py:{MODELS[model]}"
    run = ff.run(load_experiment(None, [f"model.name={name}", f"method.name={method}", *few]), out=tmp_path / "run")
    losses = [line["train"]["loss"] for line in run.metrics]
    assert losses[-1] < 0.9 * losses[0]
    assert len({level.parameters for level in run.plan.levels}) == 4
    assert run.model(level=1)(torch.zeros(2, 1, 8, 8))[-1].shape == (2, 10)


def test_the_plain_cnn_takes_25_lines():
    assert lines_of_code((EXAMPLES / "plain_cnn.py").read_text()) <= 25


def test_the_hugging_face_model_computes_what_the_library_computes():
    """The same seed draws the same weights; the blocks one after the other are the library's encoder."""
    transformers = pytest.importorskip("transformers", reason="the example is a model of transformers")
    family = runpy.run_path(str(EXAMPLES / "hugging_face_model.py"))["convnext"](classes=10, channels=1)
    sizes = {name: axis.size for name, axis in family.axes.items()}
    torch.manual_seed(0)
    ours = family.build(sizes, (family.blocks,)).eval()
    torch.manual_seed(0)
    config = transformers.ConvNextConfig(
        num_channels=1, hidden_sizes=[20, 28], depths=[3, 4], num_stages=2, patch_size=2, layer_scale_init_value=0.1
    )
    theirs = transformers.ConvNextModel(config).eval()
    x = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.segment(0, ours.start(x)), theirs(x).last_hidden_state)


def own_method(folder: Path, *overrides: str) -> ff.Run:
    short = ("rounds=2", "local.epochs=1", "data.partition.clients=12", "cohort.count=4", "evaluate.every=0")
    return ff.run(load_experiment(EXAMPLES / "own_method.toml", [*short, *overrides]), out=folder)


@pytest.mark.slow
def test_a_method_of_a_file_gives_the_same_bits_on_processes(tmp_path):
    there = own_method(tmp_path / "a", "engine.workers=1")
    assert there.experiment.engine.name == "processes"
    here = own_method(tmp_path / "b", "engine.name=local")
    assert there.server.state.keys() == here.server.state.keys()
    assert all(torch.equal(tensor, here.server.state[name]) for name, tensor in there.server.state.items())


def test_the_own_method_without_momentum_is_scalefl_bit_for_bit(tmp_path):
    plain = own_method(tmp_path / "plain", "engine.name=local", "method.name=scalefl").server.state
    off = own_method(tmp_path / "off", "engine.name=local", "method.momentum=0.0").server.state
    on = own_method(tmp_path / "on", "engine.name=local").server.state
    assert all(torch.equal(tensor, off[name]) for name, tensor in plain.items())
    assert any(not torch.equal(tensor, on[name]) for name, tensor in plain.items())


FJORD = f"{EXAMPLES / 'a_method.py'}:fjord"


def drawn_levels(lean: float, rounds: int = 200) -> dict[int, Counter[int]]:
    """Return how often clients of each level (0 to 2) got each level, over many draws."""
    federation, _ = tiny_federation({"name": FJORD, "lean": lean}, clients=9, cohort=9)
    server, counts = start(federation), {level: Counter() for level in range(3)}
    for seed in range(rounds):
        for client, level, piece in federation.method.assign(federation, server, np.random.default_rng(seed)):
            assert piece == federation.levels[level].submodel
            counts[int(federation.level_of[client])][level] += 1
    return counts


def test_ordered_dropout_draws_a_width_up_to_the_client_s_own():
    """600 draws a level: evenly, or as 1 : 2 : 3 with lean 1; a standard deviation is at most 12.2."""
    even, lean = drawn_levels(0.0), drawn_levels(1.0)
    for drawn, shares in ((even, [(1,), (1 / 2, 1 / 2), (1 / 3, 1 / 3, 1 / 3)]),
                          (lean, [(1,), (1 / 3, 2 / 3), (1 / 6, 2 / 6, 3 / 6)])):  # fmt: skip
        for own, expected in enumerate(shares):
            assert sum(drawn[own].values()) == 600
            assert [drawn[own][level] for level in range(own + 1)] == pytest.approx([600 * p for p in expected], abs=61)


def test_ordered_dropout_that_leans_to_the_limit_gives_everybody_their_own():
    """And is then a width-only FedAvg: bit for bit what FedAvg's own choice of levels gives."""
    states = []
    for spec in ({"name": FJORD, "lean": 5000.0}, {"name": "all_large"}):
        federation, simulation = tiny_federation(spec)
        *_, last = rounds.run(federation, local_engine(simulation), rounds.Settings(2), start(federation))
        states.append(last.server.state)
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_ordered_dropout_is_a_method_like_any_other(tmp_path):
    """Keys are checked before anything runs; it trains, with an option, from a run file's words."""
    with raises(ConfigError, '"leen"', '"lean"'):
        ff.run(load_experiment(None, [f"method.name={FJORD}", "method.leen=1.0"]), out=tmp_path / "no")
    with raises(ConfigError, 0, -1.0):
        ff.run(load_experiment(None, [f"method.name={FJORD}", "method.lean=-1.0"]), out=tmp_path / "no")
    short = ("rounds=1", "local.epochs=1", "evaluate.every=0")
    run = ff.run(
        load_experiment(None, [f"method.name={FJORD}", "method.options.fedprox.mu=0.1", *short]),
        out=tmp_path / "run",
    )
    assert [level.depth for level in run.plan.levels] == [6] * 4
    assert run.experiment.method.settings == {"lean": 0.0}, "every default is visible"
    assert {level.width for level in run.plan.levels} > {1.0}


def test_an_own_data_set_runs(tmp_path):
    run = ff.run(load_experiment(EXAMPLES / "own_dataset.toml", ["rounds=1", "data.samples=400"]), out=tmp_path / "run")
    assert run.summary["data"] == "bars"
    assert run.experiment.data.settings["noise"] == 60


def test_an_own_hook_leaves_each_level_its_own_exit(tmp_path):
    hook = f"method.hooks.make_levels={EXAMPLES / 'own_hook.py'}:own_exit_only"
    run = ff.run(load_experiment(None, [hook, "rounds=1", "local.epochs=1"]), out=tmp_path / "run")
    with_exits = assemble(load_experiment(None, ["fleet.scaling=both"])).plan.levels
    assert [len(level.exits) for level in run.plan.levels] == [1, 1, 1, 1]
    assert [level.exits[-1] for level in with_exits] == [level.exits[-1] for level in run.plan.levels]


def test_every_example_is_run_here():
    source = "".join((ROOT / "tests" / name).read_text() for name in ("test_examples.py", "test_plain_examples.py"))
    assert not [path.name for path in EXAMPLES.iterdir() if path.is_file() and path.stem not in source]


REAL = ROOT.parent / "shared" / "data"


# ---- experiments ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_an_experiment_resolves(path, monkeypatch):
    unused = []
    for label, table in entries(path):
        check_keys(load_experiment(table))
        data = table.get("data", {})
        name = data.get("name", "digits")
        if name in TEXTS:
            if not REAL.is_dir():
                pytest.skip(f"needs the real data in {REAL}")
            monkeypatch.setenv("FLEETFIT_DATA", str(REAL))
        table = without_checkpoint(table)
        if name in SHAPES:
            data_kept = {key: data[key] for key in ("partition",) if key in data}
            shape, samples = shape_of(name, data), 6 * data.get("partition", {}).get("clients", 0)
            server = {"server": {"name": stand_in(*shape)}} if "server" in data else {}
            table = {**table, "data": {"name": stand_in(*shape, max(6000, samples)), **data_kept, **server}}
        assembly = assemble(load_experiment(table))
        own = {"exclusivefl": "cannot take part"} | dict.fromkeys(["fedavg", "fedsgd"], "that fits the smallest budget")
        method = table.get("method", {}).get("name")
        planned = (
            ("Levels keep whole early blocks", "No level has an early exit", "Not within their", "Set fleet.scaling")
            if method == "fleetfit"
            else ()
        )
        private = ("Differential privacy of clients", "The noise is loud") if "privacy" in table else ()
        expected = (
            "Accuracy here is",
            "validation held out.",
            "Levels of the groups:",
            "local and global are measured on",
            "belong to no client",
            "so that their accuracies are coarse",  # of the stand-in, which has few samples
            "Each round trains 1 of",
            'engine.speed = "fast"',
            *planned,
            own.get(method, "Accuracy here is"),
            *private,
        )
        unused.append(set(map(str, assembly.unused)))  # a key that another row uses is for that one
        rest = [note for note in assembly.notes if note not in unused[-1]]
        assert all(any(e in note for e in expected) for note in rest), f"{label}: {rest}"
        alone = method == "exclusivefl"
        assert alone or len(assembly.federation.able) == len(assembly.federation.clients), label
        assert assembly.plan.levels[-1].share <= 1, label
    assert not set.intersection(*unused), "keys that no row uses"


def shape_of(name, data):
    """Return classes, channels and side of what a section loads."""
    classes, channels, side = SHAPES[name]
    digits = data.get("folder") == "femnist_digits"
    return (10 if digits else classes), channels, data.get("resize", side)


def without_checkpoint(table):
    """Return the run without what it begins as, a checkpoint or another run, which nobody has here, nor frozen then."""
    lacks = {"data": "tokenizer", "model": "checkpoint"}
    cut = {part: {k: v for k, v in table[part].items() if k != key} for part, key in lacks.items() if part in table}
    return {key: value for key, value in (table | cut).items() if key not in ("init_from", "peft")}


@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_file_of_a_paper_says_how_it_differs_and_has_a_small_one(path):
    """Printed numbers come with what is different, and a small file has rows of the full one."""
    table = read_toml(path)
    section = table.get("compare", {})
    if any("printed" in row for row in section.get("row", ())):
        assert section.get("differs"), "printed numbers, but nothing that says what differs"
    if not path.name.startswith(("scalefl-table", "fedavg-", "adaptivefl-")):
        return
    small = path.parent / "small" / path.name
    if path.parent.name == "small":
        full = read_toml(path.parents[1] / path.name)["compare"]
        rows, rows_by_label = ({tuple(r["label"].split(", ")) for r in s["row"]} for s in (section, full))
        assert all(any(set(row) <= set(other) for other in rows_by_label) for row in rows), (
            "a row that the full file lacks"
        )
        assert table["name"] == f"{path.stem}-small"
    else:
        assert table["name"] == path.stem
        assert small.is_file() or path.stem == "fedavg-mnist-cnn", f"there is no {small}"


def test_an_experiment_that_does_not_fit_fails():
    table = {"fleet": {"groups": [{"budget": 1e-6}]}, "data": {"name": stand_in(10, 1, 28)}}
    with pytest.raises(ff.FleetFitError):
        assemble(load_experiment(table))


def test_the_ablation_is_fair_and_the_same_in_both_sizes():
    full, small = (
        tomllib.loads((ROOT / "experiments" / f / "ablation-scalefl.toml").read_text()) for f in ("", "small")
    )
    assert [row["label"] for row in full["compare"]["row"]] == [row["label"] for row in small["compare"]["row"]]
    assert (full["compare"]["grid"]["seed"], small["compare"]["grid"]["seed"]) == ([0, 1, 2], [0, 1, 2, 3, 4])
    assert full["fleet"]["tolerance"] == small["fleet"]["tolerance"] == 0.1
    apart = (
        "depth-only",
        "no-early-exits",
    )  # nine blocks go in ninths; the same blocks with fewer heads: the file says so
    for label, table in entries(ROOT / "experiments" / "small" / "ablation-scalefl.toml"):
        if "fedavg" in table["method"]["name"]:
            continue
        data = {"name": stand_in(10, 3, 16), "partition": table["data"]["partition"]}
        levels = assemble(load_experiment({**table, "data": data})).plan.levels
        within = [abs(level.share / level.target - 1) <= 0.1 for level in levels]
        assert all(within) == (not label.startswith(apart)), "a row that costs more or less than the others"


def test_the_saved_plan_is_that_of_table_1():
    plan = Plan.from_toml((ROOT / "experiments" / "plan-resnet110-table-1.toml").read_text())
    rows = {row[0]: row for row in make_scalefl_table_1().rows}
    for level in plan.levels:
        row = rows[level.name]
        assert (level.width, level.depth) == (row[2], row[3])
        assert level.parameters / 1e6 == pytest.approx(row[5], rel=0.02), "printed"

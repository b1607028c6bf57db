"""Exported files: the same logits without FleetFit, at any batch size; nothing of this machine in them."""

import json
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_models import SMALL, data_of, problem_of
from support import Expected, raises
from torch import nn

import fleetfit as ff
from fleetfit.anatomy import Architecture, Axis, ExitModel, batch_norms, build_module
from fleetfit.api.inference import find_level
from fleetfit.cli.predict import make_export_table
from fleetfit.core import DataDescription
from fleetfit.data import Data
from fleetfit.data.files.table import MISSING, prepare_table, table
from fleetfit.errors import ConfigError, DataError, FleetFitError, MissingExtra, ModelError, RunError
from fleetfit.hooks import apply_model_hook
from fleetfit.inference import Policy, Scores, choose_policy, stop_early
from fleetfit.inference.export import LevelModel, export, onnx as onnx_form
from fleetfit.inference.export.folder import FORMS
from fleetfit.inference.export.level import Preprocessing
from fleetfit.inference.export.on_device import Model as Loader
from fleetfit.inference.export.on_device_rows import MISSING as ROWS_MISSING, read_rows
from fleetfit.inference.export.onnx import open_session, run_segments, run_whole
from fleetfit.method import outputs
from fleetfit.seeds import isolate_rng

pytest.importorskip("onnxruntime", reason="the extra export is not installed")


def make_level_model(name: str, policy: Policy | None = None, width: float = 0.6, method: str = "") -> LevelModel:
    """A cut model with drawn parameters and statistics."""
    problem = problem_of(name)
    if method:
        problem = apply_model_hook(problem, {"name": method})
    architecture, exits = problem.architecture, problem.exits
    sizes = {**problem.layout.full_sizes, **architecture.sizes(width)}
    with isolate_rng(torch.device("cpu")):
        torch.manual_seed(0)
        module = build_module(architecture, sizes, exits).eval()
        for norm in batch_norms(module).values():
            norm.track_running_stats = True
            norm.running_mean, norm.running_var = torch.randn(norm.num_features), 0.5 + torch.rand(norm.num_features)
        for parameter in module.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return LevelModel("2", architecture, sizes, exits, module, data_of(name, 48), policy)


def logits_of(level_model: LevelModel, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack(outputs(level_model.module, Preprocessing(level_model.data)(x)))


FAMILIES = ["resnet18", "mobilenetv2", "msdnet", "bert", "vit", "char_lstm", "mlp_2nn"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_form_has_the_models_logits(name: str, tmp_path: Path) -> None:
    level_model = make_level_model(name)
    result = export(level_model, tmp_path / "out")
    out, x = result.folder, level_model.samples("test", 24)[0]
    config = json.loads((out / "config.json").read_text())
    segments = [out / file for file in config["onnx"]["float"]["segments"]]
    assert len(segments) == len(level_model.exits) == 2
    program = torch.export.load(out / "model.pt2").module()
    for batch in (x[:1], x[:3], x):
        ours = logits_of(level_model, batch)
        scale = max(1.0, float(ours.abs().max()))
        for theirs in (
            run_whole(out / "model.onnx", batch),
            run_segments(segments, batch),
            torch.stack(program(batch)).detach(),
        ):
            assert float((ours - theirs).abs().max()) < 1e-4 * scale, batch.shape
    assert {v.name for v in result.variants} == {"pytorch", "float"}
    assert ("exactly 7 tokens" in str(result.notes)) == (name == "char_lstm")  # torch unrolls an LSTM over its steps
    state = load_file(out / "model.safetensors")
    assert state.keys() == level_model.module.state_dict().keys()
    assert all(torch.equal(state[n], t) for n, t in level_model.module.state_dict().items())
    assert config["exits"] == list(level_model.exits) and config["sizes"] == dict(level_model.sizes)
    _holds_nothing_of_this_machine(out)


def test_graphs_take_batches_of_a_data_set() -> None:
    for name in ("resnet18", "bert"):
        level_model = make_level_model(name)
        assert isinstance(level_model.data, Data)
        x, indices = level_model.samples("test", 5)[0], level_model.data.split("test")[torch.tensor([0, 4, 9, 14, 19])]
        batch = level_model.data.batch(indices)[0]
        prepared = Preprocessing(level_model.data)(x)
        assert torch.allclose(prepared[..., : batch.shape[-1]].float(), batch.float(), atol=1e-6)


def test_resizing_is_inside_too() -> None:
    x = torch.randint(0, 256, (6, 3, 8, 8), dtype=torch.uint8)
    data = Data("d", x, torch.zeros(6, dtype=torch.int64), {"test": torch.arange(6)}, 2, mean=(0.4,), std=(0.3,),
                resize=(12, 16))  # fmt: skip
    assert torch.allclose(Preprocessing(data)(x), data.batch(torch.arange(6))[0], atol=1e-6)


def _holds_nothing_of_this_machine(folder: Path) -> None:
    """No path of this machine and no line of a stack trace, in zipped parts neither."""
    signs = [str(Path.cwd()), str(folder.parent), str(Path.home()) + "/", "site-packages", 'File "']
    for path in folder.rglob("*"):
        if path.is_dir():
            continue
        contents = [path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                contents += [archive.read(name) for name in archive.namelist()]
        for content in contents:
            for sign in signs:
                assert sign.encode() not in content, (path.name, sign)


@pytest.mark.slow
def test_a_recurrent_exit_is_exported_with_its_queue(tmp_path: Path) -> None:
    level_model = make_level_model("vit", width=1.0, method="reefl")
    result = export(level_model, tmp_path / "out")
    assert result.variants[1].difference < 1e-4
    assert len(open_session(tmp_path / "out" / "segment2.onnx").get_inputs()) > 2


# ---- on a device ---------------------------------------------------------------------------------------------------

ALONE = """
import runpy, sys
for name in ("torch", "fleetfit", "transformers", "onnx"):
    sys.modules[name] = None  # to import it fails
sys.argv = ["run.py", *sys.argv[2:]]
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


def on_device(out: Path, x: torch.Tensor, *words: str) -> np.ndarray:
    """Run the loader without PyTorch and FleetFit; return answers and exits [N, 2]."""
    samples = out.parent / "samples.npy"
    np.save(samples, x.numpy())
    code = ALONE.format(folder=str(out), script=str(out / "run.py"))
    done = subprocess.run([sys.executable, "-c", code, "-", str(samples), *words], cwd=out.parent, text=True,
                          capture_output=True, timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:1].isdigit()]
    return np.array([[float(n) for n in line.split()] for line in lines])


def test_the_loader_reads_rows_as_training_did(tmp_path: Path) -> None:
    """Missing cells, numbers with signs and separators, whole numbers as categories, codes with zeros."""
    header = "age;income;district;zip;buys"
    rows = [f"{a};{'' if a % 7 == 0 else f'{a % 9},{a % 10}00.5 €'};{a % 3};0{a % 4};{'yes' if a % 2 else 'no'}"
            for a in range(20, 100)]  # fmt: skip
    rows[3] = "NA;5,100.5 €;2;03;no"
    assert ROWS_MISSING == MISSING
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    source = {"name": str(path), "categories": ["district"], "partition": {"clients": 4}}
    run = ff.run(data=source, rounds=1, progress=False, out=tmp_path / "run")
    out = run.export(tmp_path / "out", level=1).folder
    path.write_text(path.read_text(encoding="utf-8") + "30;1.0 €;1.0;01;no\n", encoding="utf-8")
    code = ALONE.format(folder=str(out), script=str(out / "run.py"))
    expected, labels = run.predict(path, level=1).to_frame(), tmp_path / "labels.npy"
    np.save(labels, (expected["label"] == "yes").to_numpy(int)[:, None])
    done = subprocess.run([sys.executable, "-c", code, "-", str(path), "--labels", str(labels)], text=True,
                          capture_output=True, check=True)  # fmt: skip
    *lines, score = done.stdout.splitlines()
    assert float(score.split()[1].strip(",")) == pytest.approx(
        (expected["label"] == expected["prediction"]).mean(), abs=1e-4
    )
    answers = [line.split()[0] for line in lines[1:]]
    assert answers == list(expected["prediction"]) and len(set(answers)) == 2
    encoded = torch.from_numpy(read_rows(path, out))
    sure = run.model(1)(encoded)[-1].softmax(1).amax(1)
    assert torch.allclose(sure, torch.tensor(expected["probability"].tolist()), atol=1e-6)
    text = path.read_text(encoding="utf-8")
    for wrong, place in ((text.replace("20;", "old;", 1), "line 2"), (text.partition("\n")[0], str(path))):
        path.write_text(wrong, encoding="utf-8")
        done = subprocess.run([sys.executable, "-c", code, "-", str(path)], text=True, capture_output=True, check=False)
        assert done.returncode == 1 and place in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("cells", "options", "new"),
    [
        (("1.0", "2.0", "beta"), {}, ("1.0", "beta", "gamma")),
        (("1.50", "2.25", "3"), {"categories": ("size",)}, ("1.50", "3.0", "1,5", "4")),
        (("-999", "4", "7"), {"missing": ("-999",)}, ("-999.0", "-999", "7e0")),
        (("3", "4", "7"), {}, ("1,5", " 7", "?")),
        (("1,200", "4,000", "70,100.5"), {}, ("1,200", "1200", "12")),
    ],
)
def test_the_loader_reads_each_cell_as_training_did(
    cells: tuple[str, ...], options: dict[str, Any], new: tuple[str, ...], tmp_path: Path
) -> None:
    """Below comments; texts that are numbers, marks and categories as numbers, and decimal commas."""
    path, other = tmp_path / "rows.csv", tmp_path / "new.csv"
    rows = [f"{age};{cells[age % 3]};{'yes' if age % 2 else 'no'}" for age in range(60)]
    path.write_text("\n".join(["age;size;buys", *rows]) + "\n", encoding="utf-8")
    data = table(str(path), label="buys", **options)
    (tmp_path / "columns.json").write_text(data.columns, encoding="utf-8")
    other.write_text("# of today\n\nage;size;buys\n" + "".join(f"30;{cell};no\n" for cell in new), encoding="utf-8")
    expected = prepare_table(other, data).x.numpy()
    np.testing.assert_allclose(read_rows(other, tmp_path), expected, rtol=1e-6)


@pytest.mark.parametrize(("cells", "cell"), [(("1,200", "4,000"), "1,5"), (("3", "4"), "1_0"), (("3", "4"), "inf")])
def test_the_loader_refuses_cells_that_training_refuses(cells: tuple[str, ...], cell: str, tmp_path: Path) -> None:
    path, other = tmp_path / "rows.csv", tmp_path / "new.csv"
    rows = [f"{age}\t{cells[age // 2 % 2]}\t{'yes' if age % 2 else 'no'}" for age in range(60)]
    path.write_text("\n".join(["#age\tsize\tbuys", *rows]) + "\n", encoding="utf-8")
    data = table(str(path), label="buys")
    (tmp_path / "columns.json").write_text(data.columns, encoding="utf-8")
    np.testing.assert_allclose(read_rows(path, tmp_path), prepare_table(path, data).x.numpy(), rtol=1e-6)
    other.write_text(f"# of today\n#age\tsize\n30\t{cells[0]}\n30\t{cell}\n", encoding="utf-8")
    with raises(DataError):
        prepare_table(other, data)
    with pytest.raises(SystemExit) as caught:
        read_rows(other, tmp_path)
    assert f"{other}, line 4:" in str(caught.value)


@pytest.mark.parametrize("measure", ["max", "entropy", "margin"])
def test_the_loader_stops_where_samples_are_sure(measure: Any) -> None:
    """Logits whose confidence is 1 in float32 have different ones in float64, so the same samples stop."""
    labels = torch.arange(400) % 10
    logits = torch.nn.functional.one_hot(labels, 10) * torch.linspace(0, 30, 400)[:, None]
    scores = Scores(torch.stack([logits, logits]), labels, torch.arange(400))
    policy = choose_policy(scores, (1.0, 2.0), 1.5, measure=measure)
    expected = policy.leaves(0, logits)
    assert 0.4 < float(expected.double().mean()) < 0.6
    stored = {"temperatures": [], "thresholds": list(policy.thresholds), "measure": measure}
    leaves = Loader.__new__(Loader).leaves(0, logits.numpy(), stored)
    assert (leaves != expected.numpy()).sum() <= 1  # the sample at the threshold, by rounding


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["max", "entropy", "margin"])
def test_the_loader_stops_as_the_model_does_in_pytorch(measure: Any, tmp_path: Path) -> None:
    bare = make_level_model("mlp_2nn", width=1.0)
    x = bare.samples("test", 24)[0]
    sure = Policy((2.0, 0.0), measure, (0.7, 1.0))
    from fleetfit.inference import confidence

    middle = float(confidence(logits_of(bare, x)[0], measure, 0.7).quantile(0.5))  # between two samples
    policy = Policy((middle, 0.0), measure, sure.temperatures)
    level_model = LevelModel(bare.level, bare.architecture, bare.sizes, bare.exits, bare.module, bare.data, policy)
    out = export(level_model, tmp_path / "out").folder
    expected = stop_early(level_model.module, Preprocessing(level_model.data)(x), policy)
    assert 0 < int(expected.exits.sum()) < 24
    result = on_device(out, x, "--stop")
    assert result[:, 0].tolist() == expected.logits.argmax(1).tolist()
    assert result[:, 1].tolist() == (expected.exits + 1).tolist()
    last = on_device(out, x)
    assert last[:, 0].tolist() == logits_of(level_model, x)[-1].argmax(1).tolist() and set(last[:, 1]) == {2}


def test_the_loader_makes_no_pixels_of_fractions() -> None:
    """Pixels from 0 to 1 would all be 0 or 1; whole numbers of another type are what they are."""
    loader = Loader.__new__(Loader)
    loader.config = {"input": {"dtype": "uint8", "shape": [1, 8, 8]}, "policy": None, "task": "", "exits": []}
    loader.segments = []
    with pytest.raises(TypeError, match=r"dtype\('float32'\) to dtype\('uint8'\)"):
        loader.predict(np.full((2, 1, 8, 8), 0.5, dtype=np.float32))
    assert loader.predict(np.ones((2, 1, 8, 8), dtype=np.int64))[0].tolist() == [0, 0]
    with pytest.raises(SystemExit):
        loader.predict(np.ones((2, 8, 8, 1), dtype=np.uint8))


def test_the_loader_is_short() -> None:
    from importlib import resources

    text = resources.files("fleetfit.inference.export").joinpath("on_device.py").read_text()
    assert len(text.splitlines()) < 90


ROUND_TRIPS = {
    "resnet18": ({"name": "resnet18", "base": 8}, {"name": "digits"}),
    "mobilenetv2": ({"name": "mobilenetv2", "width_multiplier": 0.25, "stride": 8, "top": 64}, {"name": "digits"}),
    "bert": (
        {"name": "bert", **SMALL["bert"].keys, "hidden": 48, "intermediate": 96},
        {"name": "small_models:sentences"},
    ),
}


@pytest.mark.slow
def test_int8_export_leaves_the_folder_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime dumps a graph whose shapes it cannot infer into it, with its tensors beside."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(make_level_model("bert"), tmp_path / "out", ["int8"])
    assert not any((tmp_path / "here").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_train_calibrate_export_run(name: str, tmp_path: Path) -> None:
    """The round trip: what `predict --stop` answers in PyTorch, the device answers with onnxruntime alone."""
    model, data = ROUND_TRIPS[name]
    rounds = 16 if name == "mobilenetv2" else 4  # after four it guesses, and two guesses need not agree
    lr = 0.001 if name == "bert" else 0.05  # transformers train with AdamW
    run = ff.run(
        {"rounds": rounds, "data": {**data, "partition": {"kind": "iid", "clients": 4}}, "model": model,
         "fleet": {"groups": [{"budget": 0.4}, {"budget": 1.0}]}, "cohort": {"fraction": 1.0},
         "local": {"epochs": 2, "lr": lr}, "evaluate": {"every": 0}}, out=tmp_path / "run",
    )  # fmt: skip
    level = 2
    costs = run.calibrate(level, budget=1.0).costs
    calibration = run.calibrate(level, budget=(costs[0] + costs[-1]) / 2, temperature=True)
    result = run.export(tmp_path / "out", level, ["int8", "static-int8"])
    level_model = ff.api.inference.prepare_export(run, level, None)
    x, y = level_model.samples("test", 10**6)
    expected = stop_early(level_model.module, Preprocessing(level_model.data)(x), calibration.policy)
    answers = on_device(result.folder, x, "--stop")
    same = (answers[:, 0] == expected.logits.argmax(1).numpy()) & (answers[:, 1] == expected.exits.numpy() + 1)
    assert same.mean() > 0.99  # a confidence may lie on its threshold
    assert (answers[:, 0] == y.numpy()).mean() == pytest.approx(calibration.test.accuracy, abs=0.01)
    named = {variant.name: variant for variant in result.variants}
    assert named["float"].accuracies == named["pytorch"].accuracies and named["float"].difference < 1e-4 * 20
    for kind in ("int8", "static-int8"):
        assert named[kind].size_bytes < named["float"].size_bytes and min(named[kind].agreement) > 0.8, named[kind]
        right = on_device(result.folder, x, "--variant", kind)[:, 0] == y.numpy()
        assert right.mean() == pytest.approx(named["pytorch"].accuracies[-1], abs=0.08)
    card = (result.folder / "README.md").read_text()
    assert "Early stopping" in card and f"{100 * calibration.test.accuracy:.2f}%" in card
    _holds_nothing_of_this_machine(result.folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2"])
def test_executorch_runs_every_segment(name: str, tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    result = export(make_level_model(name), tmp_path / "out", ["executorch"])
    [pytorch, lowered] = result.variants
    assert lowered.name == "executorch" and lowered.difference < 1e-4 and lowered.agreement == (1.0, 1.0)
    assert lowered.samples == pytorch.samples > 8  # more than one batch
    assert (tmp_path / "out" / "model.pte").stat().st_size == lowered.size_bytes


# ---- what can go wrong ---------------------------------------------------------------------------------------------


class Odd(ExitModel):
    """Looks at a value: cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.exits, self.fc = (1,), nn.Linear(2, 2)
        self.blocks, self.heads = nn.ModuleList([nn.Identity()]), nn.ModuleDict({"1": nn.Linear(2, 2)})

    def start(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else self.fc(x)


class OddFamily(Architecture):
    axes, blocks = {"classes": Axis(2, scaled=False)}, 1

    def build(self, axes: Any, exits: Any) -> nn.Module:
        return Odd()


def of_module(module: nn.Module, exits: tuple[int, ...] = (1,)) -> LevelModel:
    x = torch.rand(8, 2)
    data = Data("d", x, torch.zeros(8, dtype=torch.int64), {"test": torch.arange(8)}, 2)
    return LevelModel("1", OddFamily(), {"classes": 2}, exits, module.eval(), data)


def test_failed_traces_leave_nothing(tmp_path: Path) -> None:
    with raises(ModelError, "torch.export"):
        export(of_module(Odd()), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with raises(ConfigError, '"int8"', key="forms"):
        export(of_module(nn.Linear(2, 2)), tmp_path / "new", ["int"])
    with raises(RunError, path=tmp_path):
        export(of_module(nn.Linear(2, 2)), tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_modules_without_segments_are_exported_whole(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return [self.a(x), self.b(x)]

    result = export(of_module(Two(), (1, 2)), tmp_path / "out")
    assert "stop early" in result.notes[0] and "start" in result.notes[0]
    assert result.variants[1].difference < 1e-5
    x = torch.rand(5, 2)
    last = run_whole(tmp_path / "out" / "model.onnx", x)[-1]
    assert on_device(tmp_path / "out", x).tolist() == [[answer, 2] for answer in last.argmax(1).tolist()]


def test_wrong_graphs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = onnx_form.run_whole
    monkeypatch.setattr(onnx_form, "run_whole", lambda path, x: right(path, x) + 0.01)
    with raises(ModelError, 0.01):
        export(of_module(nn.Sequential(nn.Linear(2, 2))), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_model_of_a_fleet_whose_data_are_elsewhere(tmp_path: Path) -> None:
    facts = DataDescription("d", "classification", (2,), 2)
    there = of_module(nn.Sequential(nn.Linear(2, 2)))
    level_model = LevelModel("1", there.architecture, there.sizes, there.exits, there.module, facts)
    result = export(level_model, tmp_path / "out")
    assert result.variants[1].accuracies == () and result.variants[1].difference < 1e-5
    with raises(ConfigError, "--data", key="data"):
        export(level_model, tmp_path / "other", ["static-int8"])


def test_docs_list_the_forms_and_their_extras() -> None:
    root = Path(__file__).parents[2]
    page = (root / "docs/ship.md").read_text(encoding="utf-8")
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name, form in FORMS.items():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
        last = "yes" if form.is_exact else "no", f"`{form.extra}`" if form.extra else ""
        assert row.endswith(f" | {' | '.join(last)} |"), row
        requirements = {requirement.partition(">")[0] for requirement in extras.get(form.extra, ())}
        assert set(form.packages) <= requirements and form.needs in ("", *FORMS)


def test_the_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(MissingExtra, extra="export"):
        export(of_module(nn.Linear(2, 2)), tmp_path / "out")
    with raises(MissingExtra, extra="executorch"):
        export(of_module(nn.Linear(2, 2)), tmp_path / "out", ["executorch"])


# ---- what a review found -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_own_models_export_has_no_path(tmp_path: Path) -> None:
    """Evaluation by batch statistics only, a level without clients, a model of one's own."""
    here = Path(__file__).parents[1]
    run = ff.run(
        {"rounds": 1, "data": {"name": f"{here}/tiny.py:tiny_data", "partition": {"kind": "iid", "clients": 3}},
         "model": {"name": f"{here}/tiny.py:tiny"}, "method": {"name": "heterofl"},
         "fleet": {"levels": [0.3, 1.0], "tolerance": 0.2, "groups": [{"budget": 0.35}]},
         "evaluate": {"every": 0, "batch_norm": ["batch"]}}, out=tmp_path / "run",
    )  # fmt: skip
    for level in (1, 2):
        x = torch.rand(3, 1, 4, 4)
        assert torch.allclose(run.model(level)(x)[-1][:1], run.model(level)(x[:1])[-1], atol=1e-6)
        out = run.export(tmp_path / f"out{level}", level).folder
        assert any("running_mean" in name for name in load_file(out / "model.safetensors"))
        assert json.loads((out / "config.json").read_text())["model"] == "tiny"
        for path in out.iterdir():
            assert str(here).encode() not in path.read_bytes(), path.name
        assert (out / "run.py").exists() and "run.py" in (out / "README.md").read_text()
    with raises(ConfigError, "level 2"):
        run.calibrate(2)
    assert find_level(run, "2").name == "2" == find_level(run, 2).name


def test_a_calibration_of_another_round_is_not_followed(tmp_path: Path) -> None:
    run = ff.run(
        {"rounds": 1, "data": {"name": "tiny:tiny_data", "partition": {"kind": "iid", "clients": 3}},
         "model": {"name": "tiny:tiny"}, "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]},
         "evaluate": {"every": 0}}, out=tmp_path / "run",
    )  # fmt: skip
    run.calibrate(2, budget=1.0)
    path = tmp_path / "run" / "inference" / "level-2.json"
    payload = json.loads(path.read_text())
    assert payload["round"] == 1 and ff.api.inference.load_calibration(run, 2) == payload
    path.write_text(json.dumps({**payload, "round": 0}))
    with raises(ConfigError, "level-2.json", 0, 1):
        run.export(tmp_path / "out", 2)


@pytest.mark.parametrize("name", ["mlp_2nn", pytest.param("bert", marks=pytest.mark.slow)])
def test_an_offset_is_in_the_logits_of_every_form(name: str, tmp_path: Path) -> None:
    """The plain logits and log frequencies, at every exit and in every graph; the parameters are the plain ones."""
    plain = make_level_model(name)
    offset = torch.linspace(-1.0, 2.0, plain.data.classes)
    result = export(replace(plain, offset=offset), tmp_path / "out", ["onnx", "int8"])
    out, x = result.folder, plain.samples("test", 24)[0]
    expected, config = logits_of(plain, x) + offset, json.loads((out / "config.json").read_text())
    scale = max(1.0, float(expected.abs().max()))
    segments = [out / file for file in config["onnx"]["float"]["segments"]]
    for logits in (
        run_whole(out / "model.onnx", x),
        run_segments(segments, x),
        torch.stack(torch.export.load(out / "model.pt2").module()(x)).detach(),
    ):
        assert float((expected - logits).abs().max()) < 1e-4 * scale
    quantized = run_whole(out / config["onnx"]["int8"]["all_exits"], x)
    assert float((expected - quantized).abs().max()) < float((logits_of(plain, x) - quantized).abs().max())
    assert (Loader(out).predict(x.numpy())[0] == expected[-1].argmax(1).numpy()).all()
    assert config["added_to_logits"] == pytest.approx(offset.tolist())
    assert load_file(out / "model.safetensors").keys() == plain.module.state_dict().keys()
    (note,) = (note for note in result.notes if "frequencies" in note)
    assert note in (out / "README.md").read_text()


@pytest.mark.slow
def test_executorch_has_the_offset(tmp_path: Path) -> None:
    pytest.importorskip("executorch", reason="the extra executorch is not installed")
    plain = make_level_model("mlp_2nn")
    result = export(
        replace(plain, offset=torch.linspace(-1.0, 2.0, plain.data.classes)), tmp_path / "out", ["executorch"]
    )
    assert result.variants[-1].name == "executorch" and result.variants[-1].difference < 1e-4


def test_thresholds_without_the_offset_have_a_note(tmp_path: Path) -> None:
    plain = make_level_model("mlp_2nn", Policy((0.5, 0.0), "max", ()))
    offset = torch.ones(plain.data.classes)
    without, added = export(plain, tmp_path / "a", []), export(replace(plain, offset=offset), tmp_path / "b", [])
    assert (len(without.notes), len(added.notes)) == (0, 2)
    assert "added_to_logits" not in (without.folder / "config.json").read_text()


def test_a_regression_answers_in_the_unit_of_its_targets(tmp_path: Path) -> None:
    x = torch.rand(40, 2)
    y = 1000 + 500 * x.sum(1, keepdim=True)
    data = Data("prices", x, y, {"train": torch.arange(30), "validation": torch.arange(30, 40)}, 1, task="regression")
    mean, std = data.target_scale
    there = of_module(nn.Sequential(nn.Linear(2, 1)))
    level_model = LevelModel("1", there.architecture, there.sizes, there.exits, there.module, data)
    result = export(level_model, tmp_path / "out")  # and there is no test split
    [z] = run_whole(tmp_path / "out" / "model.onnx", x)
    assert torch.allclose(z, (there.module(x) * std + mean).detach(), rtol=1e-5)
    assert result.variants[1].agreement == () and result.variants[1].samples == 10
    assert result.samples == "validation" and "10 validation samples" in (result.folder / "README.md").read_text()
    assert make_export_table(result).title == "level 1 on 10 validation samples"
    error = float((z[30:] - y[30:]).abs().mean())
    assert [variant.errors for variant in result.variants] == [pytest.approx((error,), rel=1e-4)] * 2
    assert f"| {error:.4g} |" in (result.folder / "README.md").read_text()
    np.save(tmp_path / "labels.npy", y.numpy())
    answers = on_device(result.folder, x, "--labels", str(tmp_path / "labels.npy"))
    assert np.allclose(answers, np.hstack([z, np.ones((40, 1))]), rtol=1e-5)


def test_a_carry_that_is_no_batch_has_no_segments(tmp_path: Path) -> None:
    class Constant(ExitModel):
        def __init__(self) -> None:
            super().__init__()
            self.exits, self.blocks = (1, 2), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
            self.heads = nn.ModuleDict({"1": nn.Linear(2, 2), "2": nn.Linear(2, 2)})

        def start(self, x: torch.Tensor) -> Any:
            return x, 3

        def segment(self, i: int, carry: Any) -> Any:
            return self.blocks[i](carry[0]), carry[1]

        def head(self, i: int, carry: Any) -> torch.Tensor:
            result: torch.Tensor = self.heads[str(i + 1)](carry[0])
            return result

    result = export(of_module(Constant(), (1, 2)), tmp_path / "out")
    assert " int " in result.notes[0]


def test_an_empty_working_folder_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    export(of_module(nn.Sequential(nn.Linear(2, 2))), ".")
    assert (place / "model.onnx").is_file() and [p.name for p in tmp_path.iterdir()] == ["here"]


def test_refusals_come_before_tracing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetfit.inference.export.folder.write_program", lambda *arguments: pytest.fail("traced"))
    for form, expected in (
        ("static-int8", Expected("int8", kind=DataError)),
        ("transformers", Expected("BERT", kind=ModelError)),
    ):
        with raises(FleetFitError, expected):
            export(of_module(nn.Sequential(nn.Linear(2, 2))), tmp_path / "out", [form])

"""The command line: every mistake is one sentence on stderr and exit code 2; the verbs do what they say."""

import contextlib
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from support import raises, run_verb
from waiting import LIMIT_S, listening_to_ctrl_c, running, wait_until

import fleetfit as ff
from fleetfit import names
from fleetfit.cli import listing
from fleetfit.cli.run import demo
from fleetfit.config import load_experiment
from fleetfit.errors import ConfigError

SMALL = ["--set", "data.partition.clients=8", "--set", "rounds=2", "--set", "local.epochs=1", "--set", "cohort.count=4"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one finished run."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    run_verb("run", *SMALL, "--out", folder, "-q", code=0)
    return folder


@pytest.mark.parametrize(
    ("words", "override"),
    [
        (["run", "--rounds", "7"], "--set rounds=7"),
        (["run", "--local.lr=0.5"], "--set local.lr=0.5"),
        (["demo", "--batch-size", "16"], "--set local.batch_size=16"),
        (["plan", "--name", "my run"], "--set 'name=my run'"),
    ],
)
def test_an_option_that_is_a_key_leads_to_the_override(words: list[str], override: str) -> None:
    assert override in run_verb(*words, code=2).err


def test_what_is_no_run_file_leads_to_what_takes_it(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("shots/cats/a.png", "notes/readme.md", "table.csv", "studies/Small.toml"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("a,b\n1,2\n")
    for verb in ("run", "plan", "compare"):
        for source in ("shots", "notes", "table.csv"):
            assert f"--set data.path={source}" in run_verb(verb, source, code=2).err
        assert f"\n    fleetfit resume {done}\n" in run_verb(verb, done, code=2).err
        assert f"studies{os.sep}Small.toml" in run_verb(verb, "studies", code=2).err
        for typo in ("studies/small.toml", "studies/Smal.toml", "studies/Small"):
            assert '"Small.toml"' in run_verb(verb, typo, code=2).err
    with raises(ConfigError, "data.path=shots", path="shots"):
        ff.run("shots")


@pytest.mark.parametrize("out", ["to_folder", "to_nothing", "to_nothing/below", "to_link"])
def test_an_output_folder_may_be_a_link(out: str, tmp_path: Path) -> None:
    """The link stays; the run is where it leads."""
    (tmp_path / "there").mkdir()
    (tmp_path / "to_folder").symlink_to("there")
    (tmp_path / "to_nothing").symlink_to("deep/new")
    (tmp_path / "to_link").symlink_to("to_nothing")
    run_verb("run", *SMALL, "--out", tmp_path / out, "-q", code=0)
    assert (
        {"to_folder": tmp_path / "there", "to_nothing/below": tmp_path / "deep/new/below"}.get(
            out, tmp_path / "deep/new"
        )
        .joinpath("summary.json")
        .is_file()
    )
    assert all((tmp_path / name).is_symlink() for name in ("to_folder", "to_nothing", "to_link"))
    assert f"\n    fleetfit resume {tmp_path / out}\n" in run_verb("run", "--out", tmp_path / out, code=2).err


def test_an_output_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "file").write_text("")
    (tmp_path / "to_file").symlink_to("file")
    for name in ("circle", "file", "to_file"):
        assert str(tmp_path / name) in run_verb("run", *SMALL, "--out", tmp_path / name, code=2).err
        with pytest.raises(ff.FleetFitError):
            ff.run(load_experiment(None, SMALL[1::2]), out=tmp_path / name)


# ---- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run", "--bogus"], "No such option"),
        (["run", "--set"], "--set"),
        (["list", "foo"], '"foo" cannot be listed. Choose one of methods'),
        (["run", "missing.toml"], "missing.toml"),
        (["run", "--set", "local.batch_sise=3"], '[local] batch_sise: unknown key. Did you mean "batch_size"?'),
        (["run", "--set", "rounds=two"], "rounds: should be a valid integer, got 'two'."),
        (["run", "--set", "method.name=nowhere.module:it"], "importing nowhere.module failed: ModuleNotFoundError"),
        (["run", "--set", "method.name=missing.py:it"], "no such file:"),
        (["run", "--set", "data.name=cifar10", "--set", "data.folder=/nowhere"], "/nowhere"),
        (["run", "--set", "cohort.count=99"], "must be at most the number of clients, 40; got 99."),
        (["run", "--set", "engine.device=tpu"], 'engine.device must be "cpu", "cuda" or "cuda:N", got "tpu".'),
        (["compare", "missing.toml"], "missing.toml"),
        (["resume", "nowhere"], "no such run folder: nowhere."),
        (["eval", "nowhere"], "no such run folder: nowhere."),
        (["plan", "--model", "resnet9"], '"resnet9" is not among the models'),
        (["plan", "--model", "resnet20", "--budgets", "a,b"], "--budgets takes numbers separated by commas"),
        (["plan", "--model", "resnet20", "--budgets", "0"], "a budget must be a number above 0"),
        (["plan", "--model", "resnet20", "--budgets", "0.0001", "--scaling", "both"], "tolerance"),
        (["plan", "--model", "resnet20", "--budgets", "0.0001"], "0.000382"),
        (
            ["plan", "--model", "resnet20", "--scaling", "length"],
            "--scaling must be one of both, width, depth, depth_first, auto",
        ),
        (["plan", "--model", "resnet20", "--set", "seed=1"], "with --model, --set takes keys of the model"),
        (["plan", "--model", "resnet20", "--input-shape", "3,0,32"], "--input-shape takes sizes of at least 1"),
        (["plan", "--latency", "--passes", "0"], "'--passes': 0 is not in the range x>=1"),
        (["plan", "--latency", "--passes", "many"], "'--passes': 'many' is not a valid int"),
        (["plan", "--passes", "10", "--threads", "2"], "--passes, --threads: only with --latency."),
        (["plan", "--latency", "--threads", "9999"], "--threads must be at most the number of processors"),
        (["plan", "--budgets", "0.3,1", "--scaling", "width"], "--budgets, --scaling: only with --model"),
        (["plan", "run.toml", "--model", "resnet20"], "plan takes a run file or --model, not both."),
        (
            ["plan", "--model", "cnn", "--save", "/nowhere/plan.toml"],
            "cannot write the plan to /nowhere/plan.toml",
        ),
        (["check-model", "resnet", "--set", "model.depth=21"], "depth 6n+2"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run_verb(*arguments, code=2)
    assert message in result.err
    assert result.err.startswith("fleetfit: ")
    assert result.err.count("\n") == 1
    assert not any(tmp_path.iterdir()), "nothing is written"


def test_a_plug_in_that_fails_to_import_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('no luck')\n")
    (tmp_path / "run.toml").write_text('method.name = "broken.py:method"\n')
    result = run_verb("run", tmp_path / "run.toml", code=2)
    assert "failed: ValueError: no luck" in result.err


def test_a_missing_extra_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run_verb("run", "--set", "engine.name=ray", code=2)
    assert "fleetfit[ray]" in result.err


@pytest.mark.parametrize(
    ("module", "keys"),
    [
        ("pyarrow", ["data.path=rows.csv"]),
        ("pyarrow", ["data.path=rows.parquet"]),
        ("sklearn", ["fleet.groups=[" + ", ".join(f"{{budget = {i / 20}}}" for i in range(1, 21)) + "]"]),
    ],
)
def test_a_core_package_that_the_demo_leaves_out_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, keys: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [module, *(name for name in sys.modules if name.startswith(f"{module}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    Path("rows.csv").write_text("a,label\n" + "1,x\n2,y\n" * 40)
    Path("rows.parquet").write_bytes(b"PAR1")
    result = run_verb("run", *(word for key in keys for word in ("--set", key)), code=2)
    assert module in result.err and 'pip install "fleetfit"' in result.err
    assert result.err.count("\n") == 1 and "internal error" not in result.err


def test_seeds_without_scipy_are_refused_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    Path(tmp_path, "c.toml").write_text('rounds = 1\n[compare.grid]\nseed = [0, 1]\n[[compare.row]]\nlabel = "a"\n')
    result = run_verb("compare", tmp_path / "c.toml", "--out", tmp_path / "c", code=2)
    assert "scipy" in result.err and not list(tmp_path.rglob("metrics.jsonl"))


def test_the_demo_needs_only_what_make_demo_installs(tmp_path: Path) -> None:
    """`make demo` installs a part of the core dependencies; the demo runs and writes its page without the others."""
    root = Path(__file__).parents[1]
    core = tomllib.loads((root / "pyproject.toml").read_text())["project"]["dependencies"]
    needs = re.search(r"^DEMO_NEEDS := (.+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert needs
    left_out = {re.split("[>=<]", line)[0] for line in core} - {"torch", *needs[1].split()}
    assert left_out == {"pyarrow", "scikit-learn"}, "torch is installed first"
    program = (
        "import sys\n"
        "for name in ('pyarrow', 'sklearn', 'scipy', 'joblib', 'pandas', 'matplotlib'):\n"
        "    sys.modules[name] = None\n"
        "from fleetfit.cli import main\n"
        "main(['demo', '--set', 'rounds=1', '--set', 'data.partition.clients=8', '--set', 'local.epochs=1',\n"
        "      '--jobs', '1', '--out', 'demo'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "smallest model" in done.stdout and (tmp_path / "demo/report.html").is_file()


def test_a_folder_that_is_not_empty_is_refused(done: Path) -> None:
    """Of a finished run with what opens it and what trains it longer, each on a line of its own."""
    result = run_verb("run", *SMALL, "--out", done, code=2)
    lines = [line.strip() for line in result.err.splitlines()]
    assert f"fleetfit report {done}" in lines and f"fleetfit resume {done}" in lines


def test_a_checkpoint_of_a_newer_version_is_refused(done: Path, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    shutil.copytree(done, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    newer = tmp_path / "run" / "checkpoints" / "round-000099.safetensors"
    save_file({"x": torch.ones(1)}, newer, {"fleetfit": "checkpoint", "format": "99"})
    result = run_verb("resume", tmp_path / "run", code=2)
    assert newer.name in result.err and "99" in result.err


# ---- verbs ---------------------------------------------------------------------------------------------------------


def test_no_arguments_show_the_help() -> None:
    result = run_verb(code=0)
    assert "Usage" in result.out


def test_run_shows_rounds_and_ends_with_tables_and_the_folder(tmp_path: Path, without_plots: None) -> None:
    result = run_verb("run", *SMALL, "--out", tmp_path / "run", code=0)
    assert re.search(r"^round 1/2  loss \d\.\d{3}  .*left$", result.out, re.MULTILINE)
    assert re.search(r"^round 2/2  loss .*local \d+\.\d\d%  global \d+\.\d\d%", result.out, re.MULTILINE)
    for heading in ("level", "width", "depth", "parameters", "multiply-adds", "local accuracy %", "global accuracy %",
                    "bytes sent down / up"):  # fmt: skip
        assert heading in result.out
    assert result.out.rstrip().endswith(f"Run folder: {tmp_path / 'run'}")
    assert 'pip install "fleetfit[plots]"' in result.out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert f"{100 * summary['global']:.2f}" in result.out


def test_a_run_file_with_a_plug_in_method(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from fleetfit.hooks import Method\n\ndef mine():\n    return Method()\n")
    (tmp_path / "mine.toml").write_text('method.name = "own.py:mine"\nfleet.groups = [{ budget = 1.0 }]\n')
    run_verb("run", tmp_path / "mine.toml", *SMALL, "--out", tmp_path / "run", "-q", code=0)
    config = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert config["method"]["name"] == f"{tmp_path / 'own.py'}:mine"
    assert config["name"] == "mine"


def test_quiet_prints_the_folder_alone(tmp_path: Path) -> None:
    rows = 'compare.row=[{method.name="fedavg"}, {method.name="heterofl"}]'
    for words in (["run", *SMALL], ["compare", *SMALL, "--set", rows]):
        out = tmp_path / words[0]
        if words[0] == "compare":
            (tmp_path / "rows.toml").write_text("name = 'rows'\n")
            words = ["compare", tmp_path / "rows.toml", *words[1:]]
        result = run_verb(*words, "--out", out, "-q", code=0)
        assert (result.out.splitlines(), result.err) == ([str(out)], "")
    again = run_verb("resume", tmp_path / "run", "-q", code=0)
    assert (again.out.splitlines(), again.err) == ([str(tmp_path / "run")], "")


def test_who_cannot_take_part_is_said(tmp_path: Path) -> None:
    groups = 'fleet.groups=[{budget=0.05, name="tiny"}, {budget=1.0}]'
    arguments = [*SMALL, "--set", groups, "--set", "fleet.levels=[0.5, 1]", "--out", tmp_path / "run"]
    result = run_verb("run", *arguments, code=0)
    assert 'Note: 4 clients of group "tiny" (budget 0.05 ' in result.out


def test_groups_without_clients_share_a_note(tmp_path: Path) -> None:
    run = ff.run(data={"name": "digits", "partition": {"kind": "iid", "clients": 2}}, rounds=1, out=tmp_path / "run",
                 fleet={"groups": [{"budget": 0.25}, {"budget": 0.5, "name": "b", "fraction": 0.01},
                                   {"budget": 1.0, "name": "c", "fraction": 0.01}]}, progress=False)  # fmt: skip
    assert [('"b", "c"' in note, "2 clients" in note) for note in run.notes if '"b"' in note] == [(True, True)]


def test_eval_prints_what_the_run_found(done: Path) -> None:
    result = run_verb("eval", done, "--json", code=0)
    summary = json.loads((done / "summary.json").read_text())
    assert json.loads(result.out)["static"]["global"] == summary["global"]
    table = run_verb("eval", done, "--split", "validation")
    assert "validation data" in table.out
    assert "local accuracy %" in table.out


def test_resume_of_a_finished_run_prints_it_again(done: Path) -> None:
    result = run_verb("resume", done, code=0)
    assert "global accuracy %" in result.out and str(done) in result.out


def test_compare_prints_one_table(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(
        '[[compare.row]]\nmethod.name = "fedavg"\n[[compare.row]]\nmethod.name = "heterofl"\n'
    )
    result = run_verb("compare", tmp_path / "two.toml", *SMALL, "--out", tmp_path / "out", code=0)
    assert re.search(r"^\[1/2\] fedavg, seed 0  round 2/2", result.out, re.MULTILINE)
    assert re.search(r"│ heterofl +│ +\d+\.\d\d +│ +\d+\.\d\d", result.out)
    assert (tmp_path / "out" / "heterofl" / "seed-0" / "summary.json").is_file()
    again = run_verb("compare", tmp_path / "two.toml", *SMALL, "--out", tmp_path / "out")
    assert "[2/2] heterofl, seed 0: already finished." in again.out


def test_plan_of_a_run_file_can_be_saved_and_used(tmp_path: Path) -> None:
    result = run_verb("plan", *SMALL, "--save", tmp_path / "plan.toml", code=0)
    assert "digits, 8 clients" in result.out
    levels = ["--set", f"fleet.levels={tmp_path / 'plan.toml'}", "--out", str(tmp_path / "run"), "-q"]
    run_verb("run", *SMALL, *levels, code=0)
    saved, used = (tomllib.loads((tmp_path / name).read_text()) for name in ("plan.toml", "run/plan.toml"))
    assert saved == used


def test_plan_of_a_model_with_given_exits() -> None:
    options = ["--model", "resnet110", "--exits", "36,42,48", "--widths", "0.7,0.7,0.75"]
    result = run_verb("plan", *options, code=0)
    for number in ("1.73 M", "253.1 M", "138.5 M", "99.7 M", "1 (36), 2 (42), 3 (48), 4 (54)"):  # as in Table 1
        assert number in result.out, number


def test_list_data_is_table_2() -> None:
    result = run_verb("list", "data")
    assert re.search(r"cifar100 +│ 50,000 +│ 10,000 +│ 100 +│ 32x32", result.out)


def test_list_profiles_has_every_figure_and_its_source() -> None:
    from fleetfit.profiles import PROFILES

    result = run_verb("list", "profiles", code=0)
    for name, profile in PROFILES.items():
        assert f"{profile.multiply_adds_per_s / 1e9:.1f} G" in result.out
        assert f"{name}: {profile.source}" in result.out


@pytest.mark.parametrize("kind", ["methods", "options", "selection", "models", "engines"])
def test_list_has_a_line_for_everything_built_in(kind: str) -> None:
    from fleetfit import names

    result = run_verb("list", kind, code=0)
    for name in names.list_names(kind):
        assert re.search(rf"│ {name} +│ \w", result.out), name


def test_check_model_prints_the_report() -> None:
    result = run_verb("check-model", "cnn", "--input-shape", "1,8,8", "--set", "model.norm=group", code=0)
    assert "norm='group'" in result.out


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from fleetfit.cli import main; main()", "run", *SMALL, "--set", "rounds=500",
               "--out", str(tmp_path / "run")]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with running(command, **pipes, preexec_fn=listening_to_ctrl_c) as process:
        wait_until(lambda: list((tmp_path / "run" / "checkpoints").glob("*.safetensors")), process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (130, -signal.SIGINT), "a shell shows 130 for both"
    assert len(err.splitlines()) == 2 and err.rstrip().endswith(f"fleetfit resume {tmp_path / 'run'}")


def test_list_explains_the_keys_of_one() -> None:
    output = run_verb("list", "options", "fedprox").out
    assert "mu" in output and "0.01" in output and "Strength" in output
    assert "│" not in run_verb("list", "selection", "uniform", code=0).out, "it has no keys"
    wrong = run_verb("list", "models", "resnet21", code=2)
    assert '"resnet32"' in wrong.err and "Traceback" not in wrong.err


@pytest.mark.parametrize(
    ("words", "near"),
    [(["rnu", "first.toml"], "run"), (["resme"], "resume"), (["comapre"], "compare"), (["run", "--sett"], "--set"),
     (["flower", "membr"], "member")],
)  # fmt: skip
def test_the_nearest_verb_or_option_is_named_once(words: list[str], near: str) -> None:
    wrong = run_verb(*words)
    assert wrong.code == 2 and wrong.err.count(f"'{near}'") == 1, wrong.err


@pytest.mark.parametrize("kind", ["methods", "options", "selection", "models", "data", "engines"])
def test_every_key_is_explained(kind: str) -> None:
    for name in names.list_names(kind):
        assert all(meaning for _, _, meaning in listing.make_key_table(kind, name).rows), name


def test_shells_complete_verbs_and_kinds() -> None:
    environment = {**os.environ, "_FLEETFIT_COMPLETE": "complete_bash"}
    for words, at, expected in (("fleetfit pl", "1", ["plan"]), ("fleetfit list sel", "2", ["selection"])):
        process = subprocess.run(
            [sys.executable, "-m", "fleetfit"], env={**environment, "COMP_WORDS": words, "COMP_CWORD": at},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert (process.returncode, process.stdout.split(), process.stderr) == (0, expected, "")


def test_log_records_are_printed_from_the_chosen_level() -> None:
    logger = logging.getLogger("fleetfit")
    for options, lines in (((), {"a warning"}), (("--log", "info"), {"a warning", "some news"})):
        run_verb(*options, "list", "options")
        with contextlib.redirect_stderr(io.StringIO()) as stderr:
            logger.debug("a trifle")
            logger.info("some news")
            logger.warning("a %s", "warning")
        assert set(stderr.getvalue().splitlines()) == {f"fleetfit: {line}" for line in lines}


@pytest.mark.parametrize(
    ("cores", "overrides", "jobs"),
    [(1, [], 1), (2, ["rounds=2"], 2), (64, [], 4), (2, ["engine.name=processes"], 1)],
)
def test_the_demo_uses_all_cores(cores: int, overrides: list[str], jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = list[int]()
    monkeypatch.setattr("fleetfit.cli.run.available_cores", lambda: cores)
    monkeypatch.setattr("fleetfit.cli.run.WINDOWS", False)
    monkeypatch.setattr("fleetfit.cli.compare.run_comparison", lambda *_, jobs, **__: counts.append(jobs))
    demo(None, None, None, overrides, True)
    assert counts == [jobs]

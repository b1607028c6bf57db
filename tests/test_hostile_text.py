"""Text of a stranger's files, names and exceptions reaches no terminal, log or page raw, and no line is very long.

Every text and every key in every file of a run and of a comparison is made hostile, one at a time, and every verb that
reads the folder is called. The quick tests try some places of each file with every verb, the slow ones try all places.
"""

import ast
import contextlib
import csv
import io
import itertools
import json
import logging
import re
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hostile import (
    BACK,
    C1,
    CODES,
    COLOR,
    LINES,
    LONG,
    LONGEST,
    LONGEST_HTML,
    TITLE,
    TURNED,
    Place,
    check_files,
    check_text,
    one_of_each,
    places_in,
    put,
    read_nest,
    write_nest,
)

import fleetfit as ff
from fleetfit.api import profiling
from fleetfit.api.progress import RoundFacts, RoundProgress, format_html
from fleetfit.cli import main, output
from fleetfit.cost import Latency
from fleetfit.errors import FleetFitError, escape_controls, make_printable
from fleetfit.fleet import logs
from fleetfit.fleet.worker import NodeWorker
from fleetfit.inference.export import to_transformers
from fleetfit.markup import html_table
from fleetfit.report import drawing
from fleetfit.report.comparison_csv import format_comparison_csv
from fleetfit.report.results import format_results
from fleetfit.report.text import Table
from fleetfit.runs.comparison import read_results
from fleetfit.training.profiling import Measurement

TEXTS = (CODES, LONG, TITLE, COLOR, C1, BACK, TURNED, LINES)
NEWEST = "checkpoints/round-000003.safetensors"
OF_A_RUN = ("summary.json", "environment.json", "metrics.jsonl", "fleet.json", "plan.toml", "config.toml",
            "columns.json", "inference/level-2.json", "nodes.json", NEWEST)  # fmt: skip
OF_A_COMPARISON = ("results.json", "runs.json", "first/seed-1/summary.json",
                   "first/seed-1/config.toml", "first/seed-1/metrics.jsonl", "first/seed-1/environment.json",
                   "first/seed-1/plan.toml")  # fmt: skip
VERBS: dict[str, list[str]] = {
    "runs": ["runs", "FOLDER"],
    "watch": ["watch", "FOLDER", "--once"],
    "report": ["report", "FOLDER"],
    "runs --json": ["runs", "FOLDER", "--json"],
    "runs --clear": ["runs", "FOLDER", "--clear-checkpoints", "--yes"],
    "eval": ["eval", "FOLDER"],
    "eval --json": ["eval", "FOLDER", "--json"],
    "resume": ["resume", "FOLDER"],
    "go on": ["resume", "FOLDER"],
    "predict": ["predict", "FOLDER", "--out", "OUT/predicted.csv"],
    "predict --stop": ["predict", "FOLDER", "--stop"],
    "calibrate": ["calibrate", "FOLDER"],
    "calibrate --json": ["calibrate", "FOLDER", "--json"],
    "export": ["export", "FOLDER", "--no-onnx", "--out", "OUT/device"],
    "pictures": ["pictures", "FOLDER", "--format", "svg", "--out", "OUT/drawn"],
    "plan": ["plan", "FOLDER/config.toml"],
    "plan again": ["plan", "FOLDER/config.toml", "--set", "fleet.levels=FOLDER/plan.toml"],
    "profile": ["profile", "FOLDER/config.toml", "--step-s", "100", "--memory", "4 GB", "--out", "OUT/budget.toml"],
    "start": ["run", "FOLDER/config.toml", "--set", "init_from=FOLDER", "--set", "rounds=1", "--out", "OUT/begun"],
    "debug": ["--log", "debug", "--traceback", "eval", "FOLDER"],
}
COMPARED: dict[str, list[str]] = {
    "runs": ["runs", "FOLDER"],
    "runs --json": ["runs", "FOLDER", "--json"],
    "runs above": ["runs", "FOLDER/.."],
    "watch": ["watch", "FOLDER", "--once"],
    "report": ["report", "FOLDER"],
    "report of both": ["report", "FOLDER", "FOLDER/first/seed-1", "--out", "OUT/both.html"],
    "compare": ["compare", "ROWS", "--out", "FOLDER", "--record", "OUT"],
}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """Draw nothing and measure nothing: it takes longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drawing, "is_available", lambda: False)
        measurement = Measurement(Latency(0.1, 0.01, 9), Latency(0.01, 0.001, 9), 10**6, 3 * 10**8)
        patch.setattr(profiling, "profile_level", lambda *_: measurement)
        yield


def flowers(path: Path, words: tuple[str, ...] = ("color", "red", "blue", "species", "first", "second")) -> Path:
    """Write a table of flowers: a number, a category and a class."""
    kind, red, blue, species, first, second = words
    with path.open("w", newline="", encoding="utf-8", errors="surrogatepass") as file:
        rows = ([f"{i % 2 + i / 200:.3f}", (red, blue)[i % 3 % 2], (first, second)[i % 2]] for i in range(80))
        csv.writer(file).writerows([["length", kind, species], *rows])
    return path


def make_settings(table: Path, **further: Any) -> dict[str, Any]:
    return {
        "name": "flowers", "seed": 1, "rounds": 3, "data": {"path": str(table), "partition": {"clients": 4}},
        "model": {"name": "mlp", "hidden": 8, "layers": 3},
        "fleet": {"levels": [0.4, 1.0], "tolerance": 0.3, "groups": [{"budget": 0.4}, {"budget": 1.0}]},
        "method": {"name": "scalefl"}, "local": {"epochs": 1}, "cohort": {"count": 3}, "evaluate": {"every": 1},
        **further,
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a finished run, the same as it was after its second round, one of nodes, and a comparison."""
    root = tmp_path_factory.mktemp("hostile")
    tables = make_settings(flowers(root / "flowers.csv"))
    run = ff.run(tables, out=root / "finished")
    run.calibrate()
    (run.folder / "report.html").unlink()
    shutil.copytree(run.folder, root / "stopped")
    (root / "stopped/summary.json").unlink()
    (root / "stopped" / NEWEST).unlink()
    (root / "stopped/metrics.jsonl").write_text("".join(
        line for line in (run.folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    ))  # fmt: skip
    shutil.copytree(run.folder, root / "nodes")
    data = {
        "name": "flowers",
        "task": "classification",
        "sample_shape": [3],
        "classes": 2,
        "vocabulary": 0,
        "padding": 0,
    }
    member = {"name": "node-1", "facts": data, "examples": {"train": 40}, "labels": [20, 20], "budget": 0.4}
    nodes = {"run": "0", "data": data, "planned": [member], "members": [{**member, "node": "1"}]}
    (root / "nodes/nodes.json").write_text(json.dumps(nodes))
    rows = [{"label": "first", "method": {"name": "scalefl"}}, {"label": "second", "method": {"name": "heterofl"}}]
    compared = {**make_settings(root / "flowers.csv", rounds=2), "compare": {"row": rows}}
    del compared["method"]
    (root / "rows.toml").write_text(tomli_w.dumps(compared))
    (root / "above").mkdir()
    ff.compare(root / "rows.toml", out=root / "above/compared")
    return root


# ---- calling ---------------------------------------------------------------------------------------------------------


def call(arguments: list[str]) -> str:
    """Call the command in this process, and look at all that it printed."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code in (0, 2, 3), err.getvalue()
    check_text(err.getvalue())
    if "--json" in arguments and ended.value.code == 0:
        assert out.getvalue().isascii()
        json.loads(out.getvalue())
    else:
        check_text(out.getvalue())
        assert "A" * 400 not in out.getvalue() + err.getvalue(), "a long name is in the way of what is said"
    return out.getvalue() + err.getvalue()


def fill_in_paths(words: list[str], **places: Path) -> list[str]:
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    return words


def ask(root: Path, at: Path, kind: str, verb: str, change: Callable[[Path], None]) -> None:
    """Change a copy of a folder, call a verb on it, and look at what it printed and wrote."""
    folder, out = at / "copied" / kind, at / "out"
    shutil.copytree(root / kind, folder)
    out.mkdir()
    try:
        change(folder)
        contents = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
        verbs = COMPARED if kind == "above/compared" else VERBS
        call(fill_in_paths(verbs[verb], FOLDER=folder, OUT=out, ROWS=root / "rows.toml"))
        check_files(out)
        for path in folder.rglob("*.*"):  # what is as the stranger wrote it says nothing of FleetFit
            if path.is_file() and contents.get(path) == path.read_bytes():
                path.unlink()
        check_files(folder)
    finally:
        shutil.rmtree(folder)
        shutil.rmtree(out)


def make_hostile_change(file: str, place: Place, text: str, behind: bool) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        document = read_nest(folder / file)
        put(document, place, text, behind)
        write_nest(folder / file, document)

    return change


def find_place(file: str, verb: str) -> tuple[str, str]:
    """Return which folder a verb is called on, and how a file of a finished run is called there."""
    if verb == "go on" and file not in ("summary.json", "nodes.json"):
        return "stopped", file.replace("000003", "000002")
    return "nodes" if file == "nodes.json" else "finished", file


# ---- files -----------------------------------------------------------------------------------------------------------


def try_places(root: Path, at: Path, of: list[tuple[str, str, str, Place]]) -> None:
    """Make one place after the other hostile, with another text each: folder, file, verb and place."""
    for number, (kind, file, verb, place) in enumerate(of):
        text, behind = TEXTS[number % len(TEXTS)], number // len(TEXTS) % 2 == 0
        try:
            ask(root, at, kind, verb, make_hostile_change(file, place, text, behind))
        except AssertionError as error:
            raise AssertionError(f"{verb} with {file}, {place}, {text[:20]!r}, behind={behind}: {error}") from error


@pytest.mark.parametrize("file", OF_A_RUN)
def test_some_places_of_a_run_reach_no_terminal(root: Path, tmp_path: Path, file: str) -> None:
    """Each verb gets a place of every second file, and another one than the verb before."""
    of = []
    for number, verb in enumerate(VERBS):
        if (number + OF_A_RUN.index(file)) % 2:
            continue
        kind, name = find_place(file, verb)
        places = list(one_of_each(places_in(read_nest(root / kind / name))))
        of.append((kind, name, verb, places[7 * (number + 1) % len(places)]))
    try_places(root, tmp_path, of)


@pytest.mark.parametrize("file", OF_A_COMPARISON)
def test_some_places_of_a_comparison_reach_no_terminal(root: Path, tmp_path: Path, file: str) -> None:
    kind = "above/compared"
    places = list(one_of_each(places_in(read_nest(root / kind / file))))
    try_places(root, tmp_path, [
        (kind, file, verb, places[(step * number + step) % len(places)])
        for number, verb in enumerate(COMPARED) for step in (3, 7)
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("file", OF_A_RUN)
def test_no_place_of_a_run_reaches_a_terminal(root: Path, tmp_path: Path, file: str, part: int) -> None:
    """Each place with each fourth verb in turn: those of the next place are others."""
    of = []
    for number, verb in enumerate(VERBS):
        kind, name = find_place(file, verb)
        places = list(one_of_each(places_in(read_nest(root / kind / name))))[part::4]
        of += [(kind, name, verb, place) for at, place in enumerate(places) if (at + part + number) % 4 == 0]
    try_places(root, tmp_path, of)


@pytest.mark.slow
@pytest.mark.parametrize("verb", COMPARED)
@pytest.mark.parametrize("file", OF_A_COMPARISON)
def test_no_place_of_a_comparison_reaches_a_terminal(root: Path, tmp_path: Path, file: str, verb: str) -> None:
    kind = "above/compared"
    places = one_of_each(places_in(read_nest(root / kind / file)))
    try_places(root, tmp_path, [(kind, file, verb, place) for place in places])


# ---- names, and what plug-ins raise ----------------------------------------------------------------------------------


FOLDERS = (TITLE + "run", C1 + TURNED, BACK + COLOR)
WITH_FOLDERS = ("runs", "watch", "report", "eval", "resume", "predict", "export", "plan", "profile", "start")


@pytest.mark.parametrize("verb", WITH_FOLDERS)
def test_names_of_folders_reach_no_terminal(root: Path, tmp_path: Path, verb: str) -> None:
    name = FOLDERS[WITH_FOLDERS.index(verb) % len(FOLDERS)]
    shutil.copytree(root / "finished", tmp_path / name / "run")
    call(fill_in_paths(VERBS[verb], FOLDER=tmp_path / name / "run", OUT=tmp_path / name))
    check_files(tmp_path)


@pytest.mark.parametrize("name", [TITLE, C1 + TURNED, BACK + COLOR], ids=["title", "turned", "back"])
def test_the_place_of_a_plug_in_reaches_no_terminal(root: Path, tmp_path: Path, name: str) -> None:
    """A budget file names it in a comment, where TOML takes no control characters."""
    file = tmp_path / name / "plug.py"
    file.parent.mkdir()
    file.write_text("from fleetfit.methods.scalefl import scalefl as made\n")
    plug = ["--set", f"method.name={file}:made"]
    call([*fill_in_paths(VERBS["profile"], FOLDER=root / "finished", OUT=tmp_path), *plug])
    check_files(tmp_path)
    assert "plug.py:made" in (tmp_path / "budget.toml").read_text()
    assert tomllib.loads((tmp_path / "budget.toml").read_text())["budget"]


@pytest.mark.parametrize("text", TEXTS[:1] + TEXTS[2:], ids=repr)
def test_names_in_data_reach_no_terminal(tmp_path: Path, text: str) -> None:
    """Columns, categories, classes and the file itself are named by a stranger; the run and its export work."""
    words = tuple(f"{name}{text}" for name in ("color", "red", "blue", "species", "first", "second"))
    table = flowers(tmp_path / f"t{text.replace('/', '')}.csv", words)
    (tmp_path / "run.toml").write_text(tomli_w.dumps(make_settings(table, rounds=1)), encoding="utf-8")
    folder, device = tmp_path / "run", tmp_path / "device"
    assert "accuracy" in call(["run", str(tmp_path / "run.toml"), "--out", str(folder)])
    assert "Written" in call(["export", str(folder), "--no-onnx", "--out", str(device)])
    assert "Written" in call(["predict", str(folder), "--out", str(tmp_path / "predicted.csv")])
    profile = ["profile", str(tmp_path / "run.toml"), "--step-s", "100", "--memory", "4 GB"]
    call([*profile, "--out", str(tmp_path / "budget.toml")])
    for place in (folder, device):
        check_files(place)
    for file in ("predicted.csv", "budget.toml"):
        check_text((tmp_path / file).read_text())
    assert ff.load(folder).assembly.data.class_names == tuple(sorted(words[4:])), "the values are as they were"


RAISES = """
from dataclasses import replace
import fleetfit as ff
from fleetfit.methods.scalefl import scalefl

def fails(*_):
    raise {error}

def made():
    fails()

def weighed():
    return replace(scalefl(), weight=fails)

def trained():
    return replace(scalefl(), loss=fails)

def merged():
    return replace(scalefl(), aggregate=fails)

def told(report):
    fails()
"""
PLUGS = ("method.name=FILE:made", "method.name=FILE:weighed", "method.name=FILE:trained", "method.name=FILE:merged",
         'callbacks=["FILE:told"]')  # fmt: skip


ERRORS = ("ValueError", "KeyError", "ff.ConfigError", "SystemExit")


@pytest.mark.parametrize("plug", PLUGS)
@pytest.mark.parametrize("error", ERRORS)
def test_what_a_plug_in_raises_reaches_no_terminal(root: Path, tmp_path: Path, error: str, plug: str) -> None:
    """Each error of each hook with two of the texts, which take turns: each text comes from each hook."""
    (tmp_path / "run.toml").write_text(tomli_w.dumps(make_settings(root / "flowers.csv", rounds=1)))
    for number in range(ERRORS.index(error), len(TEXTS), len(ERRORS)):
        text = TEXTS[number]
        file, folder = tmp_path / f"plug{number}.py", tmp_path / f"run{number}"
        file.write_text(RAISES.format(error=f"{error}({text!r})"), encoding="utf-8")
        words = ["--set", plug.replace("FILE", str(file)), "--out", str(folder)]
        output = call(["--traceback", "run", str(tmp_path / "run.toml"), *words])
        assert any(word in output for word in ("owned", "red", "31m", "done", "evil", "2028", file.name)), output
        if folder.is_dir():
            check_files(folder)


WARNS = """
import warnings
from fleetfit.methods.scalefl import scalefl

def made():
    for text in {texts}:
        warnings.warn(text)
    return scalefl()
"""


def test_warnings_reach_no_terminal(root: Path, tmp_path: Path) -> None:
    """In a process of its own: there they are printed."""
    (tmp_path / "plug.py").write_text(WARNS.format(texts=TEXTS), encoding="utf-8")
    words = ["plan", str(root / "finished/config.toml"), "--set", f"method.name={tmp_path / 'plug.py'}:made"]
    done = subprocess.run([sys.executable, "-m", "fleetfit", *words], capture_output=True, text=True, check=True)
    assert done.stderr.count("UserWarning") == len(TEXTS) and "owned" in done.stderr
    check_text(done.stderr)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_what_is_typed_reaches_no_terminal(text: str) -> None:
    for words in (["list", "methods", text], ["list", text], ["runs", text], [text], ["plan", "--model", text],
                  ["run", "--set", text], ["run", "--set", f"data.name={text}"], ["check-model", text],
                  ["export", ".", "--level", text]):  # fmt: skip
        call(words)


# ---- from Python -----------------------------------------------------------------------------------------------------


def collect_messages(root: Path, at: Path, file: str, place: Place, text: str, behind: bool) -> list[str]:
    """Open a changed folder from Python; return all that is said: errors, log records and warnings."""
    kind = "above/compared" if file in OF_A_COMPARISON else find_place(file, "eval")[0]
    folder = at / "opened"
    shutil.copytree(root / kind, folder)
    make_hostile_change(file, place, text, behind)(folder)
    messages: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler, logger = Kept(), logging.getLogger("fleetfit")
    logger.addHandler(handler)
    try:
        for open_it in (ff.load_comparison,) if kind == "above/compared" else (ff.load, ff.resume):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    stored = open_it(folder)
                    messages.append(stored._repr_html_())
                    messages += (
                        [stored.table.to_markdown()] if isinstance(stored, ff.Comparison) else [str(stored.summary)]
                    )
                except FleetFitError as error:
                    messages.append(str(error))
            messages += [str(one.message) for one in warned]
    finally:
        logger.removeHandler(handler)
        shutil.rmtree(folder)
    return messages


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in (1, 2))])
@pytest.mark.parametrize("file", OF_A_RUN + OF_A_COMPARISON)
def test_what_python_is_told_is_printable(root: Path, tmp_path: Path, file: str, part: int) -> None:
    """Each third place, with one text after the other."""
    kind = "above/compared" if file in OF_A_COMPARISON else find_place(file, "eval")[0]
    places = list(one_of_each(places_in(read_nest(root / kind / file))))[part::3]
    for number, (place, text) in enumerate(zip(places, itertools.cycle(TEXTS), strict=False)):
        for message in collect_messages(root, tmp_path, file, place, text, number // len(TEXTS) % 2 == 0):
            check_text(
                message, 10**8 if message.startswith("{") else LONGEST_HTML if message.startswith("<") else LONGEST
            )


# ---- what makes text printable ---------------------------------------------------------------------------------------

LEGITIMATE = ("", "a\nb", "é ß 中文 日本語 עברית العربية हिन्दी", "│ ├── ╭─╮ ± µ … “quoted”", "a\u00a0b\u2009c\u3000d",
              "👩\u200d🔬 🇩🇪 e\u0301 \ue0b0", "/" + "/".join(["x" * 255] * 15), "word " * 900)  # fmt: skip


@pytest.mark.parametrize("text", LEGITIMATE)
def test_legitimate_text_keeps_its_characters(text: str) -> None:
    """Letters of all languages, pictures, lines of boxes, odd spaces, and the longest path there may be."""
    assert make_printable(text) == text == str(ff.RunError(text))
    assert Table((text,), ((text,),), text, (text,)).notes == (text,)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_escaped_documents_keep_their_values(text: str) -> None:
    for values in ({"a": text}, {text: 1}, {"b": [{text: [text, "é\n"]}]}):
        document = escape_controls(json.dumps(values, ensure_ascii=False))
        for written in (document, to_transformers._format_json(values)):
            check_text(written, 10**8)
            assert json.loads(written) == values
        document = escape_controls(tomli_w.dumps(values))
        check_text(document, 10**8)
        assert tomllib.loads(document) == values


def test_a_long_text_keeps_its_ends() -> None:
    message = str(ff.ModelError(f'"{"a" * 10**6}" is missing. ' + "Mend it. " * 10**5 + "The end."))
    assert message.startswith('"aaa') and message.endswith("The end.") and 4_000 < len(message) <= LONGEST
    assert len(make_printable("\n".join(["b " * 10**5] * 3)).split("\n")) == 3


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_a_table_is_printable_in_every_form(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table((text, "b"), ((text, "1"), ("x", text)), text, (text,), ((text, 2),))
    for form in (table.to_markdown(), table.to_html()):
        check_text(form)
    output.print_table(table)
    check_text(capsys.readouterr().out)


@pytest.mark.parametrize("text", TEXTS[:1] + TEXTS[2:], ids=lambda text: repr(text[:9]))
def test_what_a_comparison_writes_keeps_its_values(root: Path, text: str) -> None:
    stored = read_results(root / "above/compared/results.json")
    runs = [run.model_copy(update={"row": text}) for run in stored.runs]
    results = stored.model_copy(update={"name": text, "settings": {text: text}, "runs": runs})
    for written in (format_results(results), format_comparison_csv(results)):
        check_text(written)
    again = json.loads(format_results(results))
    assert (again["name"], again["settings_of_file"]) == (text, {text: text})


@pytest.mark.parametrize("text", TEXTS[:1] + TEXTS[2:], ids=lambda text: repr(text[:9]))
def test_a_saved_plan_keeps_its_values(root: Path, text: str) -> None:
    plan = ff.load(root / "finished").plan
    written = replace(plan, levels=tuple(replace(level, name=text) for level in plan.levels)).to_toml()
    check_text(written)
    assert [level["name"] for level in tomllib.loads(written)["level"]] == [text, text]


@pytest.mark.parametrize("text", TEXTS[:1] + TEXTS[2:], ids=lambda text: repr(text[:9]))
def test_a_notebook_shows_no_control_characters(root: Path, text: str) -> None:
    facts = RoundFacts(3, "static")
    for page in (format_html(text, facts, text), html_table((text,), ((text,),), text, (text,), ((text, 1),))):
        check_text(page)
        assert "<img" not in html_table(("<img>",), ())


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_a_terminal_gets_the_codes_of_rich_alone(root: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the codes that reach it, none is one that the text has and a bar or a table has not."""
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    report = json.loads((root / "finished/metrics.jsonl").read_text().splitlines()[0])
    levels = report["evaluate"]["static"]["levels"]
    levels[f"1{text}"] = levels.pop("1")
    report["undone"] = {"reason": text, "reported": [{"client": text, "level": 1, "norm": 1.0}]}
    bar = RoundProgress(text, ff.load(root / "finished").experiment)
    bar(report)
    bar.close()
    output.print_table(Table((text, "b"), ((text, "1"),), text, (text,)))
    output.print_line(text)
    printed = screen.getvalue()
    assert ("\x1b[" in printed and "\\u00" in printed) or "\\u20" in printed
    check_text(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", printed).replace("\n", ""), 10**6)
    assert "\x1b[31mred" not in printed and "\rdone" not in printed


def test_a_picture_holds_no_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SVG names its texts in comments."""
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(drawing, "is_available", lambda: True)
    figure = drawing.make_figure(8, 8)
    axes = figure.add_subplot()
    for number, text in enumerate(TEXTS[:1] + TEXTS[2:]):
        axes.plot([0, 1], [number, 1], label=text)
    drawing.label_axes(axes, CODES, TITLE, COLOR)
    drawing.add_legend_below(axes)
    drawing.add_notes(figure, [CODES, LONG])
    drawing.save_figure(figure, tmp_path / "drawn.svg")
    assert "owned" in (tmp_path / "drawn.svg").read_text()
    check_files(tmp_path)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_the_log_of_a_fleet_is_printable(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With the tracebacks that go with its lines."""
    try:
        raise ValueError(text)
    except ValueError as error:
        record = logging.LogRecord("fleetfit", 40, __file__, 1, "%s", (text,), (ValueError, error, error.__traceback__))
    logs._StderrHandler().emit(record)
    check_text(capsys.readouterr().err)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_a_record_is_printable(text: str, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("fleetfit").warning("%s of %d", text, 3)
    assert caplog.messages[0].endswith(" of 3")
    check_text(caplog.messages[0])


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:9]))
def test_what_a_worker_prints_is_printable(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    NodeWorker("node.toml")._forward(io.BytesIO(text.encode(errors="replace") + b"\xff\n"))
    check_text(capsys.readouterr().err)


def test_nothing_is_printed_past_what_makes_it_printable() -> None:
    """Each call that prints stands here, so that a new one is thought of: the rest goes through `cli.output`."""
    package = Path(ff.__file__).parent
    prints = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _WRITERS
            calls = named and _PRINTS.search(ast.unparse(node.func))
            prints += [f"{path.relative_to(package)}: {ast.unparse(node)}"] if calls else []
    strange = [call for call in prints if "make_printable(" not in call and not any(map(call.startswith, KNOWN))]
    assert not strange
    assert all(any(map(str.startswith, prints, [one] * len(prints))) for one in KNOWN), (
        "what is gone stands here no more"
    )


_WRITERS = {"print", "echo", "write", "pprint"}
_PRINTS = re.compile(r"^print$|\.echo$|console\.print$|std(out|err)(\.buffer)?\.write$|^rich\.print$|^pprint")
KNOWN = (
    "api/progress.py: print(text,",  # made printable in the line before
    "api/progress.py: bars.console.print(text,",
    "cli/output.py: console.print(",  # a Table is printable
    "cli/output.py: print(json.dumps(value, indent=2)",  # ASCII
    "cli/output.py: print(line,",
    "cli/main.py: typer.echo(__version__)",
    "cli/main.py: typer.echo(context.get_help())",
    "fleet/logs.py: sys.stderr.write(line)",
    "inference/export/on_device.py: print(",  # numbers
    "training/profiling/process.py: print(json.dumps(",  # to another process
)

"""The page of a run, of a comparison, of several: what is in it, what is withheld, and that no text in it is markup."""

import base64
import hashlib
import json
import logging
import re
import shlex
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import raises

import fleetfit as ff
from fleetfit.cli.main import run_command
from fleetfit.errors import RunError
from fleetfit.report import page
from fleetfit.report.curves import Point, Series, accuracy_curves
from fleetfit.report.page import participants, plots, provenance, render
from fleetfit.report.page.accuracy import make_run_accuracy_section
from fleetfit.report.page.blocks import Page, Plots, Sheet
from fleetfit.report.page.run_page import make_run_page
from fleetfit.report.page.run_set import collect_runs, group_runs
from fleetfit.report.text import format_bytes, format_percent
from fleetfit.runs.comparison import RowRecord
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.schema import EnvironmentRecord, RoundRecord

ASSETS = Path(page.__file__).parent / "assets"
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
CLIENTS = 10


class Reader(HTMLParser):
    """Takes a page apart: elements with their attributes, the text of each kind, the plots."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.cells: list[list[str]] = []
        self._inside: list[str] = []
        self.feed(text)
        self.plots: dict[str, Any] = json.loads(self.scripts[0])

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "rect", "line", "path"):
            self._inside.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "tr":
            self.cells.append([])
        if tag in ("th", "td"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if "script" in self._inside:
            self.scripts[-1] += data
        elif "style" not in self._inside:
            self.text += data
            if "td" in self._inside or "th" in self._inside:
                self.cells[-1][-1] += data

    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def make_settings(seed: int = 0, **sections: Any) -> dict[str, Any]:
    return {
        "name": "paged", "seed": seed, "rounds": 3, "local": {"epochs": 1}, "evaluate": {"every": 2},
        "data": {"name": "digits", "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": CLIENTS}},
        "fleet": {"groups": [{"budget": 0.25}, {"budget": 1.0}]}, "cohort": {"fraction": 0.5}, **sections,
    }  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page") / "run"
    ff.run(make_settings(fleet={
        "groups": [{"budget": 0.25, "profile": "phone"}, {"budget": 1.0, "profile": "phone"}],
        "links": {"lost_up": 0.4},
    }), out=folder)  # fmt: skip
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


COMPARED = """
rounds = 2
local.epochs = 1
data = { name = "digits", partition = { kind = "iid", clients = 6 } }
fleet.groups = [{ budget = 0.25 }, { budget = 1.0 }]
cohort.fraction = 0.5
evaluate.every = 1
[[compare.row]]
label = "Scale <b>&amp;"
method.name = "scalefl"
[[compare.row]]
label = "</script><script>alert(1)</script>"
method.name = "heterofl"
[compare.grid]
seed = [0, 1]
"""


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> ff.Comparison:
    root = tmp_path_factory.mktemp("compared")
    (root / "two.toml").write_text(COMPARED)
    return ff.compare(root / "two.toml", out=root / "out")


# ---- one run ---------------------------------------------------------------------------------------------------------


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(finished: Path) -> None:
    text = (finished / "report.html").read_text(encoding="utf-8")
    reader = Reader(text)
    assert len(text.encode()) < 3_000_000
    assert text.count("plotly.js (basic - minified)") == 1, "one copy of the library"
    assert not [tag for tag, about in reader.elements if {"src", "srcset", "data", "action"} & about.keys()]
    targets = [about["href"] or "" for tag, about in reader.elements if "href" in about]
    assert targets
    assert all(target.startswith(("#", "./", "data:,")) for target in targets)
    assert not [key for _, about in reader.elements for key in about if key.startswith("on")], "no inline handlers"
    (policy,) = [about["content"] or "" for _, about in reader.elements if about.get("http-equiv")]
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    data, *scripts = reader.scripts
    assert allowed == {base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts}
    assert len(scripts) == 2
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "<" not in data, "nothing in the numbers can end their element"


def test_the_numbers_are_those_of_the_run(finished: Path) -> None:
    run, report = ff.load(finished), read(finished / "report.html")
    summary = run.summary
    for number in (
        format_percent(summary["local"]),
        format_percent(summary["global"]),
        format_bytes(summary["bytes_down"]),
    ):
        assert number in report.text
    for level in summary["levels"]:
        row = next(row for row in report.cells if row[0] == level["level"] and str(level["clients"]) in row)
        assert row
    lines = {trace["name"]: trace for trace in report.plots["accuracy"]["data"]}
    evaluated = {m["round"]: m["evaluate"]["static"] for m in run.metrics if "evaluate" in m}
    assert list(evaluated) == [2, 3]
    assert lines["local"]["x"] == [2, 3], "only where it was measured"
    assert lines["local"]["y"] == [round(100 * columns["local"], 4) for columns in evaluated.values()]
    (loss,) = report.plots["loss"]["data"]
    assert loss["y"] == pytest.approx([m["train"]["loss"] for m in run.metrics], rel=1e-5)
    assert report.plots["accuracy-simulated_s"]["data"], "profiles give seconds"
    seconds = sum(m["simulated_s"] for m in run.metrics)
    assert report.plots["accuracy-simulated_s"]["data"][0]["x"][-1] == pytest.approx(seconds, rel=1e-4)


def test_levels_with_names_have_an_accuracy_on_the_test_set(copied: Path) -> None:
    """It is stored by their numbers."""
    rounds = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((copied / "summary.json").read_text())
    for level in summary["levels"]:
        level["level"] = f"S{level['level']}"
    for table in (summary, *(one for one in rounds if "evaluate" in one)):
        columns = table["evaluate"]["static"]
        columns["levels"] = {f"S{number}": level for number, level in columns["levels"].items()}
    (copied / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rounds))
    (copied / "summary.json").write_text(json.dumps(summary))
    report = read(page.write_report(copied))
    for number, accuracy in summary["evaluate"]["static"]["test_levels"].items():
        assert any(row[0] == f"S{number}" and row[-1] == format_percent(accuracy) for row in report.cells)


def test_who_took_part_who_failed_and_why(finished: Path) -> None:
    run, report = ff.load(finished), read(finished / "report.html")
    failures = [one for m in run.metrics for one in m["failures"]]
    assert failures, "the links of this run lose messages"
    bars = {trace["name"]: trace["y"] for trace in report.plots["took-part"]["data"]}
    assert bars["failed"] == [len(m["failures"]) for m in run.metrics]
    for level in ("1", "2"):
        assert bars[f"level {level}"] == [m["train"]["by_level"].get(level, 0) for m in run.metrics]
    row = next(row for row in report.cells if row[0] == failures[0]["reason"])
    assert row[2] == str(sum(one["reason"] == failures[0]["reason"] for one in failures))


def test_failures_of_training_and_of_evaluations_add_up() -> None:
    late = {"client": 1, "reason": "late"}
    reports = [RoundRecord.load({
        "round": 1, "train": {"loss": 1.0, "clients": 2}, "failures": [late] * 10, "bytes_down": 1, "bytes_up": 1,
        "seconds": 1.0, "evaluate": {"split": "test", "failures": [late] * 3},
    })]  # fmt: skip
    run = RunFolder(Path("run")).replace_contents(config={}, rounds=reports, stored_summary=None)
    section = participants.make_participation_section([RowRecord("a", "", [(0, run)])])
    assert section is not None
    (sheet,) = section.blocks
    assert isinstance(sheet, Sheet) and sheet.table.rows[0][-2:] == ("13", "late (13)")


def test_the_pieces_lie_inside_each_other_and_say_what_they_cost(finished: Path) -> None:
    record = RunFolder.open(finished)
    (section,) = [one for one in make_run_page(record, finished / "report.html").sections if one.name == "plan"]
    small, large = section.blocks[0].rectangles  # type: ignore[union-attr]
    assert list(large.smaller) == [(small.width, small.depth)]
    assert (large.width, large.depth) == (1.0, 1.0)
    assert dict(small.facts)["clients"] == "5"
    assert {"parameters", "multiply-adds"} <= dict(small.facts).keys()


def test_the_partition_is_drawn_from_the_counts(finished: Path) -> None:
    counts = json.loads((finished / "fleet.json").read_text())["first"]["class_counts"]
    (dots,) = read(finished / "report.html").plots["partition"]["data"]
    labels = dict(zip(zip(dots["x"], dots["y"], strict=True), dots["text"], strict=True))
    assert labels == {(k, c): n for k, row in enumerate(counts) for c, n in enumerate(row) if n}


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["cat", "dog"], ["cat", "dog"]),
        (["<b>cat</b>", "a & b"], ["&lt;b&gt;cat&lt;/b&gt;", "a &amp; b"]),
        ([], ["0", "1"]),
        (["cat"], ["0", "1"]),
    ],
)
def test_classes_have_their_names(copied: Path, names: list[str], shown: list[str]) -> None:
    fleet = json.loads((copied / "fleet.json").read_text())
    fleet["first"] |= {"class_counts": [[3, 0], [1, 2]], "class_names": names}
    (copied / "fleet.json").write_text(json.dumps(fleet))
    plot = read(page.write_report(copied)).plots["partition"]
    assert plot["layout"]["yaxis"]["ticktext"] == shown and plot["layout"]["yaxis"]["tickvals"] == [0, 1]
    [trace] = plot["data"]
    assert [trace["customdata"][i] for i, c in enumerate(trace["y"]) if c == 1] == [shown[1]]


def test_a_run_keeps_the_names_of_its_classes(tmp_path: Path) -> None:
    table = {"a": np.arange(60.0) % 7, "label": np.array(["rose", "lily", "oak"] * 20)}
    run = ff.run(data={"name": table, "partition": {"clients": 2}}, rounds=1, out=tmp_path / "run")
    assert json.loads((run.folder / "fleet.json").read_text())["first"]["class_names"] == ["lily", "oak", "rose"]


@pytest.mark.parametrize(("clients", "step"), [(1, 1), (3, 1), (12, 1), (13, None)])
def test_counts_of_clients_have_whole_ticks(finished: Path, clients: int, step: int | None) -> None:
    record = RunFolder.open(finished)
    rounds = [
        RoundRecord.load({**one.dump(), "train": {**one.train.dump(), "by_level": {"1": clients}}, "failures": []})
        for one in record.rounds
    ]
    plot = participants.plot_participation(rounds)
    assert plot is not None and plot.layout["yaxis"].get("dtick") == step


def test_a_run_that_is_not_finished_has_a_page_too(copied: Path) -> None:
    (copied / "summary.json").unlink()
    report = read(page.write_report(copied))
    assert "not finished" in report.text
    assert "accuracy" in report.plots


# ---- what is withheld ------------------------------------------------------------------------------------------------


def list_secrets(folder: Path) -> list[str]:
    """Return what a page must not say with [privacy]: losses, bytes, clients' accuracies, reasons."""
    run = ff.load(folder)
    return [
        *(f"{m['train']['loss']:.6g}" for m in run.metrics),
        *(one["reason"] for m in run.metrics for one in m["failures"]),
        format_percent(run.summary["local"]),
        format_percent(run.summary["global"]),
        format_bytes(run.summary["bytes_down"]),
    ]


def test_privacy_withholds_also_what_a_folder_has_by_mistake(copied: Path) -> None:
    """The reports of a private run have none of this. A page goes by [privacy], not by what it happens to find."""
    secrets = list_secrets(copied)
    before = (copied / "report.html").read_text(encoding="utf-8")
    assert all(secret in before for secret in secrets), "without [privacy] the page says it"
    private = {"epsilon": 1.5, "delta": 1e-4, "noise_multiplier": 1.0, "clipping_norm": 0.3, "rate": 0.1}
    reports = [{**json.loads(line), "privacy": private} for line in (copied / "metrics.jsonl").read_text().splitlines()]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reports))
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps({**summary, "privacy": private}))
    text = page.write_report(copied).read_text(encoding="utf-8")
    assert [secret for secret in secrets if secret in text] == []
    assert "epsilon spent" in text
    assert "Withheld" in text
    assert not {"loss", "took-part", "clients", "partition", "levels", "bytes"} & Reader(text).plots.keys()
    both = page.write_report(copied, shutil.copytree(copied, copied.parent / "other"), out=copied.parent / "both.html")
    text = both.read_text(encoding="utf-8")
    assert [secret for secret in secrets if secret in text] == []


def test_the_loss_that_a_secure_run_withholds_is_said_to_be(copied: Path) -> None:
    reports = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    for one in reports:
        one["train"]["loss"], one["secure"] = None, {"hidden": 0, "clipped": 1}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reports))
    report = read(page.write_report(copied))
    assert "[secure]" in report.text
    assert "loss" not in report.plots


# ---- strangers' text and damaged files -------------------------------------------------------------------------------


def test_text_of_users_and_nodes_is_never_markup(copied: Path) -> None:
    reports = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    reports[0]["failures"] = [{"client": 3, "level": 1, "reason": EVIL, "absent": False}]
    reports[0]["train"]["by_level"] = {EVIL: 2}
    reports[-1]["evaluate"]["static"]["per_client"] = {"local": {EVIL: 0.5}, "global": {}}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reports))
    summary = json.loads((copied / "summary.json").read_text())
    summary |= {"name": EVIL, "method": EVIL, "notes": [EVIL]}
    (copied / "summary.json").write_text(json.dumps(summary))
    members = [{"name": EVIL, "budget": EVIL, "examples": {"train": 3}}]
    (copied / "nodes.json").write_text(json.dumps({"members": members}))
    environment = {"processor": EVIL, "command": ["fleetfit", EVIL], "resumed": [{"round": 3, "time": EVIL}]}
    (copied / "environment.json").write_text(json.dumps(environment))
    (copied / "config.toml").write_text((copied / "config.toml").read_text() + f"# {EVIL}\n")
    before, after = read(copied / "report.html"), read(page.write_report(copied))
    assert after.tags() == before.tags()
    assert len(after.scripts) == 3
    assert "alert(1)" in after.text, "it is shown as text"
    names = [trace["name"] for plot in after.plots.values() for trace in plot["data"]]
    assert any("alert" in name for name in names)
    assert not [name for name in names if "<" in name or ">" in name], "plotly.js reads tags in labels"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("metrics.jsonl", '{"round": 1}\n{"round": 2}\n'),
        ("metrics.jsonl", "no JSON\n{}\n"),
        ("summary.json", "[1"),
        ("summary.json", '{"format": 99}'),
        ("fleet.json", '{"first": {"class_counts": [[1], [1, 2]]}}'),
        ("fleet.json", '{"clients": [], "groups": 3, "first": {"group": 1, "level": "x", "class_counts": null}}'),
        ("fleet.json", "[]"),
        ("plan.toml", "format = 2\nlevel = 3\n"),
        ("environment.json", '{"command": 3, "resumed": "x", "processors": {}, "threads": []}'),
        ("nodes.json", '{"members": [1, {"examples": 3}]}'),
    ],
)
def test_a_damaged_file_is_said_and_the_rest_is_shown(copied: Path, name: str, text: str) -> None:
    (copied / name).write_text(text)
    report = read(page.write_report(copied))
    (problem,) = RunFolder.open(copied).find_problems()
    assert "paged" in report.text and problem.startswith(name) and problem in report.text


def test_values_of_odd_forms_are_damage(copied: Path) -> None:
    reports = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    reports[0]["train"]["by_level"] = [1, 2]
    reports[1]["failures"] = [3, None, {"reason": {"a": 1}}]
    reports[1]["evaluate"]["static"]["per_client"] = 7
    reports[2]["evaluate"]["static"]["per_client"] = {"local": {"0": "x", "1": None}, "global": 4}
    reports[2] |= {"undone": 5, "deadline": 3, "links": {"lost_up": "many"}}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reports))
    report = read(page.write_report(copied))
    (problem,) = RunFolder.open(copied).find_problems()
    assert "paged" in report.text and problem.startswith("metrics.jsonl") and problem in report.text


def test_a_missing_file_is_no_damage(copied: Path) -> None:
    for name in ("environment.json", "fleet.json", "plan.toml"):
        (copied / name).unlink()
    report = read(page.write_report(copied))
    assert RunFolder.open(copied).find_problems() == ()
    assert {"accuracy", "loss", "bytes"} <= report.plots.keys()


def test_a_page_that_cannot_be_written_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(page: Any) -> str:
        raise ZeroDivisionError("of a page")

    monkeypatch.setattr(page, "to_html", broken)
    with caplog.at_level(logging.WARNING, "fleetfit"):
        run = ff.run(make_settings(rounds=1), out=tmp_path / "run")
    assert run.finished
    assert not (tmp_path / "run" / "report.html").exists()
    assert "report.html" in caplog.text and "ZeroDivisionError" in caplog.text


# ---- comparisons, and several folders --------------------------------------------------------------------------------


def test_a_comparison_has_one_page_with_its_table_and_all_seeds(compared: ff.Comparison) -> None:
    assert [path.parent for path in compared.folder.rglob("report.html")] == [compared.folder]
    report = read(compared.folder / "report.html")
    for row in compared.table.rows:
        assert list(row) in report.cells
    assert compared.difference_table is not None
    for row in compared.difference_table.rows:
        assert list(row) in report.cells
    for note in compared.table.notes:
        assert note in report.text
    traces = [data for data in report.plots["accuracy-local-0"]["data"] if "alert" in data.get("name", "")]
    runs = compared.runs[compared.table.rows[1][0], ""]
    curves = [[round(100 * m["evaluate"]["static"]["local"], 4) for m in run.metrics] for run in runs]
    seeds = [one for one in traces if ", seed" in one["name"]]
    assert [one["y"] for one in seeds] == curves
    (mean,) = [one for one in traces if one.get("showlegend", True)]
    assert mean["y"] == pytest.approx([sum(pair) / 2 for pair in zip(*curves, strict=True)], abs=1e-3)
    assert plots.SEEDS_CAPTION in report.text
    assert report.tags() <= {*read(next(iter(compared.runs.values()))[0].folder.parents[1] / "report.html").tags()}


def test_text_of_a_comparison_is_never_markup(compared: ff.Comparison) -> None:
    report = read(compared.folder / "report.html")
    assert len(report.scripts) == 3
    assert "b" not in report.tags()
    assert "Scale <b>&amp;" in report.text


def test_a_comparison_that_was_moved_or_cut_off_has_a_page(compared: ff.Comparison, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(compared.folder, tmp_path / "moved"))
    for name in ("table.md", "report.html"):
        (moved / name).unlink()
    results = json.loads((moved / "results.json").read_text())
    (moved / "results.json").write_text(json.dumps({**results, "notes": []}))
    report = read(page.write_report(moved))
    assert "not finished" in report.text
    assert list(compared.table.rows[0])[:3] in [row[:3] for row in report.cells]
    assert "accuracy-local-0" in report.plots


def test_several_folders_go_on_one_page_where_seeds_are_one_row(
    finished: Path, compared: ff.Comparison, tmp_path: Path
) -> None:
    out = ff.write_report(finished, compared.folder, out=tmp_path / "all.html")
    report = read(out)
    assert out == tmp_path / "all.html"
    heads = [row[0] for row in report.cells]
    assert "paged" in heads, "the run's name"
    assert "4 rows, 2 seeds, 7 runs" in report.text
    assert "data, fleet, rounds," in report.text
    assert report.text.count("the clients: ") == 2, "a plot for each set of clients"


def test_runs_that_are_not_finished_are_named_and_not_compared(finished: Path, copied: Path) -> None:
    (copied / "summary.json").unlink()
    runs = collect_runs(group_runs([RunFolder.open(folder) for folder in (finished, copied)]))
    assert "paged (2), seed 0 (3 of 3 rounds)" in runs.results.notes[-1]
    assert not runs.differences


def test_a_private_run_hides_its_own_numbers_and_no_others(finished: Path, copied: Path, tmp_path: Path) -> None:
    private = {"epsilon": 1.5, "delta": 1e-4, "noise_multiplier": 1.0, "clipping_norm": 0.3, "rate": 0.1}
    summary = json.loads((copied / "summary.json").read_text())
    (copied / "summary.json").write_text(json.dumps({**summary, "privacy": private}))
    config = (copied / "config.toml").read_text().replace('name = "paged"', 'name = "hidden"')
    (copied / "config.toml").write_text(config)
    report = read(ff.write_report(finished, copied, out=tmp_path / "all.html"))
    local = format_percent(summary["local"])
    assert any(local in row for row in report.cells), "the other run's"
    hidden = [row for row in report.cells if "withheld" in row]
    assert hidden and not any(local in row for row in hidden)


def test_folders_that_are_none_are_refused_in_a_sentence(tmp_path: Path) -> None:
    with raises(RunError, key="folders"):
        ff.write_report()
    with raises(RunError, "config.toml"):
        ff.write_report(tmp_path)
    (tmp_path / "results.json").write_text("{}")
    with raises(RunError, path="results.json"):
        ff.write_report(tmp_path)


def test_a_place_that_cannot_be_written_is_said(finished: Path, tmp_path: Path) -> None:
    with raises(RunError, path="a.html"):
        ff.write_report(finished, out=tmp_path / "none" / "a.html")


def test_the_verb_says_where_the_page_is(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "report.html").unlink()
    assert run_command(["report", str(copied)]) == 0
    assert capsys.readouterr().out.strip() == f"Page: {copied / 'report.html'}"
    assert (copied / "report.html").is_file()
    assert run_command(["report", str(copied / "none")]) != 0


# ---- size, and the library -------------------------------------------------------------------------------------------


def test_large_runs_have_small_pages(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 rounds, all evaluated, 2,000 clients, and a new reason for every failure."""
    record = RunFolder.open(copied)
    last = record.rounds[-1].dump()
    many = {str(k): k / 2000 for k in range(2000)}
    columns = {**last["evaluate"]["static"], "per_client": {"local": many, "global": many}}
    metrics = [
        {**last, "round": i, "evaluate": {"split": "test", "static": columns},
         "failures": [{"client": i, "level": 1, "reason": f"reason {i} {'x' * 400}", "absent": False}]}
        for i in range(1, 5001)
    ]  # fmt: skip
    large = record.replace_contents(rounds=list(map(RoundRecord.load, metrics)))
    text = render.to_html(make_run_page(large, copied / "report.html"))
    assert len(text.encode()) < 3_000_000
    drawn = Reader(text).plots
    assert drawn["accuracy"]["data"][0]["x"][-1] == 5000
    rows = [RowRecord(f"row {i}", "", [(seed, large) for seed in range(5)]) for i in range(10)]
    lines = [plots.Line(series, i) for i, series in enumerate(accuracy_curves(rows, "local"))]
    plot = plots.plot_lines("a", "A", lines, plots.ROUNDS, plots.make_score_axis("accuracy"), plots=8)
    assert plot is not None
    assert len(render.dump_for_script(plot.traces)) < 300_000


def test_tables_say_how_many_rows_they_leave_out(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunFolder.open(copied)
    for module in (participants, provenance):
        monkeypatch.setattr(module, "_MAX_RUNS", 2)
    for name in ("REASONS", "GROUPS", "PARTITIONS"):
        monkeypatch.setattr(participants, f"_MAX_{name}", 1)
    monkeypatch.setattr(provenance, "_MAX_MACHINES", 1)
    undone = {"reason": "a", "clients": 1}
    undo = RoundRecord.load({**run.rounds[0].dump(), "undone": undone})
    runs = [
        run.replace_contents(environment=run.environment.model_copy(update={"processor": f"p{i}"})) for i in range(4)
    ]
    rows = [RowRecord(f"row {i}", "", [(0, one)]) for i, one in enumerate(runs)]
    sections = [
        (participants.make_run_participation_section(run.replace_contents(rounds=[undo] * 4)), 3),
        (participants.make_participation_section(rows), 2),
        (provenance.make_runs_provenance_section(rows), 2),
        (provenance.make_runs_provenance_section(rows), 3),
    ]
    for section, more in sections:
        assert section is not None
        assert f"{more} more" in render.to_html(Page("a", "", [section]))


def test_the_package_lists_its_modules_each_on_a_line() -> None:
    listed = re.findall(r"^    ([a-z_]+(?:, [a-z_]+)*)  ", page.__doc__ or "", re.MULTILINE)
    modules = {path.stem for path in Path(page.__file__).parent.glob("*.py")} - {"__init__"}
    assert {name for line in listed for name in line.split(", ")} == modules


def test_the_library_is_the_one_that_its_authors_built() -> None:
    """Of npm's plotly.js-basic-dist-min 4.1.1; a copy that was changed, or another version, gets its checksum here."""
    content = (ASSETS / render.PLOTLY).read_bytes()
    assert hashlib.sha256(content).hexdigest() == "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
    assert b"</script" not in content.lower()
    assert "MIT" in (ASSETS / "plotly-LICENSE.txt").read_text()


def test_a_line_of_many_points_keeps_its_ends() -> None:
    line = [(float(i), float(i)) for i in range(1000)]
    points = plots.thin(line, 50)
    assert len(points) == 50
    assert (points[0], points[-1]) == (line[0], line[-1])


def test_only_plots_of_accuracy_share_a_vertical_axis() -> None:
    low = plots.Line(Series("a", {0: [Point(1, 1.0, 20.0), Point(2, 2.0, 30.0)]}), 0)
    high = plots.Line(Series("b", {0: [Point(1, 1.0, 80.0)]}), 1)
    hidden = plots.Line(Series("c", {0: [Point(1, 1.0, 1.0)]}), 2, hidden=True)
    charts = [
        plots.plot_lines("first", "", [low, hidden], plots.ROUNDS, plots.make_score_axis("accuracy")),
        None,
        plots.plot_lines("second", "", [high], plots.ROUNDS, plots.make_score_axis("accuracy")),
        plots.plot_lines("loss", "", [low], plots.ROUNDS, plots.PlotAxis("training loss")),
    ]
    first, second, loss = plots.share_accuracy_axis(charts)
    assert first.layout["yaxis"]["range"] == second.layout["yaxis"]["range"] == [16.4, 83.6]
    assert "range" not in loss.layout["yaxis"]


def test_clients_are_sorted_and_the_worst_tenth_is_shaded(copied: Path) -> None:
    reports = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    many = {str(k): (k % 1000) / 1000 for k in range(5000)}
    reports[-1]["evaluate"]["static"]["per_client"] = {"local": many, "global": many}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reports))
    plot = read(page.write_report(copied)).plots["clients"]
    for line in plot["data"]:
        assert (line["x"][0], line["x"][-1]) == (1, 5000)
        assert line["y"] == sorted(line["y"], reverse=True)
    (strip,) = plot["layout"]["shapes"]
    assert (strip["x0"], strip["x1"]) == (4500.5, 5000.5)
    reports[-1]["evaluate"]["static"]["per_client"]["global"] = {"0": 0.5}
    (copied / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in reports))
    assert "shapes" not in read(page.write_report(copied)).plots["clients"]["layout"]


def test_a_damaged_last_line_is_reported(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A line that is not ended may still be being written."""
    whole = (copied / "metrics.jsonl").read_text()
    (copied / "metrics.jsonl").write_text(whole + '{"broken')
    assert "is damaged" not in page.write_report(copied).read_text()
    (copied / "metrics.jsonl").write_text(whole + '{"broken\n')
    warning = f"metrics.jsonl: line {len(whole.splitlines()) + 1}, the last one, is damaged"
    assert warning in page.write_report(copied).read_text()
    assert warning in caplog.text


def test_a_command_that_began_with_python_is_shown_as_typed() -> None:
    typed = ["/somewhere/fleetfit/__main__.py", "run", "c 2.toml"]
    assert shlex.split(provenance.format_command(typed)) == ["python", "-m", "fleetfit", "run", "c 2.toml"]
    assert provenance.format_command(["/bin/fleetfit", "run"]) == "fleetfit run"


def test_a_resumed_run_is_said_to_be() -> None:
    environment = EnvironmentRecord.load({"resumed": [{"round": 2, "time": "2026-11-26T09:15:02+00:00"}]})
    assert provenance.describe_machine(environment)["resumed"] == "after round 2 (2026-11-26 09:15:02 UTC)"


def test_the_caption_mentions_markers_where_lines_have_them(finished: Path) -> None:
    run = RunFolder.open(finished)
    for count in (plots.MAX_MARKERS, plots.MAX_MARKERS + 1):
        rounds = [RoundRecord.load({**run.rounds[-1].dump(), "round": i}) for i in range(1, count + 1)]
        section = make_run_accuracy_section(run.replace_contents(rounds=rounds))
        assert section is not None and isinstance(section.blocks[0], Plots)
        plot = section.blocks[0].plots[0]
        assert ("have a marker" in plot.caption) == ("markers" in plot.traces[0]["mode"]) == (count == 40)

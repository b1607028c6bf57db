"""`fleetfit runs` and `ff.list_runs`: what folders hold, and which checkpoints go, which stay, and why."""

import functools
import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
from support import raises, run_verb

import fleetfit as ff
from fleetfit.cli import runs as verbs
from fleetfit.runs.folder import RunFolder
from fleetfit.runs.listing import RunInfo, clear_checkpoints

TINY = Path(__file__).parents[1] / "tiny.py"
SECTIONS: dict[str, Any] = {
    "rounds": 3,
    "data": {"name": f"{TINY}:tiny_data", "partition": {"kind": "iid", "clients": 4}},
    "model": {"name": f"{TINY}:tiny"},
    "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]},
    "method": {"name": "scalefl"},
    "local": {"epochs": 1, "lr": 0.05},
    "cohort": {"count": 2},
    "checkpoint": {"every": 1, "keep": 3},
    "evaluate": {"every": 2},
}
COMPARISON = f"""
rounds = 1
data = {{ name = "{TINY}:tiny_data", partition = {{ kind = "iid", clients = 4 }} }}
model.name = "{TINY}:tiny"
fleet = {{ groups = [{{ budget = 0.4 }}, {{ budget = 1.0 }}], tolerance = 0.5 }}
local.epochs = 1
cohort.count = 1
[[compare.row]]
method.name = "scalefl"
[[compare.row]]
method.name = "fedavg"
"""


class Stop(Exception):
    pass


def cut_off(report: Any) -> None:
    if report["round"] == 2:
        raise Stop


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, one that was cut off after two rounds, and a comparison."""
    place = tmp_path_factory.mktemp("stored")
    ff.run(out=place / "runs" / "whole", **SECTIONS)
    with pytest.raises(Stop):
        ff.run(out=place / "runs" / "group" / "half", on_round=cut_off, **SECTIONS)
    (place / "two.toml").write_text(COMPARISON)
    ff.compare(place / "two.toml", out=place / "runs" / "compared")
    return place / "runs"


@pytest.fixture
def own(stored: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored, tmp_path / "runs"))


fleetfit = functools.partial(run_verb, "runs")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def list_runs_by_name(folder: Path) -> dict[str, RunInfo]:
    return {str(one.folder.relative_to(folder)): one for one in ff.list_runs(folder)}


SUMMARY = """{"method": "scalefl", "model": "tiny", "data": "tiny", "norm": "static", "rounds": 3, "local": 0.5,
"global": null}"""
NAMES = [f"round-00000{n}.safetensors" for n in (1, 2, 3)]

# ---- what folders hold -----------------------------------------------------------------------------------------------


def test_runs_are_found_and_told(stored: Path) -> None:
    runs = list_runs_by_name(stored)
    assert list(runs) == ["compared", "group/half", "whole"]
    whole, run = runs["whole"], ff.load(stored / "whole")
    assert (whole.kind, whole.method, whole.model, whole.data) == ("run", "scalefl", "tiny", "tiny")
    assert (whole.rounds, whole.asked, whole.finished, whole.damage) == (3, 3, True, "")
    assert (whole.local, whole.global_) == (run.accuracy("local"), run.accuracy("global"))
    assert whole.begun == json.loads((stored / "whole/environment.json").read_text())["time"]
    every = [path.stat().st_size for path in (stored / "whole").rglob("*") if path.is_file()]
    held = [path.stat().st_size for path in (stored / "whole/checkpoints").iterdir()]
    assert (whole.size_bytes, whole.checkpoints_bytes, whole.checkpoints) == (sum(every), sum(held), 3)
    half = runs["group/half"]
    assert (half.rounds, half.asked, half.finished) == (2, 3, False)
    assert half.local == ff.load(stored / "group/half").accuracy("local"), "of the last evaluation, after round 2"
    both = runs["compared"]
    assert (both.kind, both.rounds, both.asked, both.finished, both.checkpoints) == ("comparison", 2, 2, True, 2)
    assert [child.method for child in both.children] == ["fedavg", "scalefl"]


def test_a_run_or_a_comparison_may_be_named(stored: Path) -> None:
    assert [one.folder for one in ff.list_runs(stored / "whole")] == [stored / "whole"]
    assert [one.folder.name for one in ff.list_runs(stored / "compared")] == ["seed-0", "seed-0"]
    with raises(ff.RunError, path=stored / "nothing"):
        ff.list_runs(stored / "nothing")


def test_a_summary_is_read_as_far_as_it_is_shown(own: Path) -> None:
    (own / "whole/summary.json").write_text(SUMMARY)
    one = list_runs_by_name(own)["whole"]
    assert (one.method, one.rounds, one.local, one.global_, one.damage) == ("scalefl", 3, 0.5, None, "")
    (own / "whole/environment.json").write_text('{"time": 7}')
    assert list_runs_by_name(own)["whole"].begun == ""


@pytest.mark.parametrize(("norms", "expected"), [(["batch", "static"], 0.25), (["static", "batch"], None), (7, 1)])
def test_accuracies_are_of_the_main_policy(own: Path, norms: Any, expected: float | None) -> None:
    """The last evaluation with it, which need not be the last one; "static" if the settings are damaged."""
    config = own / "group/half/config.toml"
    table = tomllib.loads(config.read_text())
    table["evaluate"]["batch_norm"] = norms
    config.write_text(tomli_w.dumps(table))
    train = {"loss": None, "clients": 1}
    static, batch = ({"local": local, "global": 0.5, "levels": {}} for local in (None, 0.25))
    lines = [{"round": 1, "evaluate": {"static": {**static, "local": 1}, "batch": batch}}, {"round": 2}]
    if expected is None:
        lines[1]["evaluate"] = {"static": static}
    (own / "group/half/metrics.jsonl").write_text("".join(json.dumps({"train": train, **one}) + "\n" for one in lines))
    one = list_runs_by_name(own)["group/half"]
    assert (one.local, one.global_, one.rounds, one.damage) == (expected, 0.5, 2, "")


def test_a_comparison_that_is_not_finished_says_no_count(own: Path) -> None:
    results = json.loads((own / "compared/results.json").read_text())
    (own / "compared/results.json").write_text(json.dumps({**results, "notes": []}))
    (own / "compared/fedavg/seed-0/summary.json").unlink()
    one = list_runs_by_name(own)["compared"]
    assert (one.rounds, one.asked, one.finished) == (1, 0, False), "nobody can tell how many there are to be"


def test_a_fleets_run_is_one(own: Path) -> None:
    (own / "whole/nodes.json").write_text("{}")
    assert list_runs_by_name(own)["whole"].kind == "fleet"


def test_links_are_not_followed(own: Path, tmp_path: Path) -> None:
    shutil.move(own / "whole", tmp_path / "elsewhere")
    (own / "whole").symlink_to(tmp_path / "elsewhere")
    assert "whole" not in list_runs_by_name(own)
    (own / "round").symlink_to(own)
    assert list(list_runs_by_name(own)) == ["compared", "group/half"]
    (linked,) = ff.list_runs(own / "whole")
    assert linked.finished, "one that somebody names is theirs to follow"


def test_other_folders_are_no_runs(own: Path) -> None:
    (own / "site").mkdir()
    (own / "site" / "config.toml").write_text("title = 'mine'")
    (own / ".hidden").mkdir()
    (own / ".hidden" / "plan.toml").write_text("")
    (own / "notes.txt").write_text("mine")
    assert list(list_runs_by_name(own)) == ["compared", "group/half", "whole"]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("config.toml", None, ""),
        ("config.toml", "rounds = = 3", ""),
        ("config.toml", "[method]", "rounds"),
        ("config.toml", "\udcff", ""),
        ("metrics.jsonl", '{"round": 7}\n', "line 1"),
        ("metrics.jsonl", "[]\n[" + "[" * 100_000 + "\n", "line 1"),
        ("metrics.jsonl", '{"round": 1, "evaluate": {}}\n', "line 1"),
        ("metrics.jsonl", '{"round": 1, "evaluate": 7}\n', "line 1"),
        ("metrics.jsonl", '{"round": 1, "train": {}, "evaluate": 7}\n', "evaluate"),
        ("metrics.jsonl", '{"round": 1, "train": {}, "evaluate": {"static": 7}}\n', "line 1"),
        ("metrics.jsonl", '{"round": 1, "train": {}, "evaluate": {"batch": {"local": "1", "global": 0}}}\n', "local"),
        ("metrics.jsonl", '{"round": 1, "train": {}, "evaluate": {"batch": {"local": 1, "global": NaN}}}\n', "global"),
        ("metrics.jsonl", f'{{"round": 1, "evaluate": {{"static": {{"local": 1{"0" * 400}}}}}}}\n', "line 1"),
        ("summary.json", "{", ""),
        ("summary.json", f'{{"method": "", "model": "", "data": "", "rounds": 3, "local": 1{"0" * 400}}}', "norm"),
        ("summary.json", "[]", ""),
        ("summary.json", SUMMARY.replace("scalefl", "\\ud800"), "method"),
        ("summary.json", SUMMARY.replace("}", ', "format": 2}'), "format"),
        ("summary.json", SUMMARY.replace("0.5", "true"), "local"),
        ("summary.json", SUMMARY.replace("3", "-3"), "rounds"),
    ],
)
def test_what_is_damaged_is_listed_as_such(own: Path, name: str, content: str | None, part: str) -> None:
    path = own / "whole" / name
    path.unlink()
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    damage = list_runs_by_name(own)["whole"].damage
    assert damage.startswith(name) and part in damage
    code, out, err = fleetfit(own)
    assert (code, err) == (0, "")
    assert f"Damaged: whole: {damage}." in out and ", damaged" in out and "group/half" in out


def test_files_that_are_none_are_damage(own: Path) -> None:
    (own / "whole/metrics.jsonl").unlink()
    os.mkfifo(own / "whole/metrics.jsonl")
    (own / "whole/config.toml").unlink()
    (own / "whole/config.toml").mkdir()
    one = list_runs_by_name(own)["whole"]
    assert "config.toml" in one.damage and one.rounds == 3, "as the summary has it"


@pytest.mark.parametrize("kind", ["table", "images", "arrays"])
def test_data_at_a_path_have_one_name_before_and_after_the_end(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    place = tmp_path / {"table": "rows.csv", "images": "pics", "arrays": "both.npz"}[kind]
    x = rng.normal(size=(80, 3)).astype(np.float32)
    if kind == "table":
        lines = [f"{a:.3f},{b:.3f},{c:.3f},{'no' if a > 0 else 'yes'}" for a, b, c in x]
        place.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    elif kind == "arrays":
        np.savez(place, x=x, y=(x[:, 0] > 0).astype(np.int64))
    else:
        image = pytest.importorskip("PIL.Image")
        for i in range(40):
            (place / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
            image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(place / "ab"[i % 2] / f"{i}.png")
    settings = {"rounds": 3, "data": {"path": str(place), "partition": {"clients": 2}}, "local": {"epochs": 1}}
    with pytest.raises(Stop):
        ff.run(settings, out=tmp_path / "runs/one", on_round=cut_off)
    (before,) = ff.list_runs(tmp_path / "runs")
    ff.resume(tmp_path / "runs/one")
    (after,) = ff.list_runs(tmp_path / "runs")
    assert not before.finished and after.finished
    assert before.data == after.data == place.stem


def test_a_comparison_has_the_names_of_its_runs(stored: Path) -> None:
    one = list_runs_by_name(stored)["compared"]
    assert (one.method, one.model, one.data) == ("fedavg, scalefl", "tiny", "tiny")
    child = one.children[0]
    assert verbs._format_methods(
        replace(one, method="fedavg", children=(child, replace(child, folder=one.folder / "b/seed-0")))
    ).split() == ["2", "rows", "of", "fedavg"], "rows of one method"
    third = replace(child, folder=one.folder / "c/seed-0")
    assert verbs._format_methods(replace(one, children=(*one.children, third))) == "3 rows of 2 methods"
    long = [replace(child, folder=one.folder / f"{i}/seed-0", method=f"a_long_method_{i}") for i in range(3)]
    named = ", ".join(each.method for each in long)
    assert verbs._format_methods(replace(one, method=named, children=tuple(long))) == "3 methods"


def test_tuning_runs_with_settings_are_found(own: Path) -> None:
    """They are five folders below their comparison, which has no results before the first of its table's runs."""
    tuning = own / "compared/tune/fedavg/few/lr-0.1/seed-7"
    shutil.copytree(own / "whole", tuning)
    assert tuning in [child.folder for child in list_runs_by_name(own)["compared"].children]
    (own / "compared/results.json").unlink()
    assert str(tuning.relative_to(own)) in list_runs_by_name(own)


# ---- the verb --------------------------------------------------------------------------------------------------------


def test_a_line_for_each(stored: Path) -> None:
    code, out, err = fleetfit(stored)
    assert (code, err) == (0, "")
    lines = [line.split("│") for line in out.splitlines() if line.startswith("│")]
    assert [line[1].strip() for line in lines] == ["compared", "group/half", "whole"]
    assert [line[2].strip() for line in lines] == [
        f"{what}, tiny on {data}"
        for what, data in (("comparison: fedavg, scalefl", "tiny"), ("scalefl", "tiny_data"), ("scalefl", "tiny"))
    ], "a run that is not finished knows what the file called its data"  # fmt: skip
    assert [line[3].strip() for line in lines] == ["2/2 runs, finished", "2/3, unfinished", "3/3, finished"]
    assert "in checkpoints" in out
    (stored.parent / "empty").mkdir(exist_ok=True)
    code, out, _ = fleetfit(stored.parent / "empty")
    assert code == 0 and "│" not in out and "empty" in out


def test_json_has_the_same(stored: Path) -> None:
    document = json.loads(fleetfit(stored, "--json")[1])
    assert document == [one.to_dict() for one in ff.list_runs(stored)]
    assert document[2]["global"] == ff.load(stored / "whole").accuracy("global")
    assert [child["method"] for child in document[0]["children"]] == ["fedavg", "scalefl"]


def test_it_imports_nothing_that_takes_long(stored: Path) -> None:
    code = "import sys; from fleetfit.cli import main\ntry: main(['runs', sys.argv[1]])\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'numpy', 'pydantic', 'pydantic_core') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code, stored], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--last"], "--last: only with --clear-checkpoints."),
        (["--unfinished", "--yes"], "--unfinished, --yes: only with --clear-checkpoints."),
        (["--clear-checkpoints", "--json"], "Add --yes."),
        (["--clear-checkpoints"], "Add --yes to remove these checkpoints."),
    ],
)
def test_a_mistake_is_a_sentence_and_removes_nothing(
    own: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    err = fleetfit(own, *arguments, code=2).err
    assert message in err and err.count("\n") == 1
    assert checkpoints(own / "whole") == NAMES


# ---- clearing --------------------------------------------------------------------------------------------------------


def test_the_newest_stays_and_unfinished_runs_are_left_alone(own: Path) -> None:
    before = ff.load(own / "whole").evaluate()
    room = sum((own / "whole/checkpoints" / name).stat().st_size for name in NAMES[:2])
    code, out, err = fleetfit(own, "--clear-checkpoints", "--yes")
    assert (code, err) == (0, "")
    assert "Removed: 2 checkpoints of 1 run, " in out
    assert checkpoints(own / "whole") == NAMES[2:]
    assert checkpoints(own / "group/half") == NAMES[:2]
    assert len(checkpoints(own / "compared/fedavg/seed-0")) == 1
    assert ff.load(own / "whole").evaluate() == before, "what eval, predict and export need is there"
    assert room and "Removed: " not in fleetfit(own, "--clear-checkpoints", "--yes")[1]


def test_a_run_goes_on_to_the_same_end_from_what_is_left(own: Path, stored: Path) -> None:
    clear_checkpoints(own, unfinished=True)
    assert checkpoints(own / "group/half") == NAMES[1:2]
    done = ff.resume(own / "group/half")
    assert done.summary["global"] == ff.load(stored / "whole").summary["global"]


def test_the_last_checkpoint_goes_only_on_request(own: Path) -> None:
    _, out, _ = fleetfit(own, "--clear-checkpoints", "--last", "--yes")
    assert "model" in out and "resume" not in out
    assert checkpoints(own / "whole") == [] == checkpoints(own / "compared/fedavg/seed-0")
    assert checkpoints(own / "group/half") == NAMES[:2]
    run = ff.load(own / "whole")
    assert run.summary["rounds"] == 3
    with raises(ff.RunError, own / "whole"):
        run.model()
    _, out, _ = fleetfit(own, "--clear-checkpoints", "--last", "--unfinished", "--yes")
    assert "resume" in out
    assert checkpoints(own / "group/half") == []


@pytest.mark.parametrize("answer", [True, False])
def test_it_asks(own: Path, monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    questions: list[str] = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(verbs.typer, "confirm", lambda text: (questions.append(text), answer)[1])
    code, out, _ = fleetfit(own, "--clear-checkpoints")
    assert code == 0 and questions[0].startswith("Remove 2 checkpoints of 1 run, ")
    assert checkpoints(own / "whole") == (NAMES[2:] if answer else NAMES)
    assert ("Removed: " in out) == answer


def test_the_newest_that_can_be_read_stays(own: Path) -> None:
    newest = own / "whole/checkpoints" / NAMES[2]
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    clear_checkpoints(own)
    assert checkpoints(own / "whole") == NAMES[1:], "the damaged one too, which nobody asked to remove"


def test_where_none_can_be_read_nothing_goes(own: Path) -> None:
    for name in NAMES:
        (own / "whole/checkpoints" / name).write_bytes(b"x")
    (cleared,) = clear_checkpoints(own)
    assert cleared.files == () and "checkpoints" in cleared.kept
    assert checkpoints(own / "whole") == NAMES


def test_a_damaged_run_keeps_its_own(own: Path) -> None:
    (own / "whole/config.toml").write_text("=")
    (cleared,) = clear_checkpoints(own)
    assert cleared.files == () and "config.toml" in cleared.kept
    assert checkpoints(own / "whole") == NAMES


def test_damage_that_no_line_shows_keeps_them(own: Path) -> None:
    lines = [json.loads(line) for line in (own / "whole/metrics.jsonl").read_text().splitlines()]
    lines[1]["failures"] = 7
    (own / "whole/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list_runs_by_name(own)["whole"].damage == ""
    (cleared,) = clear_checkpoints(own)
    assert cleared.files == () and "line 2" in cleared.kept
    assert checkpoints(own / "whole") == NAMES


def test_nothing_behind_a_link_goes(own: Path, tmp_path: Path) -> None:
    """Neither where the folder of checkpoints is one, nor where a checkpoint is; nor other files beside them."""
    shutil.move(own / "whole/checkpoints", tmp_path / "mine")
    (own / "whole/checkpoints").symlink_to(tmp_path / "mine")
    assert clear_checkpoints(own, last=True) and sorted(p.name for p in (tmp_path / "mine").iterdir()) == NAMES
    (own / "whole/checkpoints").unlink()
    (own / "whole/checkpoints").mkdir()
    (own / "whole/checkpoints" / NAMES[0]).symlink_to(tmp_path / "mine" / NAMES[0])
    (own / "whole/checkpoints/best.safetensors").write_bytes(b"mine")
    clear_checkpoints(own / "whole", last=True)
    assert sorted(p.name for p in (tmp_path / "mine").iterdir()) == NAMES
    assert checkpoints(own / "whole") == ["best.safetensors", NAMES[0]]


def test_a_run_that_is_being_written_keeps_its_own(own: Path) -> None:
    with RunFolder(own / "whole").hold():
        _, out, _ = fleetfit(own, "--clear-checkpoints", "--yes")
    assert "Kept: " in out and str(own / "whole") in out and "Removed: 0 checkpoints of 0 runs, 0 B." in out
    assert checkpoints(own / "whole") == NAMES


def test_a_comparison_knows_its_finished_runs_without_them(own: Path, stored: Path) -> None:
    clear_checkpoints(own, last=True)
    again = ff.compare(stored.parent / "two.toml", out=own / "compared")
    assert again.table.rows == ff.compare(stored.parent / "two.toml", out=stored / "compared").table.rows
    assert checkpoints(own / "compared/fedavg/seed-0") == [], "and nothing was trained again"

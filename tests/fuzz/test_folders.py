"""Damaged run folders: every verb that reads one is done with the right answer, or says a sentence.

Each example is a copy of a real folder with some damage, and a verb, called through the command's own door. It must end
with exit code 0 or 2, without a traceback, with nothing written outside the folder; an answer that uses the trained
model must be that of the folder as it was, unless its settings were changed or a line says that an older state is used.
`tests/corpus/folders` has what once failed.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tomli_w
from folder_damage import Step, damage
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from run_folders import settings as tables, stopped_run

import fleetfit as ff
from fleetfit.api import profiling
from fleetfit.cli import main
from fleetfit.cost import Latency
from fleetfit.training.profiling import Measurement

CORPUS = Path(__file__).parents[1] / "corpus" / "folders"
CHECKPOINTS = ["checkpoints/round-000002.safetensors", "checkpoints/round-000003.safetensors"]
TEXTS = ["metrics.jsonl", "summary.json", "environment.json", "fleet.json", "plan.toml", "inference/level-3.json"]
SETTINGS = ["config.toml"]
FOLDERS = ["checkpoints", "inference", "plots"]
OTHERS = [".lock", ".metrics.jsonl.part", "base.safetensors", "nodes.json"]
KINDS = ["finished", "stopped", "frozen"]
VERBS = {
    "eval": ["eval", "FOLDER", "--json"],
    "predict": ["predict", "FOLDER", "--out", "OUT"],
    "predict --stop": ["predict", "FOLDER", "--stop", "--out", "OUT"],
    "calibrate": ["calibrate", "FOLDER", "--json"],
    "resume": ["resume", "FOLDER", "-q"],
    "plan": ["plan", "FOLDER/config.toml"],
    "pictures": ["pictures", "FOLDER"],
    "compare": ["compare", "ROWS", "--out", "ABOVE", "-q"],
    "export": ["export", "FOLDER", "--no-onnx", "--out", "OUT"],
    "profile": ["profile", "FOLDER/config.toml", "--step-s", "100", "--memory", "4 GB", "--out", "OUT"],
    "start": ["run", "FILE", "--set", "init_from=FOLDER", "--set", "rounds=1", "--out", "OUT", "-q"],
}
OPENS = ("eval", "predict", "predict --stop", "calibrate", "resume", "export")
MAX_S = 120  # for one command, in case it never ends


# ---- the folders ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What a command said, and what it left."""

    code: int
    out: str
    err: str
    files: dict[str, bytes]
    written: dict[str, bytes]


@pytest.fixture(autouse=True)
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "profile_level", measured_as_said)


def measured_as_said(*_: object) -> Measurement:
    """Find the same for every level, without a process for each."""
    return Measurement(Latency(0.1, 0.01, 9), Latency(0.01, 0.001, 9), 10**6, 3 * 10**8)


@dataclass(frozen=True)
class Folders:
    """Folders to be damaged, and what each verb answers of them."""

    root: Path

    def of(self, kind: str) -> Path:
        return self.root / kind / "compared" / "of-a-row" / "seed-3"

    def answer(self, kind: str, verb: str) -> Answer:
        """Return the answer of the undamaged folder, which is asked once."""
        answers = _ANSWERS.setdefault(self.root, {})
        if (kind, verb) not in answers:
            answers[kind, verb] = ask(self, kind, verb, [], self.root / f"as-it-was-{len(answers)}")
        return answers[kind, verb]


_ANSWERS: dict[Path, dict[tuple[str, str], Answer]] = {}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    originals = made_folders(tmp_path_factory.mktemp("folders"))
    before = {kind: content(originals.of(kind)) for kind in KINDS}
    yield originals
    assert {kind: content(originals.of(kind)) for kind in KINDS} == before, "the originals were touched"
    _ANSWERS.pop(originals.root, None)


def made_folders(root: Path) -> Folders:
    """Make the folders that are damaged."""
    originals = Folders(root)
    for kind in KINDS:
        name = {"finished": "scalefl, directions", "stopped": "feddyn, lost by compression, losses"}.get(kind, "lora")
        (originals.root / kind).mkdir()
        table = _longer(tables(name)) if kind == "stopped" else tables(name)
        (originals.root / kind / "rows.toml").write_text(_file(table))
        (originals.root / kind / "run.toml").write_text(tomli_w.dumps(table))
        if kind == "stopped":
            stopped_run({**table, "name": "of a row"}, originals.of(kind), after=3)
        else:
            ff.run({**table, "name": "of a row"}, out=originals.of(kind))
        if kind == "finished":
            ff.load(originals.of(kind)).calibrate(3)
    return originals


def _longer(table: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a run that has a round left when it is stopped."""
    return {**table, "rounds": 4}


def _file(table: dict[str, Any]) -> str:
    row = {"label": "of a row", **{key: table[key] for key in ("method",)}}
    return tomli_w.dumps({**{k: v for k, v in table.items() if k not in row}, "compare": {"row": [row]}})


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder, links as what they say."""
    contents = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            contents[name] = os.fsencode(path.readlink())
        elif path.is_file():
            contents[name] = path.read_bytes()
    return contents


# ---- asking --------------------------------------------------------------------------------------------------------


class TooLong(BaseException):
    """A command did not end."""


def ask(folders: Folders, kind: str, verb: str, steps: list[Step], place: Path) -> Answer:
    """Damage a copy of a folder, call a verb on it, and look at everything but the answer itself."""
    copy = place / "copy"
    shutil.copytree(folders.root / kind, copy)
    folder = copy / folders.of(kind).relative_to(folders.root / kind)
    outside, elsewhere = place / "outside", place / "elsewhere"
    outside.mkdir()
    elsewhere.mkdir()
    damage(folder, elsewhere, steps)
    before = content(elsewhere)
    words = {
        "FOLDER": folder,
        "OUT": place / "out",
        "FILE": copy / "run.toml",
        "ROWS": copy / "rows.toml",
        "ABOVE": copy / "compared",
    }
    arguments = [str(_filled(word, words)) for word in VERBS[verb]]
    code, out, err = called(arguments, outside)
    assert code in (0, 2), (code, err)
    assert "Traceback" not in err and "internal error" not in err, err
    lines = [line for line in err.splitlines() if line.strip() and not line.startswith("    fleetfit ")]
    assert code == 0 or lines[-1].startswith("fleetfit: "), err
    assert content(elsewhere) == before, "written through a link"
    assert [p.name for p in folder.parent.iterdir() if not p.name.startswith(".")] == ["seed-3"], "it was not the run"
    assert not content(outside), "written into the working folder"
    left = [path for path in place.rglob("*.part") if not path.is_symlink()] if code == 0 and not steps else []
    assert not left
    return Answer(code, out, err, content(folder), content(place / "out"))


def _filled(word: str, words: dict[str, Path]) -> str:
    for name, path in words.items():
        word = word.replace(name, str(path))
    return word


def called(arguments: list[str], outside: Path) -> tuple[int, str, str]:
    """Call the command in this process; return its exit code and what it printed, log lines on stderr as always."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLong(arguments)

    out, err = io.StringIO(), io.StringIO()
    log = logging.StreamHandler(err)
    log.setFormatter(logging.Formatter("%(message)s"))
    handler = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MAX_S)
    logging.getLogger("fleetfit").addHandler(log)
    try:
        with contextlib.chdir(outside), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main(arguments)
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        logging.getLogger("fleetfit").removeHandler(log)
    return code, out.getvalue(), err.getvalue()


def check(folders: Folders, kind: str, verb: str, steps: list[Step], place: Path) -> Answer:
    """Ask a damaged folder, and compare its answer with that of the folder as it was."""
    answer = ask(folders, kind, verb, steps, place)
    touched = {step[1] for step in steps} | {step[2] for step in steps if step[0] == "swap"}
    settings_changed = touched & {"config.toml", "nodes.json"} or any(
        mark in answer.err for mark in ("Skipped ", "is not used")
    )
    if answer.code == 0 and verb in OPENS and _settings_differ(answer, folders.answer(kind, verb), steps):
        assert "config.toml" in answer.err
    if answer.code == 0 and not settings_changed:
        expected = folders.answer(kind, verb)
        if verb == "eval" and not _of_an_earlier_round(steps):
            assert answer.out == expected.out, "another answer, and no word of it"
        if verb == "export" and not _of_an_earlier_round(steps):
            assert answer.written["model.safetensors"] == expected.written["model.safetensors"]
        if verb == "resume" and kind == "stopped":
            (last,) = [name for name in expected.files if name.startswith("checkpoints/") and "000004" in name]
            assert answer.files[last] == expected.files[last]
    return answer


def _settings_differ(answer: Answer, expected: Answer, steps: list[Step]) -> bool:
    """Tell whether other settings stand in the folder than at first, and its checksum of them can be read."""
    has_checksum = all("environment.json" not in step for step in steps)
    return (
        has_checksum
        and all(step[0] in ("flip", "cut", "fill") for step in steps if "config.toml" in step)
        and (answer.files.get("config.toml") != expected.files["config.toml"])
    )


def _of_an_earlier_round(steps: list[Step]) -> bool:
    """Tell whether the newest checkpoint is gone, and so is what tells that it was there: the reports of the rounds.

    What is left may then be the folder of a run that came no further, so nothing has to be said.
    """
    reports = any(what != "link" and "metrics.jsonl" in (name, *rest[:1]) for what, name, *rest in steps)
    return reports and ["remove", CHECKPOINTS[-1]] in steps


# ---- damage --------------------------------------------------------------------------------------------------------

tensors = st.sampled_from([*CHECKPOINTS, CHECKPOINTS[-1], "base.safetensors"])
texts = st.sampled_from(TEXTS)
anything = st.sampled_from([*CHECKPOINTS, *TEXTS, *SETTINGS, *OTHERS])
places = st.floats(0, 1)
values = st.sampled_from(
    [None, True, -1, 0, 3, 2**40, 10**30, 1.5, -0.0, 1e300, "", "x", "\0", "é\ud800", [], [1], [[[]]], {}, {"a": 1},
     {"$tensor": "x"}, {"$items": [[[], 1]]}, {"$tuple": 3}, "9" * 5000]
)  # fmt: skip
fillings = st.sampled_from(
    [("", 1), ("[", 100_000), ('{"a":', 100_000), ("null\n", 1), ("[]\n", 1), ("9", 10_000), ("\x00", 1000),
     ('"\\ud800"', 1), ("[", 5000, "a = "), ("a.", 3000), ('{"round": 1}\n', 3), ("1e999\n", 2)]
)  # fmt: skip


def step(*parts: Any) -> st.SearchStrategy[Step]:
    return st.tuples(*(part if isinstance(part, st.SearchStrategy) else st.just(part) for part in parts)).map(list)


steps = st.one_of(
    step("flip", tensors, places, st.integers(0, 7)),
    step("flip", texts, places, st.integers(0, 7)),
    step("flip", "config.toml", places, st.integers(0, 7)),
    step("cut", anything, places),
    step("remove", anything),
    step("remove", st.sampled_from(FOLDERS)),
    st.tuples(anything, fillings).map(lambda pair: ["fill", pair[0], *pair[1]]),
    step("swap", anything, anything),
    step("link", st.sampled_from([*CHECKPOINTS, *TEXTS, *SETTINGS, *OTHERS, *FOLDERS])),
    step("loop", anything),
    step("pipe", anything),
    step("device", anything),
    step("folder", anything),
    step("value", st.sampled_from(["metrics.jsonl", "summary.json", "fleet.json", "inference/level-3.json"]),
         st.integers(0, 400), values),
    step("nest", tensors, st.integers(0, 400), values),
    step("tensor", tensors, st.integers(0, 200),
         st.sampled_from(["nan", "short", "turn", "double", "drop", "more", "scalar"])),
)  # fmt: skip
verbs = st.sampled_from(
    ["eval", "eval", "eval", "predict", "predict --stop", "calibrate", "resume", "resume", "resume", "plan", "pictures",
     "compare", "start", "export", "profile"]
)  # fmt: skip
kinds = st.sampled_from(["finished"] * 4 + ["stopped"] * 6 + ["frozen"])
several = st.lists(steps, min_size=1, max_size=3)
_NUMBER = iter(range(10**9))
fuzzing = {
    "deadline": None, "database": None, "phases": (Phase.generate,), "suppress_health_check": list(HealthCheck),
    "derandomize": True,
}  # fmt: skip


def one(folders: Folders, kind: str, verb: str, done: list[Step]) -> None:
    place = folders.root / f"example-{next(_NUMBER)}"
    place.mkdir()
    try:
        check(folders, kind, verb, done, place)
    finally:
        shutil.rmtree(place)


@given(kinds, verbs, several)
@settings(max_examples=10, **fuzzing)
def test_some_damaged_folders(folders: Folders, kind: str, verb: str, done: list[Step]) -> None:
    one(folders, kind, verb, done)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_damaged_folders(folders: Folders, part: int) -> None:
    """In ten parts of fifty: each test has its time limit."""

    @seed(part)
    @given(kinds, verbs, several)
    @settings(max_examples=50, **{**fuzzing, "derandomize": False})
    def fifty(kind: str, verb: str, done: list[Step]) -> None:
        one(folders, kind, verb, done)

    fifty()


@pytest.mark.parametrize("file", sorted(CORPUS.glob("*.json")), ids=lambda file: file.stem)
def test_stored_failures(folders: Folders, file: Path, tmp_path: Path) -> None:
    """Each file: a kind of folder, a verb, the steps, and what must be said (or "" where it must go well)."""
    case = json.loads(file.read_text())
    answer = check(folders, case["folder"], case["verb"], case["steps"], tmp_path)
    assert answer.code == (2 if case["said"] and not case.get("goes_on") else 0), answer.err
    assert case["said"] in answer.err


@pytest.mark.parametrize("verb", ["eval", "resume"])
def test_changed_settings_are_noted(folders: Folders, tmp_path: Path, verb: str) -> None:
    """A flipped digit of the settings is named, as an edit is."""
    folder = tmp_path / "run"
    shutil.copytree(folders.of("stopped"), folder)
    arguments = [str(_filled(word, {"FOLDER": folder})) for word in VERBS[verb]]
    assert "config.toml" not in called(arguments, tmp_path)[2]
    text = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(text.replace("lr = 0.05", "lr = 0.06"))
    assert (folder / "config.toml").read_text() != text
    code, _, err = called(arguments, tmp_path)
    assert code == 0 and "config.toml" in err
    environment = json.loads((folder / "environment.json").read_text())
    del environment["sha256"]
    (folder / "environment.json").write_text(json.dumps(environment))
    code, _, err = called(arguments, tmp_path)
    assert code == 0 and "config.toml" not in err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["eval", "resume"])
@pytest.mark.parametrize(
    "done", [["pipe", "metrics.jsonl"], ["device", CHECKPOINTS[-1]], ["fill", "config.toml", "[", 100_000],
             ["link", "checkpoints"], ["nest", CHECKPOINTS[-1], 3, "x"], ["tensor", CHECKPOINTS[-1], 0, "nan"]],
    ids=lambda done: done[0],
)  # fmt: skip
def test_the_real_command_too(folders: Folders, tmp_path: Path, verb: str, done: Step) -> None:
    folder = tmp_path / "run"
    shutil.copytree(folders.of("stopped"), folder)
    (tmp_path / "elsewhere").mkdir()
    damage(folder, tmp_path / "elsewhere", [done])
    before = content(tmp_path / "elsewhere")
    with subprocess.Popen(
        [sys.executable, "-m", "fleetfit", verb, folder],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as process:  # fmt: skip
        _, err = process.communicate(timeout=600)
    assert process.returncode in (0, 2), err
    assert "Traceback" not in err and content(tmp_path / "elsewhere") == before
    assert process.returncode == 0 or err.startswith("fleetfit: ")

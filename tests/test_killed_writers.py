"""Verbs that write, killed with -9 at several moments and run again: the result is the unbroken one.

Moments are found by what is on disk, not by the clock: the process is stopped at the n-th flush to disk or renaming and
then killed, so that each kill is in the middle of writing. Nothing half-written is taken for whole, and no part file is
left after success.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from run_folders import TINY, settings

import fleetfit as ff

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent


class Caller:
    """Calls commands in forks of one process (`killed_child`), each of which may kill itself at its n-th write."""

    def __init__(self, place: Path) -> None:
        self._said = place / "said"
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "killed_child.py"), str(place)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )  # fmt: skip

    def __call__(self, place: Path, at: int, what: list[str] | str) -> int:
        """Call a command, or Python code, and kill it at its n-th write; return how many there were.

        Args:
            place: Where it runs.
            at: At which; 0: it runs to its end.
            what: The command's words, or the code.

        Returns:
            How many there were; -1 where it was killed.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([at, str(place), what]) + "\n")
        self._process.stdin.flush()
        code, writes = json.loads(self._process.stdout.readline())
        if code == -9:
            return -1
        assert code == 0, self._said.read_text()[-3000:]
        return int(writes)

    def end(self) -> None:
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Caller]:
    caller = Caller(tmp_path_factory.mktemp("caller"))
    yield caller
    caller.end()


def result(place: Path, parts: bool = False) -> dict[str, Any]:
    """Return what a command left, but for times and names of folders; `parts`: part files are passed over."""
    contents: dict[str, Any] = {}
    for path in sorted(place.rglob("*")):
        name = str(path.relative_to(place))
        if not path.is_file() or path.name in (".lock", "environment.json"):
            continue
        if parts and path.name.endswith(".part"):
            continue
        assert not path.name.endswith(".part") and ".part/" not in name, f"left behind: {name}"
        content: Any = path.read_bytes()
        if path.suffix in (".json", ".jsonl", ".toml", ".csv", ".md"):
            text = re.sub(r"killed-\d+|unbroken", "PLACE", content.decode())
            content = re.sub(
                r'"seconds_of": \{[^}]*\}|"((training_)?seconds|time)": ?[^,}\n]+|took .*|\(\d+(\.\d+)? ?m?s\)',
                "",
                text,
            )
            if path.name == "table.csv":  # its last two columns are seconds
                content = re.sub(r"(,[^,\n]*){2}$", "", content, flags=re.MULTILINE)
        elif path.suffix in (".png", ".pt2", ".onnx", ".html"):
            content = bool(content)  # they hold names and times of their own
        contents[name] = content
    return contents


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, calibrated, and run files."""
    place = tmp_path_factory.mktemp("trained")
    tables = {**TINY, "rounds": 2}
    ff.run(settings(), out=place / "run")
    (place / "run.toml").write_text(tomli_w.dumps(tables))
    (place / "rows.toml").write_text(tomli_w.dumps({**tables, "compare": {"row": [{"label": "a"}]}}))
    return place


VERBS: dict[str, list[str]] = {
    "run": ["run", "SOURCE/run.toml", "--out", "out", "-q"],
    "compare": ["compare", "SOURCE/rows.toml", "--out", "out", "-q"],
    "plan": ["plan", "SOURCE/run.toml", "--save", "plan.toml"],
    "calibrate": ["calibrate", "run"],
    "export": ["export", "run", "--no-onnx", "--out", "out"],
    "resume": ["resume", "run", "-q"],
    "predict": ["predict", "run", "--adaptive", "--out", "predictions.csv"],
    "pictures": ["pictures", "run"],
    "report": ["report", "run"],
    "flower init": ["flower", "init", "out", "--run", "SOURCE/run.toml"],
    "flower certificates": ["flower", "certificates", "out", "--host", "localhost"],
    "flower key": ["flower", "key", "keys/pi"],
    "flower member": ["flower", "member", "keys/pi.member", "--authority", "authority"],
}
"""Verbs that write, as they are called to do so."""
ELSEWHERE = {
    "runs": "tests/runs/test_listing.py",
    "demo": "what it writes is what `compare` writes",
    "flower approve": "tests/fleet/test_policy.py",
    "flower log": "it reads the log of a node: tests/fleet/test_policy.py",
    "flower revoke": "tests/fleet/test_policy.py, and tests/fleet/test_joining.py",
    "profile": "test_a_profile_is_old_or_new",
    "flower node": "test_a_nodes_memory_is_old_or_new, and tests/fleet",
    "flower resume": "tests/fleet; what it writes is what `resume` writes, and the app of `flower init`",
}
READERS = {
    "eval": ["eval", "run"],
    "list": ["list", "methods"],
    "watch": ["watch", "run"],
    "check-model": ["check-model", f"{HERE}/tiny.py:tiny", "--classes", "4", "--input-shape", "1,4,4"],
}
RANDOM = ("flower certificates", "flower key", "flower member")
"""Whose files are others each time."""


def test_every_verb_is_known_as_one_that_writes_or_that_does_not() -> None:
    """A new verb is put into one of the tables, and so is killed here or seen to write nothing."""
    import typer

    from fleetfit.cli.main import make_app

    command: Any = typer.main.get_command(make_app())
    inner = {f"flower {name}" for name in command.commands["flower"].commands}
    assert sorted((command.commands.keys() - {"flower"}) | inner) == sorted([*VERBS, *ELSEWHERE, *READERS])


def prepare_place(verb: str, trained: Path, place: Path) -> list[str]:
    """Make what a verb works on, and return its arguments."""
    place.mkdir()
    words = {**VERBS, **READERS}[verb]
    if "run" in words[1:]:
        shutil.copytree(trained / "run", place / "run")
    if verb == "resume":  # of which all is left to do
        (place / "run" / "summary.json").unlink()
        (place / "run" / "metrics.jsonl").unlink()
        shutil.rmtree(place / "run" / "checkpoints")
    return [word.replace("SOURCE", str(trained)) for word in words]


def again(verb: str, arguments: list[str], place: Path) -> list[str]:
    """Return what is typed after a kill: a run that has begun is gone on with."""
    return ["resume", "out", "-q"] if verb == "run" and (place / "out").exists() else arguments


def moments(verb: str, writes: int) -> list[int]:
    """Return at which writes a verb is killed: at all of them where that costs little."""
    if verb.startswith("flower"):
        return list(range(1, writes + 1))
    first = {1} if verb in ("run", "resume", "export") else set()
    return sorted(first | {(writes + 1) // 2, writes})


@pytest.mark.parametrize("verb", VERBS)
def test_killed_while_it_writes(verb: str, command: Caller, trained: Path, tmp_path: Path) -> None:
    if verb == "pictures":
        pytest.importorskip("matplotlib", reason="the extra `plots` is not installed")
    if verb in RANDOM:
        pytest.importorskip("cryptography", reason="the extra `flower` is not installed")
    unbroken = tmp_path / "unbroken"
    writes = command(unbroken, 0, prepare_place(verb, trained, unbroken))
    assert writes > 0, "it writes nothing for certain"
    expected = read_outcome(verb, unbroken)
    for at in moments(verb, writes):
        place = tmp_path / f"killed-{at}"
        arguments = prepare_place(verb, trained, place)
        assert command(place, at, arguments) == -1, f"killed at write {at} of {writes}"
        check_written_files(verb, place)
        if verb.startswith("flower") and read_outcome(verb, place, parts=True) == expected:
            continue  # it was whole, and is not written over
        command(place, 0, again(verb, arguments, place))
        assert read_outcome(verb, place) == expected, f"killed at write {at} of {writes}"


def read_outcome(verb: str, place: Path, parts: bool = False) -> Any:
    """Return what a verb left, in a form in which two calls are equal; `parts`: part files are passed over."""
    if verb not in RANDOM:
        return result(place, parts)
    return sorted(p.name for p in place.rglob("*") if p.is_file() and not (parts and p.name.endswith(".part")))


def check_written_files(verb: str, place: Path) -> None:
    """Whatever a killed call has left under its own name is whole."""
    if verb == "predict":
        assert not (place / "predictions.csv").exists() or len((place / "predictions.csv").read_text()) > 100
    if verb == "flower init" and (place / "out" / "pyproject.toml").exists():
        assert len([p for p in (place / "out").iterdir() if not p.name.startswith(".")]) == 4


@pytest.mark.parametrize("verb", READERS)
def test_what_reads_writes_nothing(verb: str, command: Caller, trained: Path, tmp_path: Path) -> None:
    place = tmp_path / "here"
    arguments = prepare_place(verb, trained, place)
    before = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    assert command(place, 0, arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == before


def test_keys_and_certificates_made_in_two_calls_belong_together(command: Caller, tmp_path: Path) -> None:
    """A key that a killed call has left is used by the next, and never written over; a person's file neither."""
    serialization = pytest.importorskip("cryptography.hazmat.primitives.serialization")
    x509 = pytest.importorskip("cryptography.x509")
    words = ["flower", "certificates", str(tmp_path), "--host", "localhost"]
    for at, complete in (
        (3, "ca.key"),
        (6, "ca.crt"),
        (9, "server.key"),
    ):  # killed in front of the next file's first flush
        for path in tmp_path.iterdir():
            path.unlink()
        assert command(tmp_path, at + 1, words) == -1
        before = (tmp_path / complete).read_bytes()
        assert not (tmp_path / "server.pem").exists()
        command(tmp_path, 0, words)
        assert (tmp_path / complete).read_bytes() == before
        authority, server = (
            x509.load_pem_x509_certificate((tmp_path / n).read_bytes()) for n in ("ca.crt", "server.pem")
        )
        server.verify_directly_issued_by(authority)
        for name, of in (("ca.key", authority), ("server.key", server)):
            key = serialization.load_pem_private_key((tmp_path / name).read_bytes(), None)
            assert key.public_key() == of.public_key() and (tmp_path / name).stat().st_mode & 0o777 == 0o600
    words = ["flower", "key", str(tmp_path / "pi")]
    assert command(tmp_path, 4, words) == -1
    private, public = tmp_path / "pi", tmp_path / "pi.pub"
    before = private.read_bytes()
    assert not public.exists()
    command(tmp_path, 0, words)
    assert private.read_bytes() == before and private.stat().st_mode & 0o777 == 0o600
    ours = serialization.load_ssh_private_key(before, None).public_key()
    assert serialization.load_ssh_public_key(public.read_bytes()) == ours


def test_an_app_that_somebody_has_edited_is_not_written_over(command: Caller, tmp_path: Path) -> None:
    """What a killed call left is finished by the next, unless a file in it is another by now."""
    words = ["flower", "init", "app"]
    assert command(tmp_path, 8, words) == -1
    run_file = tmp_path / "app" / "run.toml"
    own = run_file.read_text().replace("rounds = 10", "rounds = 99")
    run_file.write_text(own)
    with pytest.raises(AssertionError, match="app"):
        command(tmp_path, 0, words)
    assert run_file.read_text() == own and not (tmp_path / "app" / "pyproject.toml").exists()


def test_a_nodes_memory_is_old_or_new(command: Caller, tmp_path: Path) -> None:
    """Killed while it keeps a version, a node has the one before, or both; tensors of a digest are there or not."""
    pytest.importorskip("flwr", reason="the extra `flower` is not installed")
    from fleetfit.fleet.node import NodeFiles
    from fleetfit.fleet.protocol import compute_digest

    run, content = "0123456789abcdef", b"x" * 1000
    keep = f"""
from pathlib import Path
from fleetfit.fleet.node import NodeFiles, compute_digest
kept = NodeFiles(Path("node"))
kept.keep("{run}", VERSION - 1, VERSION, ("memory", VERSION))
kept.keep_base(compute_digest(b"x" * 1000), b"x" * 1000)
"""
    writes = command(tmp_path, 0, keep.replace("VERSION", "0"))
    assert writes >= 4
    files = NodeFiles(tmp_path / "node")
    for at in range(1, writes + 1):
        assert command(tmp_path, at, keep.replace("VERSION", "1")) == -1
        assert files.load(run, 0) == (("memory", 0), False), f"killed at write {at}"
        assert files.load(run, 1) in ((("memory", 1), False), (None, True))
        assert files.load_base(compute_digest(content)) in (None, content)
    command(tmp_path, 0, keep.replace("VERSION", "1"))
    assert files.load(run, 1) == (("memory", 1), False) and files.load_base(compute_digest(content)) == content
    assert not list(tmp_path.rglob("*.part"))


def test_a_profile_is_old_or_new(command: Caller, trained: Path, tmp_path: Path) -> None:
    """What is measured differs from time to time, so only that the file is whole can be said."""
    arguments = ["profile", str(trained / "run.toml"), "--step-s", "100", "--memory", "4 GB", "--out", "budget.toml"]
    writes = command(tmp_path, 0, arguments)
    old = (tmp_path / "budget.toml").read_text()
    for at in range(1, writes + 1):
        assert command(tmp_path, at, [*arguments, "--force"]) == -1
        now = (tmp_path / "budget.toml").read_text()
        assert now == old or ("budget" in now and now.endswith("\n"))
        old = now
    command(tmp_path, 0, [*arguments, "--force"])
    assert [p.name for p in tmp_path.iterdir()] == ["budget.toml"]


def test_the_next_run_removes_an_abandoned_folder(command: Caller, trained: Path, tmp_path: Path) -> None:
    """The part of a folder that a killed process left goes with the next one that makes the same folder."""
    place = tmp_path / "killed-2"
    place.mkdir()
    arguments = ["run", str(trained / "run.toml"), "--out", "out", "-q"]
    assert command(place, 2, arguments) == -1
    assert not (place / "out").exists() and list(place.glob(".out*")), "killed before it was there"
    command(place, 0, arguments)
    assert not list(place.glob(".*")) and json.loads((place / "out" / "summary.json").read_text())["rounds"] == 2

"""The command line: one sentence for each error, and a documented exit code."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support import run_verb
from waiting import LIMIT_S, listening_to_ctrl_c, running, wait_until

SMALL = ["--set", "data.partition.clients=4", "--set", "rounds=1", "--set", "local.epochs=1", "--set", "cohort.count=2",
         "--set", "fleet.groups=[{budget=1.0}]"]  # fmt: skip
PLUG_IN = """
import os, signal, sys
from fleetfit.hooks import Method


class Odd(BaseException):
    def __str__(self):
        raise ValueError


def bug():
    raise ZeroDivisionError("a bug\\nof two lines")


def leaves():
    sys.exit()


def recurses():
    return recurses()


def odd():
    raise Odd


def interrupted():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(10**9):
        pass


def no_memory():
    raise MemoryError


def no_disk():
    raise OSError(28, "No space left on device", "/somewhere/file")


def prints():
    print("look here")
    return Method()


def in_a_job(what):
    def loss(job, device):
        def value(module, x, y):
            return sys.exit(0) if what == "leaves" else x.view(3, -1) if what == "views" else {}["missing"]
        return value
    return Method(make_loss=loss)
"""


@pytest.fixture
def plug_in(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(PLUG_IN)
    return tmp_path / "own.py"


def process(*arguments: object, **more: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "fleetfit", *map(str, arguments)],
        text=True, timeout=LIMIT_S, check=False, errors="replace",
        **({"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more),  # type: ignore[call-overload]
    )  # fmt: skip


def sentence(err: str) -> str:
    """Return the one line of an answer."""
    assert err.startswith("fleetfit: ") and err.count("\n") == 1 and "Traceback" not in err, err
    return err.removeprefix("fleetfit: ").strip()


# ---- unexpected exceptions -----------------------------------------------------------------------------------------


def test_an_internal_error_asks_for_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetfit.cli import listing

    def broken(kind: str) -> None:
        raise KeyError("the\ncause")

    monkeypatch.setattr(listing, "make_list_table", broken)
    err = run_verb("list", "models", code=1).err
    assert "KeyError: 'the\\ncause'" in sentence(err) and "--traceback" in err


@pytest.mark.parametrize("way", ["option", "variable"])
def test_a_traceback_is_printed_where_it_is_asked_for(plug_in: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "variable":
        monkeypatch.setenv("FLEETFIT_TRACEBACK", "1")
    options = ["--traceback"] if way == "option" else []
    err = run_verb(*options, "run", "--set", f"method.name={plug_in}:bug", code=2).err
    assert err.startswith("Traceback") and "own.py" in err
    assert err.splitlines()[-1].startswith("fleetfit: "), "the sentence is the last line"


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("bug", "raised ZeroDivisionError: a bug of two lines"),
        ("leaves", "called sys.exit(None), which would end the whole program; raise an error instead"),
        ("recurses", "raised RecursionError: maximum recursion depth exceeded"),
        ("odd", "raised Odd: its message cannot be read"),
    ],
)
def test_what_a_plug_in_does_names_the_plug_in(plug_in: Path, function: str, problem: str) -> None:
    err = run_verb("run", "--set", f"method.name={plug_in}:{function}", code=2).err
    assert re.match(
        rf'"{re.escape(str(plug_in))}:{function}" \(own\.py, line \d+\) {re.escape(problem)}', sentence(err)
    )
    assert "internal error" not in err


@pytest.mark.parametrize("name", ["bye.py:method", "bye:method"])
def test_sys_exit_while_a_plug_in_is_imported_names_the_plug_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "bye.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    err = run_verb("run", "--set", f"method.name={name}", code=2).err
    assert "sys.exit(0)" in sentence(err) and "bye" in err


def test_sys_exit_in_a_job_is_that_jobs_failure(plug_in: Path, tmp_path: Path) -> None:
    own = ["--set", f"method.name={plug_in}:in_a_job", "--set", "method.what=leaves", "--set", "rounds=6"]
    err = run_verb("run", *SMALL, *own, "--out", tmp_path / "run", "-q", code=3).err
    assert "called sys.exit(0)" in sentence(err)


def test_a_shape_error_in_a_job_has_the_plug_in_s_line(plug_in: Path, tmp_path: Path) -> None:
    own = ["--set", f"method.name={plug_in}:in_a_job", "--set", "method.what=views", "--set", "rounds=5"]
    err = run_verb("run", *SMALL, *own, "--out", tmp_path / "run", "-q", code=3).err
    line = 1 + next(i for i, text in enumerate(PLUG_IN.splitlines()) if '"views"' in text)
    assert "RuntimeError" in err and f"(own.py, line {line})" in err


@pytest.mark.slow
def test_what_a_plug_in_raises_in_a_worker_is_the_same_sentence(plug_in: Path, tmp_path: Path) -> None:
    own = ["--set", f"method.name={plug_in}:in_a_job", "--set", "method.what=fails"]
    workers = ["--set", "engine.name=processes", "--set", "engine.workers=1"]
    result = process("run", *SMALL, *own, *workers, "--out", tmp_path / "run", "-q")
    message = sentence(result.stderr)
    assert result.returncode == 3
    assert "(own.py, line " in message and "KeyError: 'missing'" in message


def test_what_a_plug_in_prints_does_not_get_among_json(plug_in: Path, tmp_path: Path) -> None:
    import json

    own = ["--set", f"method.name={plug_in}:prints"]
    trained = process("run", *SMALL, *own, "--out", tmp_path / "run", "-q")
    assert trained.returncode == 0 and "look here" in trained.stdout
    result = process("eval", tmp_path / "run", "--json")
    assert result.returncode == 0, result.stderr
    assert "static" in json.loads(result.stdout) and "look here" in result.stderr


# ---- the machine's limits ------------------------------------------------------------------------------------------


def test_no_memory_and_no_disk_are_sentences(plug_in: Path) -> None:
    err = run_verb("run", "--set", f"method.name={plug_in}:no_memory", code=2).err
    assert "memory" in sentence(err)
    err = run_verb("run", "--set", f"method.name={plug_in}:no_disk", code=2).err
    assert "/somewhere/file" in sentence(err) and "disk" in sentence(err)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_an_output_that_is_full_is_a_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        result = process("list", "engines", stdout=full)
    assert result.returncode == 2 and "disk" in sentence(result.stderr)


# ---- streams -------------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_ends_the_program_without_a_word() -> None:
    for arguments in (["list", "models"], ["--help"], ["--version"], ["plan", "--model", "cnn"]):
        read, write = os.pipe()
        os.close(read)
        try:
            result = process(*arguments, stdout=write)
        finally:
            os.close(write)
        assert (result.returncode, result.stderr) == (2, ""), arguments


def test_closed_streams_are_no_error_and_no_file_lands_on_them(tmp_path: Path) -> None:
    command = f'"{sys.executable}" -m fleetfit plan --model cnn --save "{tmp_path / "plan.toml"}" <&- >&- 2>&-'
    closed = subprocess.run(["/bin/sh", "-c", command], timeout=LIMIT_S, check=False)
    assert closed.returncode == 0
    assert "level" in (tmp_path / "plan.toml").read_text()
    command = f'"{sys.executable}" -m fleetfit run missing.toml >&-'
    failing = subprocess.run(["/bin/sh", "-c", command], timeout=LIMIT_S, check=False, capture_output=True, text=True)
    assert failing.returncode == 2 and "missing.toml" in sentence(failing.stderr)


def test_a_terminal_without_our_characters_gets_others() -> None:
    result = process("list", "engines", env={**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"})
    assert result.returncode == 0, result.stderr
    assert "local" in result.stdout


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


def interrupt_import(marker: str, *arguments: object) -> tuple[int, list[str]]:
    """Send Ctrl-C as soon as a module has been imported; return the exit code and what was said."""
    command = [sys.executable, "-X", "importtime", "-m", "fleetfit", *arguments]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with running(command, **pipes, preexec_fn=listening_to_ctrl_c) as started:
        assert started.stderr is not None
        for line in iter(started.stderr.readline, ""):
            if line.rstrip().endswith(f" {marker}"):
                break
        else:
            raise AssertionError(f"{marker} was never imported")
        started.send_signal(signal.SIGINT)
        _, err = started.communicate(timeout=LIMIT_S)
    return started.returncode, [line for line in err.splitlines() if not line.startswith("import time:")]


@pytest.mark.parametrize("marker", ["fleetfit.cli.arguments", "typer", "numpy", "torch.types"])
def test_ctrl_c_while_importing_is_one_line(marker: str, tmp_path: Path) -> None:
    code, lines = interrupt_import(marker, "run", *SMALL, "--out", tmp_path / "run")
    assert code in (130, -signal.SIGINT), "a shell shows 130 for both"
    assert lines == ["fleetfit: stopped."]
    assert not any(tmp_path.iterdir())


def importing(process: str) -> bool:
    """Tell whether a worker has come as far as the libraries of PyTorch."""
    try:
        begun = (
            b"fleetfit.engines.processes" in Path(f"/proc/{process}/cmdline").read_bytes()
        )  # else it is a copy of ours
        return begun and "libtorch" in Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="what a process imports is read from /proc")
def test_ctrl_c_in_a_terminal_while_workers_start_is_one_line(tmp_path: Path) -> None:
    """There the signal goes to the whole group; a worker that still imports must not answer with a traceback."""
    workers = ["--set", "engine.name=processes", "--set", "engine.workers=2", "--set", "rounds=500"]
    command = [sys.executable, "-m", "fleetfit", "run", *SMALL, *workers, "--out", tmp_path / "run"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with running(command, **pipes, preexec_fn=listening_to_ctrl_c) as started:
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
        wait_until(lambda: any(map(importing, children.read_text().split())), started)
        os.killpg(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=LIMIT_S)  # until the workers, which hold the same pipe, are gone too
    assert started.returncode in (130, -signal.SIGINT)
    assert sentence(err).startswith("stopped.")


def test_ctrl_c_in_a_plug_in_is_one_line(plug_in: Path) -> None:
    command = [sys.executable, "-m", "fleetfit", "run", "--set", f"method.name={plug_in}:interrupted"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False,
        preexec_fn=listening_to_ctrl_c,
    )  # fmt: skip
    assert result.returncode in (130, -signal.SIGINT) and result.stderr == "fleetfit: stopped.\n"


# ---- paths ---------------------------------------------------------------------------------------------------------


def odd_paths(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(tmp_path)
        listening.bind("socket")
    return {
        "empty": "",
        "long": "a" * 5000,
        "long part": f"{tmp_path}/{'b' * 300}/c",
        "not UTF-8": os.fsdecode(b"/bad\xff\xfe"),
        "loop": str(tmp_path / "loop"),
        "in a loop": str(tmp_path / "loop" / "deeper"),
        "nobody": "~nobody-such-is-here/x",
        "pipe": str(tmp_path / "pipe"),
        "socket": str(tmp_path / "socket"),
        "device": "/dev/zero",
        "file": str(tmp_path / "file"),
        "in a file": str(tmp_path / "file" / "deeper"),
        "folder": str(tmp_path / "folder"),
    }


VERBS = {
    "run": (["run"], "folder"),
    "run --out": (["run", *SMALL, "--out"], "file"),
    "resume": (["resume"], "file"),
    "demo --out": (["demo", "--out"], "file"),
    "demo --write": (["demo", "--write"], "folder"),
    "compare": (["compare"], "folder"),
    "plan": (["plan"], "folder"),
    "plan --save": (["plan", "--model", "cnn", "--save"], "folder"),
    "eval": (["eval"], "file"),
    "predict": (["predict"], "file"),
    "calibrate": (["calibrate", "--budget", "0.5"], "file"),
    "export": (["export", "--out", "{tmp}/new"], "file"),
    "pictures": (["pictures"], "file"),
    "profile": (["profile"], "folder"),
    "profile --out": (["profile", "--out"], "folder"),
    "flower node": (["flower", "node"], "folder"),
    "flower node --check": (["flower", "node", "--check"], "folder"),
    "flower resume": (["flower", "resume"], "file"),
    "flower init --run": (["flower", "init", "{tmp}/app", "--run"], "folder"),
    "flower key": (["flower", "key"], "folder"),
    "flower member": (["flower", "member", "--authority", "{tmp}/authority"], "folder"),
    "flower member --authority": (["flower", "member", "{tmp}/own.member", "--authority"], "file"),
    "flower certificates": (["flower", "certificates", "--host", "localhost"], "file"),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_path_that_cannot_be_is_a_sentence_in_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, wrong = VERBS[verb]
    writes = any(word in verb for word in ("--out", "--save", "--write", "key", "certificates"))
    for name, path in odd_paths(tmp_path).items():
        if (name in ("file", "folder") and name != wrong) or (name == "device" and writes and wrong == "folder"):
            continue
        code, _, err = run_verb(*(word.replace("{tmp}", str(tmp_path)) for word in arguments), path)
        assert code == 2, (name, err)
        assert len(sentence(err)) < 1000, name
    left = {"loop", "file", "folder", "pipe", "socket"}
    assert {p.name for p in tmp_path.iterdir()} == left and not any((tmp_path / "folder").iterdir())


@pytest.mark.parametrize("name", ["pipe", "loop", "in a loop", "folder", "nobody", "long", "not UTF-8", "device"])
def test_a_plug_ins_path_that_cannot_be_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path(odd_paths(tmp_path)[name])
    if name not in ("nobody", "long", "not UTF-8"):
        (tmp_path / "link.py").symlink_to(path)
        path = tmp_path / "link.py"
    err = run_verb("run", "--set", f"method.name={path}.py:method".replace(".py.py", ".py"), code=2).err
    assert sentence(err)

"""The run folder survives a kill at any moment: files are old or new, never half, and unknown formats are refused."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save_file
from support import raises

from fleetfit.errors import RunError
from fleetfit.files import write_text
from fleetfit.runs.checkpoints import read_checkpoint, write_checkpoint
from fleetfit.runs.environment import describe_environment
from fleetfit.runs.folder import RunFolder, choose_path, to_json_value

FILES = {"config.toml": "seed = 0\n", "environment.json": "{}\n"}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", FILES)


def is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and bool((a == b).all())
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(is_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_equal, a, b))
    return type(a) is type(b) and a == b


# ---- nests ---------------------------------------------------------------------------------------------------------

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
arrays = st.lists(st.floats(-1, 1, width=32), max_size=3).map(torch.tensor)
nests = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 99) | st.just("$tuple"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(state=nests)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_nest_survives_its_file(state: Any, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "file", {"nest": state})
    assert is_equal(read_checkpoint(tmp_path / "file"), {"nest": state})


def test_keys_that_read_alike_are_told_apart(tmp_path: Path) -> None:
    state = {1: torch.ones(1), "1": torch.zeros(1), "a": {"b/c": torch.ones(2)}, "a/b": {"c": torch.zeros(2)}}
    write_checkpoint(tmp_path / "file", state)
    assert is_equal(read_checkpoint(tmp_path / "file"), state)


def test_a_file_is_one_flat_tensor_for_each_type_of_numbers(tmp_path: Path) -> None:
    state = {"a": {"x": torch.ones(2, 3), "y": torch.zeros(4)}, "b": torch.arange(3), "c": [torch.full((1,), 7.0)]}
    write_checkpoint(tmp_path / "file", state)
    tensors = load_file(tmp_path / "file")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {"float32": (11,), "int64": (3,)}
    assert tensors["float32"].tolist() == [1.0] * 6 + [0.0] * 4 + [7.0]


def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path) -> None:
    with raises(RunError, "memory/3", "set", path=tmp_path / "file"):
        write_checkpoint(tmp_path / "file", {"memory": {3: {1, 2}}})
    with raises(RunError, "memory", "torch.complex64", path=tmp_path / "file"):
        write_checkpoint(tmp_path / "file", {"memory": {"x": torch.zeros(2, dtype=torch.complex64)}})
    deep: Any = 1
    for _ in range(70):
        deep = {"a": deep}
    with raises(RunError, 60, path=tmp_path / "file"):
        write_checkpoint(tmp_path / "file", deep)
    assert not (tmp_path / "file").exists()


def test_json_has_no_nan() -> None:
    values = to_json_value({"a": float("nan"), 1: [np.float32(0.5), float("inf")], "b": (np.int64(3),)})
    assert values == {"a": None, "1": [0.5, None], "b": [3]}


# ---- checkpoints ---------------------------------------------------------------------------------------------------


def test_checkpoints_keep_every_bit(folder: RunFolder) -> None:
    flat = torch.arange(12, dtype=torch.float32) / 7
    shared = torch.ones(3, dtype=torch.bfloat16)
    state = {
        "server": {"state": {"a": flat[:4].view(2, 2), "b": flat[4:].view(2, 4).t()}, "round": 3, "memory": None},
        "clients": {"5": {"version": 2, "memory": (shared, [shared, {"n": np.arange(3)}])}},
        "statistics": {0: {"norm.mean": torch.zeros(0)}},
    }
    folder.save_checkpoint(3, state)
    assert is_equal(folder.load_checkpoint(), state)


def test_only_the_newest_are_kept_and_the_newest_counts(folder: RunFolder) -> None:
    for round in (1, 2, 9, 10):
        folder.save_checkpoint(round, {"round": round}, keep=2)
    assert [p.name for p in folder.checkpoints()] == ["round-000009.safetensors", "round-000010.safetensors"]
    assert folder.load_checkpoint() == {"round": 10}


def test_a_damaged_checkpoint_gives_way_to_the_one_before(folder: RunFolder) -> None:
    for round in (1, 2):
        folder.save_checkpoint(round, {"round": round, "x": torch.ones(50)})
    newest = folder.checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:-20])
    state = folder.load_checkpoint()
    assert state is not None
    assert state["round"] == 1
    first = folder.checkpoints()[0]
    first.write_bytes(b"")
    with raises(RunError, newest.name, first.name, path=folder.path / "checkpoints"):
        folder.load_checkpoint()


def test_a_half_written_checkpoint_does_not_count(folder: RunFolder) -> None:
    folder.save_checkpoint(1, {"round": 1})
    (folder.path / "checkpoints" / ".round-000002.safetensors.part").write_bytes(b"half")
    assert folder.load_checkpoint() == {"round": 1}
    folder.rewind(1)
    assert not list((folder.path / "checkpoints").glob(".*"))


def test_no_checkpoint_is_none(folder: RunFolder) -> None:
    assert folder.load_checkpoint() is None


@pytest.mark.parametrize("header", [{"fleetfit": "checkpoint", "format": "3"}, {"format": "1"}, {}])
def test_an_unknown_format_is_refused(folder: RunFolder, header: dict[str, str]) -> None:
    folder.save_checkpoint(1, {"round": 1})
    save_file({"x": torch.ones(1)}, folder.path / "checkpoints" / "round-000002.safetensors", header)
    with raises(RunError, f"format {header.get('format', 'none')}", "format 2", path="round-000002.safetensors"):
        folder.load_checkpoint()


def test_a_checkpoint_is_plain_safetensors(folder: RunFolder) -> None:
    folder.save_checkpoint(1, {"server": {"state": {"blocks.0.weight": torch.ones(2)}}})
    assert load_file(folder.checkpoints()[0])["float32"].tolist() == [1.0, 1.0]


# ---- the folder ----------------------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    with raises(RunError, f"fleetfit resume {folder.path}", path=folder.path):
        RunFolder.create(folder.path, FILES)
    (tmp_path / "file").write_text("x")
    with raises(RunError, path=tmp_path / "file"):
        RunFolder.create(tmp_path / "file", FILES)
    with raises(RunError, path=tmp_path / "file" / "below"):
        RunFolder.create(tmp_path / "file" / "below", FILES)


def test_an_empty_folder_will_do(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", FILES).text("config.toml") == "seed = 0\n"
    assert not list(tmp_path.glob(".*")), "nothing is left beside it"


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    original = Path.replace

    def watched(self: Path, target: Path) -> Path:
        seen.append((target.exists(), sorted(p.name for p in self.iterdir())))
        return original(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    RunFolder.create(tmp_path / "run", FILES)
    assert seen == [(False, ["checkpoints", "config.toml", "environment.json"])]


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    with raises(RunError, path=tmp_path / "missing"):
        RunFolder.open(tmp_path / "missing")
    with raises(RunError, "config.toml", path=tmp_path):
        RunFolder.open(tmp_path)


def test_one_process_at_a_time(folder: RunFolder) -> None:
    program = (
        "import sys; from pathlib import Path; from fleetfit.runs.folder import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).hold(): pass"
    )
    with folder.hold():
        done = subprocess.run([sys.executable, "-c", program, folder.path], capture_output=True, text=True, check=False)
    assert str(folder.path) in done.stderr.splitlines()[-1]
    with folder.hold():
        pass  # the hold ended with the block


def test_atomic_writes_leave_the_old_file_when_they_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_text(path, "old")
    monkeypatch.setattr(os, "fsync", lambda handle: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        write_text(path, "new")
    assert path.read_text() == "old"


def test_new_paths_differ(tmp_path: Path) -> None:
    first = choose_path(tmp_path, "ScaleFL on digits!", "seed = 0")
    first.mkdir()
    second = choose_path(tmp_path, "ScaleFL on digits!", "seed = 0")
    assert first != second
    assert "-ScaleFL-on-digits-" in first.name


def test_the_environment_says_what_a_result_depends_on() -> None:
    environment = describe_environment()
    assert environment["torch"] == torch.__version__
    assert {"python", "numpy", "platform", "threads", "git_commit", "time"} <= set(environment)
    json.dumps(environment)


# ---- metrics -------------------------------------------------------------------------------------------------------


def report(round: int, **further: Any) -> dict[str, Any]:
    train = {"loss": 0.5, "clients": 2}
    return {"round": round, "train": train, "failures": [], "bytes_down": 1, "bytes_up": 1, "seconds": 0.1, **further}


def test_metrics_are_cut_at_the_checkpoint(folder: RunFolder) -> None:
    for round in (1, 2, 3):
        folder.append(report(round))
    with (folder.path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    assert folder.metrics() == [report(1), report(2), report(3)]
    folder.rewind(2)
    folder.append(report(3, again=True))
    assert folder.metrics() == [report(1), report(2), report(3, again=True)]


def test_rounds_that_are_known_are_not_read_again(folder: RunFolder) -> None:
    for round in (1, 2, 3):
        folder.append(report(round))
    path = folder.path / "metrics.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join(["damaged\n", *rest]))
    assert folder.metrics(after=1) == [report(2), report(3)] and folder.metrics(after=4) == []
    path.write_text("".join([first, rest[0], "damaged\n", rest[1]]))
    with raises(RunError, "line 3"):
        folder.metrics(after=1)


def test_a_half_written_first_line_is_cut_too(folder: RunFolder) -> None:
    (folder.path / "metrics.jsonl").write_text('{"rou')
    assert folder.has_rounds()
    folder.rewind(0)
    folder.append(report(1))
    assert folder.metrics() == [report(1)]


def test_a_damaged_line_in_the_middle_is_named(folder: RunFolder) -> None:
    path = folder.path / "metrics.jsonl"
    path.write_text(f'{json.dumps(report(1))}\n{{"rou\n{{"round": 3}}\n')
    with raises(RunError, "line 2", path=path):
        folder.metrics()


def test_a_report_that_does_not_fit_is_named_by_line_and_key(folder: RunFolder) -> None:
    for round, seconds in enumerate((1.0, 2, "3"), 1):
        folder.append(report(round, seconds=seconds))
    with raises(RunError, "line 3", "'3'", key="seconds", path=folder.path / "metrics.jsonl"):
        folder.metrics()
    assert folder.count_reports() == 2


def test_a_full_disk_is_a_sentence(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "device")

    monkeypatch.setattr(os, "fsync", full)
    with raises(RunError, "disk", path=folder.path / "metrics.jsonl"):
        folder.append({"round": 1})
    with raises(RunError, path=folder.path / "checkpoints/round-000001.safetensors"):
        folder.save_checkpoint(1, {"round": 1})
    assert folder.load_checkpoint() is None


def test_a_resumption_is_noted(folder: RunFolder) -> None:
    folder.record_resumption(4)
    folder.record_resumption(6)
    resumptions = json.loads(folder.text("environment.json"))["resumed"]
    assert [entry["round"] for entry in resumptions] == [4, 6]
    (folder.path / "environment.json").write_text("{")
    folder.record_resumption(7)
    assert [entry["round"] for entry in json.loads(folder.text("environment.json"))["resumed"]] == [7]

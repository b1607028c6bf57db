"""What is wrong with a checkpoint is said by name, the last good one is used, and a resumed run is the unbroken one.

Checkpoints are taken apart and put together with the format's own library, as a stranger would do it.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import METHODS, TINY, change_parts, checkpoints, read_parts, settings, stopped_run, write_parts
from sampling import some_quick
from support import raises
from support.bits import have_same_state

import fleetfit as ff
from fleetfit.cli import main
from fleetfit.errors import RunError

Change = Callable[[dict[str, torch.Tensor], Any], None]
LOST = "lost by compression"  # as the format names it


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Finished runs by name, each made once."""
    folders: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("runs") / "run"
            ff.run(settings(name), out=folders[name], progress=False)
        return folders[name]

    return run


def copy_folder(source: Path, target: Path) -> Path:
    """Return a copy of a folder."""
    shutil.copytree(source, target / "copy")
    return target / "copy"


def remove_older_checkpoints(folder: Path) -> Path:
    """Remove all checkpoints but the newest, and return it."""
    *others, newest = checkpoints(folder)
    for other in others:
        other.unlink()
    return newest


def read_metrics_without_times(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("seconds", "seconds_of")} for line in lines]


# ---- the same bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", some_quick(list(METHODS), ["lora", *list(METHODS)[:3]]))
def test_a_resumed_run_has_the_files_of_the_unbroken_one(
    name: str, finished: Callable[[str], Path], tmp_path: Path
) -> None:
    unbroken, folder = finished(name), tmp_path / "run"
    stopped_run(settings(name), folder, after=1)
    stopped = {path.name for path in checkpoints(folder)}
    ff.resume(folder)
    assert stopped <= {"round-000001.safetensors"}, "stopped within the first round or right after it"
    assert [p.name for p in checkpoints(folder)] == [p.name for p in checkpoints(unbroken)]
    for ours, theirs in zip(checkpoints(folder), checkpoints(unbroken), strict=True):
        assert ours.read_bytes() == theirs.read_bytes(), ours.name
    assert read_metrics_without_times(folder) == read_metrics_without_times(unbroken)
    for file in ("config.toml", "plan.toml", "fleet.json"):
        assert (folder / file).read_bytes() == (unbroken / file).read_bytes()


def test_the_methods_here_remember(finished: Callable[[str], Path]) -> None:
    """What these runs keep: states under prefixes, memories of clients that are states, tables, running losses."""
    names = {name for run in METHODS for name in read_parts(checkpoints(finished(run))[-1])[0]}
    for start in ("server/state/level1/", "server/state/exit1/", "server/memory/h/", "server/memory/choice/",
                  "server/memory/adaptivefl/", "server/memory/movement/", "statistics/2/"):  # fmt: skip
        assert any(name.startswith(start) for name in names), start
    for end in ("/gradient/state/stem.weight", "/losses"):
        assert any(name.startswith("clients/") and name.endswith(end) for name in names), end
    assert any(LOST in name for name in names)
    assert (finished("lora") / "base.safetensors").is_file()


@pytest.mark.parametrize("name", METHODS)
def test_an_undamaged_checkpoint_is_used(name: str, finished: Callable[[str], Path]) -> None:
    assert ff.load(finished(name)).server.round == 3


# ---- no checkpoint -------------------------------------------------------------------------------------------------


def sentence(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Run a verb that must refuse, and return what it says."""
    with pytest.raises(SystemExit) as caught:
        main([str(a) for a in arguments])
    output = capsys.readouterr().err
    assert caught.value.code == 2, output
    lines = [line for line in output.splitlines() if not line.startswith("    fleetfit ")]  # a command to copy
    assert output.startswith("fleetfit: ") and len(lines) == 1, output
    return output


@pytest.mark.parametrize(
    ("verb", "how"), [("eval", "removed"), ("predict", "emptied"), ("export", "cut"), ("calibrate", "folder removed")]
)
def test_without_a_checkpoint_there_is_no_model(
    verb: str, how: str, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(finished("scalefl, directions"), tmp_path)
    for path in checkpoints(folder):
        if how == "emptied":
            path.write_bytes(b"")
        elif how == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            path.unlink()
    if how == "folder removed":
        (folder / "checkpoints").rmdir()
    message = sentence(capsys, verb, folder, *(["--out", tmp_path / "out"] if verb == "export" else []))
    assert str(folder) in message
    assert not (tmp_path / "out").exists()


def test_a_run_whose_checkpoints_are_gone_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor is it called finished; a run that was stopped before its first checkpoint begins again."""
    folder = tmp_path / "run"
    stopped_run(settings(), folder, after=3)
    capsys.readouterr()
    for path in checkpoints(folder):
        path.unlink()
    before = (folder / "metrics.jsonl").read_bytes()
    assert "checkpoints" in sentence(capsys, "resume", folder)
    assert (folder / "metrics.jsonl").read_bytes() == before
    (folder / "metrics.jsonl").write_bytes(before.splitlines(keepends=True)[0])
    assert [r["round"] for r in ff.resume(folder).metrics] == [1, 2, 3]


# ---- what does not fit ---------------------------------------------------------------------------------------------


def transpose(name: str) -> Change:
    def change(tensors: dict[str, torch.Tensor], structure: Any) -> None:
        tensors[name] = tensors[name].t().contiguous()

    return change


def replace(name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(tensors: dict[str, torch.Tensor], structure: Any) -> None:
        tensors[name] = value(tensors[name])

    return change


def missing(name: str) -> Change:
    """Take a tensor out of file and structure."""

    def change(tensors: dict[str, torch.Tensor], structure: Any) -> None:
        del tensors[name]
        remove(structure, name)

    return change


def remove(structure: Any, name: str) -> None:
    for key, value in list(
        structure.items()
        if isinstance(structure, dict)
        else enumerate(structure)
        if isinstance(structure, list)
        else ()
    ):
        if value == {"$tensor": name}:
            del structure[key]
        else:
            remove(value, name)


def surplus(name: str, *place: str) -> Change:
    def change(tensors: dict[str, torch.Tensor], structure: Any) -> None:
        tensors["more"] = torch.ones(3)
        for key in place:
            structure = structure[key]
        structure[name] = {"$tensor": "more"}

    return change


def nan(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.view(-1)[0] = float("nan")
    return copy


def shorter(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def find_client_tensor(folder: Path, end: str) -> str:
    """Return the name of the first tensor of a client that ends like this."""
    return min(n for n in read_parts(checkpoints(folder)[-1])[0] if n.startswith("clients/") and n.endswith(end))


WEIGHT = "server/state/blocks.0.0.weight"
STATES = {
    "transposed": ("scalefl, directions", transpose(WEIGHT), "has shape"),
    "shorter": ("scalefl, directions", replace("server/state/stem.bias", shorter), "has shape"),
    "another dtype": ("scalefl, directions", replace(WEIGHT, torch.Tensor.double), "is torch.float64"),
    "not a number": ("scalefl, directions", replace(WEIGHT, nan), "not finite"),
    "infinite": ("scalefl, directions", replace(WEIGHT, lambda t: t / 0), "not finite"),
    "missing": ("scalefl, directions", missing(WEIGHT), "is missing"),
    "surplus": ("scalefl, directions", surplus("stem.more", "server", "state"), "not a tensor of this model"),
    "under a prefix": ("scalefl, directions", surplus("a/stem.bias", "server", "state"), "is missing"),
    "of a level": ("decoupled", transpose("server/state/level1/blocks.0.0.weight"), "has shape"),
    "of no level": ("decoupled", surplus("level9/stem.bias", "server", "state"), "not one of the 3 levels"),
    "not of the level": ("decoupled", surplus("level1/heads.2.bias", "server", "state"), "level1/heads.2.bias"),
    "missing of a level": ("decoupled", missing("server/state/level1/stem.bias"), "is missing"),
    "of an exit": ("inclusivefl with fedadam", replace("server/state/exit1/blocks.0.0.bias", shorter), "has shape"),
    "missing of an exit": ("inclusivefl with fedadam", missing("server/state/exit1/blocks.0.0.bias"), "is missing"),
    "the optimizer's": ("inclusivefl with fedadam", replace("server/memory/first/stem.bias", nan), "not finite"),
    "movements": ("inclusivefl with fedadam", replace("server/memory/movement/1/block:0.bias", shorter), "0.bias"),
    "h": ("feddyn, lost by compression, losses", replace("server/memory/h/stem.bias", shorter), "has shape"),
    "statistics": ("decoupled", replace("statistics/0/blocks.0.1.mean", shorter), "has shape"),
    "variances": ("decoupled", replace("statistics/0/blocks.0.1.var", lambda t: t - 1e9), "below 0"),
    "tables": ("adaptivefl", replace("server/memory/adaptivefl/curiosity", shorter), "adaptivefl"),
    "directions": ("scalefl, directions", replace("server/memory/choice/directions", shorter), "direction"),
}  # fmt: skip


@pytest.mark.parametrize("what", STATES)
def test_what_does_not_fit_is_named(
    what: str, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change, reason = STATES[what]
    folder = copy_folder(finished(name), tmp_path)
    change_parts(remove_older_checkpoints(folder), change)
    message = sentence(capsys, "eval", folder)
    assert reason in message and "/" in message.partition("safetensors: ")[2], message


@pytest.mark.parametrize("end", ["gradient/state/stem.weight", "lost by compression/state/stem.weight"])
@pytest.mark.parametrize("value", [shorter, nan, torch.Tensor.half])
def test_memories_that_are_states_fit_their_sub_models(
    end: str, value: Any, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(finished("feddyn, lost by compression, losses"), tmp_path)
    name = find_client_tensor(folder, end)
    change_parts(remove_older_checkpoints(folder), replace(name, value))
    (folder / "summary.json").unlink()
    assert f'"{name}"' in sentence(capsys, "resume", folder)


def test_running_losses_belong_to_exits(
    finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(finished("reefl"), tmp_path)
    name = find_client_tensor(folder, "/losses")
    change_parts(remove_older_checkpoints(folder), replace(name, lambda t: torch.cat([t, t])))
    assert "losses " in sentence(capsys, "eval", folder)


BASES = {
    "transposed": (transpose, "has shape"), "not a number": (lambda name: replace(name, nan), "not finite"),
    "missing": (missing, "is missing"), "surplus": (lambda name: surplus("more"), "not a tensor of this model"),
    "gone": (None, "is missing"),
}  # fmt: skip


@pytest.mark.parametrize("what", BASES)
def test_what_is_never_trained_fits_too(
    what: str, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, reason = BASES[what]
    folder = copy_folder(finished("lora"), tmp_path)
    file = folder / "base.safetensors"
    name = min(
        n for n, tensor in read_parts(file)[0].items() if tensor.dim() == 2 and tensor.shape[0] != tensor.shape[1]
    )
    if make is None:
        file.unlink()
    else:
        change_parts(file, make(name))
    message = sentence(capsys, "eval", folder)
    assert "base.safetensors" in message and reason in message


# ---- structures ----------------------------------------------------------------------------------------------------


NESTS: dict[str, Any] = {
    "deep": "[" * 50_000 + "]" * 50_000,
    "deep tables": '{"a":' * 150 + "1" + "}" * 150,
    "no JSON": "{",
    "long number": '{"server": ' + "9" * 10_000 + "}",
    "a list": "[1, 2]",
    "nothing": "null",
    "no server": {"clients": {}, "statistics": None},
    "a server without a state": {"server": {"round": 3, "memory": None}, "clients": {}, "statistics": None},
    "an unknown word": {"$what": 1},
    "a tensor that is not there": {"server": {"$tensor": "no"}},
    "a tensor without a name": {"server": {"$tensor": [1]}},
    "pairs of three": {"$d": [[1, 2, 3]]},
    "a key that is none": {"$d": [[[1], 2]]},
    "a table as a number": {"$d": 3},
}


@pytest.mark.parametrize("what", NESTS)
def test_a_structure_of_wrong_types_is_a_sentence(
    what: str, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(finished("scalefl, directions"), tmp_path)
    newest = remove_older_checkpoints(folder)
    write_parts(newest, read_parts(newest)[0], NESTS[what])
    assert newest.name in sentence(capsys, "eval", folder)


VALUES: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "round as text": ("adaptivefl", lambda n: n["server"].update(round="3"), "got '3'"),
    "round as truth": ("adaptivefl", lambda n: n["server"].update(round=True), "got True"),
    "round of another file": ("adaptivefl", lambda n: n["server"].update(round=2), "it is of round 2"),
    "huge round": ("adaptivefl", lambda n: n["server"].update(round=10**400), "server/round"),
    "memory as a list": ("adaptivefl", lambda n: n["server"].update(memory=[1]), "server/memory"),
    "tables as a number": ("adaptivefl", lambda n: n["server"]["memory"].update(adaptivefl=3), "adaptivefl"),
    "clients as a list": ("reefl", lambda n: n.update(clients=[]), "got a list"),
    "a client by name": ("reefl", lambda n: n["clients"].update(me={"version": 1, "memory": None}), "clients/me"),
    "a client too many": ("reefl", lambda n: n["clients"].update({"6": {"version": 1, "memory": None}}), "clients/6"),
    "a version to come": ("reefl", lambda n: n["clients"].update({"5": {"version": 9, "memory": None}}), "to come"),
    "a version as text": ("reefl", lambda n: n["clients"].update({"5": {"version": "", "memory": 0}}), "version"),
    "statistics as text": ("decoupled", lambda n: n.update(statistics="x"), "statistics"),
    "statistics of no level": (
        "decoupled", lambda n: n["statistics"].update({"$d": [[10**9, {}]]}), "statistics/1000000000"
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", VALUES)
def test_a_value_of_a_wrong_type_is_a_sentence(
    what: str, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, change, message = VALUES[what]
    folder = copy_folder(finished(name), tmp_path)
    newest = remove_older_checkpoints(folder)
    tensors, structure = read_parts(newest)
    change(structure)
    text = json.dumps(structure)
    write_parts(newest, {n: t for n, t in tensors.items() if json.dumps(n) in text}, structure)
    assert message in sentence(capsys, "eval", folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("channels", {"a": [0, 99]}), ("channels", {"what": [0]}), ("channels", [1]), ("exits", [7]), ("exits", [2, 1]),
     ("channels", {"a": [1.5]}), ("channels", {"a": []}), ("exits", "1")],
)  # fmt: skip
def test_a_memory_names_a_sub_model_of_this_model(
    key: str, value: Any, finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_folder(finished("feddyn, lost by compression, losses"), tmp_path)
    newest = remove_older_checkpoints(folder)

    def change(tensors: dict[str, torch.Tensor], structure: Any) -> None:
        memory = structure["clients"][min(structure["clients"])]["memory"]
        memory[LOST][key] = value

    change_parts(newest, change)
    assert LOST in sentence(capsys, "eval", folder)


# ---- checksums -----------------------------------------------------------------------------------------------------


def test_files_without_a_checksum_are_read(finished: Callable[[str], Path], tmp_path: Path) -> None:
    unbroken, folder = finished("decoupled"), tmp_path / "run"
    stopped_run(settings("decoupled"), folder, after=2)
    for path in checkpoints(folder):
        change_parts(path, lambda tensors, structure: None)
    assert b"sha256" not in checkpoints(folder)[-1].read_bytes()
    ff.resume(folder)
    assert checkpoints(folder)[-1].read_bytes() == checkpoints(unbroken)[-1].read_bytes()


@pytest.mark.parametrize("place", [3, 9, 60, 200, 0.2, 0.5, 0.9, -1])
def test_one_flipped_bit_is_found_wherever_it_is(
    place: float, finished: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the state before is used, with a line that says so."""
    folder = copy_folder(finished("decoupled"), tmp_path)
    newest = checkpoints(folder)[-1]
    content = bytearray(newest.read_bytes())
    content[int(place * len(content)) if isinstance(place, float) else place] ^= 4
    newest.write_bytes(content)
    assert ff.load(folder).server.round == 2
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fleetfit"]
    assert "Skipped" in line and "round-000003.safetensors" in line and "round 2." in line


def test_a_run_goes_on_from_the_last_good_checkpoint(
    finished: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The damaged one is of round 2: rounds 2 and 3 are trained again, and everything is as if nothing had been."""
    folder = tmp_path / "run"
    stopped_run(settings("decoupled"), folder, after=2)
    newest = checkpoints(folder)[-1]
    content = bytearray(newest.read_bytes())
    content[-10] ^= 1
    newest.write_bytes(content)
    ff.resume(folder)
    assert "round-000002.safetensors" in caplog.text and "round 1." in caplog.text
    unbroken = finished("decoupled")
    assert checkpoints(folder)[-1].read_bytes() == checkpoints(unbroken)[-1].read_bytes()
    assert read_metrics_without_times(folder) == read_metrics_without_times(unbroken)


def test_swapped_checkpoints_are_told_apart(finished: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy_folder(finished("decoupled"), tmp_path)
    first, second = checkpoints(folder)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)
    with raises(RunError, "round-000003.safetensors", " 2", path=folder / "checkpoints"):
        _ = ff.load(folder).server


def test_reports_that_are_gone_are_missed(
    finished: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint whose rounds have no reports is not gone on from: the summary would count too little."""
    folder = copy_folder(finished("decoupled"), tmp_path)
    (folder / "summary.json").unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(lines[0])
    assert " 1 rounds" in sentence(capsys, "resume", folder)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
    assert [report["round"] for report in ff.resume(folder).metrics] == [1, 2, 3]


# ---- more rounds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then", "every"), [(1, 2, 1), (2, 5, 1), (3, 4, 2)])
def test_a_finished_run_trains_further_rounds_of_its_file(first: int, then: int, every: int, tmp_path: Path) -> None:
    """With a constant rate it ends in the bits of the run that had them from the start; fewer rounds change nothing."""
    tables = {**TINY, "checkpoint": {"every": every}, "local": {**TINY["local"], "schedule": {"kind": "constant"}}}
    run = ff.run({**tables, "rounds": first}, out=tmp_path / "run", progress=False)
    lines = (run.folder / "metrics.jsonl").read_text()
    config = run.folder / "config.toml"
    config.write_text(config.read_text().replace(f"\nrounds = {first}\n", f"\nrounds = {then}\n"))
    longer = ff.resume(run.folder, progress=False)
    assert longer.finished and longer.summary["rounds"] == then == len(longer.metrics)
    assert (run.folder / "metrics.jsonl").read_text().startswith(lines)
    assert have_same_state(longer, ff.run({**tables, "rounds": then}, out=tmp_path / "whole", progress=False))
    config.write_text(config.read_text().replace(f"\nrounds = {then}\n", "\nrounds = 1\n"))
    assert ff.resume(run.folder, progress=False).summary["rounds"] == then

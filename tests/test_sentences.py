"""Sentences: the program's name stands once before each, and no address of an object is in one."""

import io
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import run_verb

import fleetfit as ff
from fleetfit.data.files.images import images
from fleetfit.data.files.memory import TableSplits, read_memory
from fleetfit.data.files.table import make_data_in_memory, table
from fleetfit.errors import ConfigError, DataError, format_exception, one_line

FAST: dict[str, Any] = {"rounds": 2, "data": {"name": "digits", "partition": {"clients": 4}},
                        "model": {"name": "mlp", "hidden": 16}, "fleet": {"tolerance": 0.3},
                        "local": {"max_steps": 1}}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> ff.Run:
    return ff.run({**FAST, "checkpoint": {"every": 1, "keep": 2}}, out=tmp_path / "run")


def spoil(run: ff.Run, kind: str) -> None:
    """Have something said of a run folder when it is opened."""
    if kind == "edited":
        with (run.folder / "config.toml").open("a") as file:
            file.write("# a comment\n")
    elif kind == "checkpoint":
        newest = max((run.folder / "checkpoints").iterdir())
        newest.write_bytes(newest.read_bytes()[:-9])
    elif kind == "data":
        place = run.folder / "environment.json"
        payload = json.loads(place.read_text())
        payload["data"]["samples"] = 3
        place.write_text(json.dumps(payload))
        (run.folder / "summary.json").unlink()


@pytest.mark.parametrize("kind", ["edited", "checkpoint"])
def test_the_program_s_name_stands_once(run: ff.Run, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    spoil(run, kind)
    err = run_verb("eval", run.folder).err
    assert "fleetfit: " in err and "fleetfit: fleetfit" not in err
    ours = [record.getMessage() for record in caplog.records if record.name == "fleetfit"]
    assert ours and not any(message.startswith("fleetfit:") for message in ours)


def test_from_python_messages_have_no_name_of_their_own(run: ff.Run, caplog: pytest.LogCaptureFixture) -> None:
    """The logger's name says whose they are; a node's handler and the command line put it before them."""
    from fleetfit.fleet.logs import _StderrHandler

    spoil(run, "data")
    ff.resume(run.folder, progress=False)
    (record,) = [record for record in caplog.records if "data have changed" in record.getMessage().lower()]
    assert not record.getMessage().startswith("fleetfit")
    assert _StderrHandler().format(record).count("fleetfit: ") == 1


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n broken", b"GIF89a"])
@pytest.mark.parametrize("lazy", [False, True])
def test_no_address_of_an_object_is_in_a_sentence(tmp_path: Path, content: bytes, lazy: bool) -> None:
    for label in "ab":
        (tmp_path / "set" / label).mkdir(parents=True)
        (tmp_path / "set" / label / "0.png").write_bytes(content)

    def read() -> None:
        data = images(str(tmp_path / "set"), size=8, lazy=lazy)
        data.batch(data.split("train"))

    with pytest.raises(DataError) as caught:
        read()
    assert "0x" not in str(caught.value) and "BytesIO" not in str(caught.value)


def test_addresses_of_other_objects() -> None:
    class Thing:
        pass

    stream, thing = io.BytesIO(), Thing()
    assert str(ConfigError(f"cannot read {stream!r}; correct it")) == "cannot read; correct it"
    for sentence in (
        str(ConfigError(f"got {thing}.")),
        one_line(f"got {thing}."),
        format_exception(ConfigError(f"got {thing}.")),
    ):
        assert sentence.startswith("got <") and sentence.endswith("Thing object>.") and "0x" not in sentence
    assert "0x" not in format_exception(ValueError(f"{stream!r} and {thing!r}"))
    assert str(ConfigError("0x7f is kept")) == "0x7f is kept"


@pytest.mark.parametrize("mark", ["NA", "n/a", "None", "?", ""])
def test_rows_whose_label_counts_as_missing_are_mentioned(tmp_path: Path, mark: str) -> None:
    rows = [f"{i},{label}" for i, label in enumerate(["FR", "DE", mark] * 10)]
    (tmp_path / "t.csv").write_text("size,country\n" + "\n".join(rows) + "\n")
    data = table(str(tmp_path / "t.csv"))
    (note,) = [note for note in data.notes if "left out" in note]
    assert note.startswith('10 rows without "country"') and "NA" in note and data.class_names == ("DE", "FR")


def test_frames_say_so_too() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"size": np.arange(30.0), "country": ["FR", "DE", "NA"] * 10})
    memory = read_memory(frame)
    assert isinstance(memory, TableSplits)
    data = make_data_in_memory(memory.splits, "country")
    assert any("10 rows" in note and "NA" in note for note in data.notes)


def test_a_faulty_log_call_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("fleetfit").warning("bad %s %d", "x")
    assert caplog.records[-1].getMessage() == "bad %s %d ('x',)"
    logging.getLogger("fleetfit").warning("all of it: 100%")
    assert caplog.records[-1].getMessage() == "all of it: 100%"

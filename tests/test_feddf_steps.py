"""`experiments.feddf_steps`: one round of FedDF with more and more steps, from the same state."""

from pathlib import Path

import pytest

import fleetfit as ff
from experiments.feddf_steps import main

TEXT = """
rounds = 9
[data]
name = "digits"
[model]
name = "cnn"
[fleet]
tolerance = 0.2
groups = [{ budget = 0.25 }, { budget = 1.0 }]
[local]
epochs = 1
lr = 0.05
schedule = { kind = "step", at = [1], factor = 0.1 }
[evaluate]
every = 3
[[compare.setting]]
label = "first"
data = { name = "digits", partition = { kind = "iid", clients = 8 }, server = { name = "digits" } }
[[compare.setting]]
label = "second"
data = { name = "nowhere" }
[[compare.row]]
method.name = "fedavg"
"""


def test_more_steps_begin_where_fewer_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.toml").write_text(TEXT)
    out = tmp_path / "out"

    def lines(*steps: str, lr: str = "") -> list[list[str]]:
        main(
            [
                "--file",
                str(tmp_path / "file.toml"),
                "--seed",
                "3",
                "--rounds",
                "1",
                *(["--lr", lr] if lr else []),
                "--steps",
                *steps,
                "--out",
                str(out),
            ]
        )
        output = capsys.readouterr().out.splitlines()
        return [line.split() for line in output if len(line.split()) == 5 and line.split()[0].isdecimal()]

    none, few, more = lines("0", "10", "20")
    assert none[:3] == ["0", "-", "-"] and few[1] == more[1], "the mean of the round is the same"
    assert float(few[2]) < float(few[1]) and float(more[2]) < float(more[1])
    folder = out / "file" / "seed-3-after-1"
    runs = {name: ff.load(folder / name) for name in ("heterofl", "steps-0", "steps-10")}
    assert [len(run.metrics) for run in runs.values()] == [1, 1, 1]
    assert Path(runs["steps-10"].experiment.init_from) == (folder / "heterofl").resolve()
    assert {run.experiment.seed for run in runs.values()} == {3}
    before = (folder / "steps-10" / "metrics.jsonl").stat().st_mtime_ns
    assert lines("10") == [few]
    assert (folder / "steps-10" / "metrics.jsonl").stat().st_mtime_ns == before, "what is finished is not run again"
    ((_, slower, *_),) = lines("10", lr="0.001")
    assert slower != few[1], "another rate is another round"

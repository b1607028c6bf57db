"""ScaleFL's promise on devices (4.5): what each level of finished runs is once exported, for `make results`.

    python -m experiments.devices runs/COMPARISON/scalefl/cifar-10-alpha-100/seed-*
        --setting "CIFAR-10, alpha = 100" --record experiments/results

Give the run folders of one row in one setting, one for each seed. Every level is exported as an ONNX graph and run by
onnxruntime, one sample at a time on one thread; the levels take turns, and `latency_ms` is the median of 1,000 passes.
Accuracy is on the whole test set, the full model's also when samples leave early for an average of three quarters of
its multiply-adds, calibrated on validation data with temperatures. On a machine that does nothing else.
"""

import argparse
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch

import fleetfit as ff
from benchmarks.ship import TURNS, Work, loader, quartiles_ms, stopping
from fleetfit.api.inference import prepare_export
from fleetfit.config.toml import read_toml
from fleetfit.inference.export.onnx import open_session
from fleetfit.report.results import format_results
from fleetfit.runs.environment import describe_environment
from fleetfit.runs.schema import ComparisonResults, CurvesRecord, RunResult

FILE = "experiments/small/devices.toml"  # the name by which experiments/claims.toml asks for these numbers
EARLY = 0.75


def main(given: list[str] | None = None) -> None:
    """Measure the runs, and write `devices.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="finished run folders, one for each seed")
    parser.add_argument("--row", default="ScaleFL", help="what the row is called")
    parser.add_argument("--setting", default="", help="what the setting is called")
    parser.add_argument("--record", type=Path, required=True, help="the folder of results")
    parser.add_argument("--turns", type=int, default=TURNS, help="passes that a latency is the median of")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    opened = [ff.load(folder) for folder in options.runs]
    seeds = [run.experiment.seed for run in opened]
    if len(set(seeds)) < len(seeds):
        parser.error(f"one run for each seed of one row in one setting, got the seeds {', '.join(map(str, seeds))}")
    runs = [measured(run, options.row, options.setting, options.turns) for run in opened]
    here = describe_environment()  # where it is measured; where the runs were trained stands in their own results
    versions = {name: here[name] for name in ("fleetfit", "torch", "python")}
    machine = {"processor": here["processor"], "cores": here["processors"]}
    table = read_toml(opened[0].folder / "config.toml")
    settings = {key: table[key] for key in ("data", "model", "fleet", "local", "cohort")}
    found = ComparisonResults(
        name="devices", file=FILE, versions=versions, commit=here["fleetfit_commit"], machine=machine,
        against=options.row, settings=settings, runs=runs,
    )  # fmt: skip
    options.record.mkdir(parents=True, exist_ok=True)
    (options.record / "devices.json").write_text(format_results(found))


def measured(run: ff.Run, row: str, setting: str, turns: int) -> RunResult:
    """Return what the levels of a run are on this machine: parameters, milliseconds, percent."""
    names = [level.name for level in run.assembly.federation.levels]
    full, final = names[-1], {}
    with tempfile.TemporaryDirectory(prefix="devices-") as place:
        folders = {name: Path(place) / name for name in names}
        for name in names:
            if name == full and len(run.model(name).exits) > 1:
                run.calibrate(name, budget=EARLY, temperature=True)
            run.export(folders[name], name)
        x, y = (each.numpy() for each in prepare_export(run, full, None).samples("test", 10**6))
        for name in names:
            final[f"accuracy of level {name}"], early, _ = stopping(folders[name], x, y)
        final["accuracy with early exits"] = early
        works: dict[tuple[str, str], Work] = {(name, "whole"): whole(folders[name]) for name in names}
        model = loader(folders[full])
        works |= {(full, "all"): lambda sample: model.predict(sample, stop=False),
                  (full, "early"): lambda sample: model.predict(sample, stop=True)}  # fmt: skip
        times = quartiles_ms(works, x[:256], turns)
    final = {name: round(100 * share, 4) for name, share in final.items()}
    final |= {f"latency_ms of level {name}": round(float(times[name, "whole"][1]), 4) for name in names}
    final |= {f"latency_ms with {said}": round(float(times[full, key][1]), 4)
              for key, said in (("all", "no early exits"), ("early", "early exits"))}  # fmt: skip
    final |= {f"parameters of level {level['level']}": level["parameters"] for level in run.summary["levels"]}
    digest = sha256((run.folder / "config.toml").read_bytes()).hexdigest()
    rounds, speed = run.summary["rounds"], run.experiment.engine.speed
    return RunResult(
        row=row, setting=setting, seed=run.experiment.seed, rounds=rounds, seconds=0.0, speed=speed, digest=digest,
        final=final, curves=CurvesRecord(round=[]),
    )  # fmt: skip


def whole(folder: Path) -> Work:
    """Return one pass of a level's whole graph."""
    opened = open_session(folder / "model.onnx")
    key = opened.get_inputs()[0].name
    return lambda sample: opened.run(None, {key: np.ascontiguousarray(sample)})


if __name__ == "__main__":
    main()

"""What users type: exported names, signatures, verbs with options, keys of a run file. A change goes into CHANGELOG."""

import inspect
import subprocess
import sys
from typing import Any, get_args

import pydantic
import pytest
import typer
from support import raises

import fleetfit
from fleetfit import errors
from fleetfit.cli.main import make_app
from fleetfit.config.schema import Experiment
from fleetfit.errors import ConfigError
from fleetfit.values.local import Constant, Cosine, Exponential, Step

NAMES = {
    "Aggregate",
    "Architecture",
    "Axis",
    "Callback",
    "Comparison",
    "ConfigError",
    "Data",
    "DataError",
    "Device",
    "ExitModel",
    "Experiment",
    "Failure",
    "Federation",
    "FleetFitError",
    "Job",
    "Level",
    "Loss",
    "Machine",
    "Method",
    "MissingExtra",
    "ModelError",
    "Plan",
    "PlanError",
    "Problem",
    "RemovedCheckpoints",
    "Run",
    "RunError",
    "RunInfo",
    "RunStart",
    "Server",
    "State",
    "Submodel",
    "Targets",
    "Update",
    "Wishes",
    "alias",
    "block",
    "blocked",
    "check_layout",
    "clear_checkpoints",
    "compare",
    "derive",
    "exit_after",
    "extract",
    "interleaved",
    "list_runs",
    "load",
    "load_comparison",
    "outputs",
    "plan",
    "product",
    "profile",
    "resume",
    "run",
    "scalars",
    "segments",
    "split_levels",
    "take_mean",
    "write_report",
}

SIGNATURES = {
    "run": "source, *, out, overrides, on_round, callbacks, progress, **sections",
    "resume": "folder, *, on_round, callbacks, progress, **sections",
    "load": "folder, **sections",
    "derive": "module, data, *, exits, head, weights, axes, progress",
    "compare": "file, *, out, overrides, on_run, jobs, against, record, on_progress, progress, **sections",
}

RUN = {"accuracy", "assembly", "best_exit", "calibrate", "checkpoint", "columns", "evaluate", "export", "finished",
       "folder", "metrics", "model", "notes", "plan", "predict", "predict_exits", "server", "summary"}  # fmt: skip

OPTIONS = {
    "run": ["FILE", "--out", "--set", "--fast", "--quiet/-q"],
    "resume": ["FOLDER", "--quiet/-q"],
    "demo": ["--out", "--jobs/-j", "--write", "--set", "--quiet/-q"],
    "watch": ["FOLDER", "--once"],
    "compare": ["FILE", "--out", "--jobs/-j", "--against", "--record", "--set", "--fast", "--quiet/-q"],
    "plan": [
        "FILE", "--model", "--budgets", "--cost", "--tolerance", "--mode", "--levels", "--exits", "--widths",
        "--classes", "--input-shape", "--strict", "--also", "--batch-size", "--latency",
        "--passes", "--threads", "--save", "--set",
    ],
    "report": ["FOLDERS", "--out"],
    "profile": [
        "FILE", "--model", "--budgets", "--cost", "--input-shape", "--classes", "--task", "--vocabulary", "--step-s",
        "--latency-s", "--memory", "--energy-j", "--limit-s", "--device", "--threads", "--out", "--force", "--set",
        "--fast",
    ],
    "predict": [
        "FOLDER", "--level", "--adaptive", "--stop", "--best-exit", "--client", "--data", "--split", "--batch-size",
        "--out",
    ],
    "calibrate": [
        "FOLDER", "--level", "--budget", "--cost", "--anytime", "--measure", "--temperature", "--client", "--data",
        "--json",
    ],
    "export": [
        "FOLDER", "--out", "--level", "--onnx", "--int8", "--static-int8", "--transformers", "--executorch", "--data",
        "--prior", "--push", "--public",
    ],
    "eval": ["FOLDER", "--data", "--split", "--batch-size", "--json"],
    "pictures": ["FOLDER", "--out", "--format"],
    "list": ["KIND", "NAME"],
    "runs": ["FOLDER", "--clear-checkpoints", "--last", "--unfinished", "--yes/-y", "--json"],
    "check-model": ["NAME", "--classes", "--input-shape", "--task", "--set"],
    "flower": [],
    "flower init": ["FOLDER", "--run"],
    "flower certificates": ["FOLDER", "--host", "--days"],
    "flower key": ["FILE"],
    "flower member": ["FILE", "--authority"],
    "flower node": ["FILE", "--superlink", "--ca", "--key", "--insecure", "--listen", "--cold", "--check"],
    "flower resume": ["FOLDER", "SUPERLINK"],
}  # fmt: skip

KEYS = {
    "": ["name", "seed", "rounds", "start", "callbacks"],
    "data": ["name", "partition", "server", "transform"],
    "data.partition": ["kind", "clients", "seed"],
    "data.server": ["name"],
    "model": ["name", "derive"],
    "model.derive": ["exits", "head", "weights", "axes"],
    "peft": ["name"],
    "fleet": [
        "cost",
        "tolerance",
        "levels",
        "split",
        "reports_budget",
        "drift",
        "slow",
        "jitter",
        "availability",
        "links",
        "reports_labels",
        "groups",
    ],
    "fleet.drift": ["sd", "jump", "low"],
    "fleet.slow": ["share", "factor", "link"],
    "fleet.availability": ["share", "spread", "rounds", "day", "leave", "trace"],
    "fleet.links": ["lost_down", "lost_up", "repeated"],
    "fleet.groups": ["budget", "share", "tolerance", "name", "profile"],
    "method": ["name", "plus", "hooks"],
    "local": [
        "optimiser",
        "epochs",
        "batch_size",
        "lr",
        "momentum",
        "nesterov",
        "betas",
        "eps",
        "weight_decay",
        "clip_norm",
        "clip_value",
        "max_steps",
        "patience",
        "check_every",
        "compress",
        "schedule",
        "schedule_in_round",
    ],
    "cohort": ["choose", "fraction", "count", "deadline_s", "late", "quorum", "over_selection"],
    "attack": ["kind", "share", "among"],
    "secure": ["minimum", "threshold", "range", "bits"],
    "privacy": ["clip", "noise", "epsilon", "delta", "key_file"],
    "engine": ["name", "speed", "precision", "memory_format", "compile", "features_bytes"],
    "evaluate": [
        "every",
        "between",
        "batch_size",
        "split",
        "norms",
        "statistics_samples",
        "clients",
        "samples",
        "whole",
        "metrics",
        "prior",
    ],
    "evaluate.between": ["clients", "client_samples", "samples", "statistics_samples"],
    "checkpoint": ["every", "keep"],
    "compare": [
        "row",
        "setting",
        "grid",
        "tune",
        "tune_on",
        "tune_seeds",
        "columns",
        "target",
        "target_on",
        "against",
        "differs",
        "smallest",
        "same_recipe",
    ],
    "recorded": ["latencies", "computing", "memory_format", "derived"],
}


def test_exported_names() -> None:
    assert set(fleetfit.__all__) == NAMES
    for name in NAMES:
        assert getattr(fleetfit, name) is not None
    assert set(dir(fleetfit)) == NAMES | {"__version__"}


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    assert not hasattr(fleetfit, "trian")


def test_signatures() -> None:
    for name, expected in SIGNATURES.items():
        parts, keyword_only = [], False
        for parameter in inspect.signature(getattr(fleetfit, name)).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                parts.append("*")
                keyword_only = True
            parts.append(f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name)
        assert ", ".join(parts) == expected, name


def test_members_of_a_run() -> None:
    assert {name for name in vars(fleetfit.Run) if not name.startswith("_")} == RUN


def test_verbs_and_their_options() -> None:
    command: Any = typer.main.get_command(make_app())
    options = {}
    inner = command.commands["flower"].commands
    for name, verb in {**command.commands, **{f"flower {name}": verb for name, verb in inner.items()}}.items():
        options[name] = [
            "/".join(sorted(p.opts, key=len, reverse=True)) if p.param_type_name == "option" else p.name.upper()
            for p in verb.params
            if p.name != "help"
        ]
    assert options == OPTIONS
    assert [option for p in command.params for option in p.opts if p.name != "help"] == [
        "--version", "--traceback", "--log", "--install-completion", "--show-completion",
    ]  # fmt: skip


def test_every_verb_and_option_has_a_help_text() -> None:
    command: Any = typer.main.get_command(make_app())
    for verb in (*command.commands.values(), *command.commands["flower"].commands.values()):
        assert verb.help
        for parameter in verb.params:
            if parameter.param_type_name == "option":
                assert parameter.help, (verb.name, parameter.name)


def test_keys_of_a_run_file() -> None:
    sections = {name: f.annotation for name, f in Experiment.model_fields.items() if _is_section(f.annotation)}
    keys = {"": [name for name in Experiment.model_fields if name not in sections]}
    for name, section in sections.items():
        keys[name] = list(section.model_fields)
        for key, field in section.model_fields.items():
            inner = next((t for t in (field.annotation, *get_args(field.annotation)) if _is_section(t)), None)
            if inner is not None and key != "schedule":
                keys[f"{name}.{key}"] = list(inner.model_fields)
    assert keys == KEYS


def test_keys_of_schedules() -> None:
    assert {
        s.model_fields["kind"].annotation: [*s.model_fields][1:] for s in (Constant, Step, Cosine, Exponential)
    } == {
        Constant.model_fields["kind"].annotation: [],
        Step.model_fields["kind"].annotation: ["at", "factor"],
        Cosine.model_fields["kind"].annotation: ["minimum"],
        Exponential.model_fields["kind"].annotation: ["factor"],
    }


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, fleetfit; print([m for m in ('torch', 'numpy', 'pydantic', 'typer') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel)


def test_errors_are_what_python_calls_them() -> None:
    for call, error in (
        (lambda: fleetfit.plan(model={"name": "cn"}), ValueError),
        (lambda: fleetfit.run(rounds=-1), ValueError),
        (lambda: errors.import_optional("no_such_library", "extra", "Reading"), ImportError),
    ):
        with pytest.raises(error) as raised:
            call()
        assert isinstance(raised.value, fleetfit.FleetFitError)


def test_plan_is_that_of_the_run() -> None:
    described = {"rounds": 1, "fleet": {"groups": [{"budget": 0.3}, {"budget": 1.0}]}}
    plan = fleetfit.plan(described)
    assert [level.name for level in plan.levels] == ["1", "2"] and plan.levels[-1].share == 1.0
    assert fleetfit.plan(described, overrides=["fleet.levels=[0.5, 1.0]"]).levels[0].target == 0.5
    with raises(ConfigError, "fleetfit compare", "[compare]"):
        fleetfit.plan({"compare": {"row": [{}]}})

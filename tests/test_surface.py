"""What users type in Python. A change goes into CHANGELOG.

Verbs with their options, keys of a run file and exported names stand on generated pages: see test_docs_generated.py.
"""

import copy
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import typer
from support import raises

import fleetfit
from fleetfit import errors, names
from fleetfit.api import run as execution
from fleetfit.cli.main import make_app
from fleetfit.errors import ConfigError

SIGNATURES = {
    "run": "file, *further, model, data, method, fleet, local, cohort, peft, attack, secure, privacy, engine, "
    "evaluate, checkpoint, rounds, seed, name, init_from, callbacks, out, on_round, progress, **unknown",
    "resume": "folder, *, rounds, fleet, evaluate, checkpoint, on_round, callbacks, progress, **objects",
    "load": "folder, checkpoint, **objects",
    "plan": "file, **sections",
    "derive": "module, data, *, exits, heads, head, weights, axes, progress",
    "compare": "file, *, out, jobs, against, record, on_run, on_progress, progress, **sections",
    "profile": "file, *, step_s, latency_s, memory, energy_j, device, threads, limit_s, facts, out, force, say, "
    "**sections",
    "Run.model": "self, level",
    "Run.predict": "self, data, *, level, exit, split, client, batch_size",
    "Run.predict_exits": "self, data, *, level, split, client",
    "Run.prepare": "self, data, *, split, client",
    "Run.evaluate": "self, data, *further, split, batch_size, **sections",
    "Run.calibrate": "self, level, *, budget, cost, mode, measure, temperature, client, data",
    "Run.export": "self, out, level, forms, *, data, progress, prior",
}

RUN = {"accuracy", "assembly", "best_exit", "calibrate", "checkpoint", "columns", "evaluate", "export",
       "finished", "folder", "metrics", "model", "notes", "plan", "predict", "predict_exits", "prepare", "server",
       "summary", "to_frame"}  # fmt: skip


def test_exported_names() -> None:
    assert all(getattr(fleetfit, name) is not None for name in fleetfit.__all__)
    assert set(dir(fleetfit)) == {*fleetfit.__all__, "__version__"} and not hasattr(fleetfit, "trian")


def test_signatures() -> None:
    for name, expected in SIGNATURES.items():
        parts, keyword_only = [], False
        for parameter in inspect.signature(operator.attrgetter(name)(fleetfit)).parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
                parts.append("*")
            keyword_only = keyword_only or parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
            stars = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "")
            parts.append(stars + parameter.name)
        assert ", ".join(parts) == expected, name


def test_run_passes_each_section_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It spells out what the others take as `Sections`, without what only comparisons have."""
    passed: dict[str, Any] = {}

    def load(file: Any, **sections: Any) -> None:
        passed.update(sections)
        raise KeyboardInterrupt

    monkeypatch.setattr(execution, "load_experiment", load)
    sections = {name: object() for name in execution.Sections.__annotations__.keys() - {"compare", "callbacks"}}
    assert sections.keys() <= inspect.signature(fleetfit.run).parameters.keys()
    with pytest.raises(KeyboardInterrupt):
        fleetfit.run(**sections, progress=False)
    assert passed == sections
    assert sections.keys() | {"callbacks", "compare", "recorded"} == fleetfit.Experiment.model_fields.keys()


def test_an_unknown_keyword_leads_to_its_key() -> None:
    for wrong, right in (("lr", "[local] lr"), ("rouds", "rounds"), ("source", "source")):
        with raises(ConfigError, right, key=wrong):
            fleetfit.run(**{wrong: 1}, progress=False)


def test_data_without_a_keyword_lead_to_it() -> None:
    run: Any = fleetfit.run
    for data in ([[[1.0]], [0]], [[[1.0]]], [None, [0]]):
        with raises(ConfigError, "data=(x, y)", key="file"):
            run(*data, progress=False)


def test_every_attribute_of_another_library_leads_to_a_member() -> None:
    for owner, words in names.OTHER_ATTRIBUTES.items():
        kind = getattr(fleetfit, owner)
        fields = getattr(kind, "__dataclass_fields__", {})
        for word, use in words.items():
            assert not hasattr(kind, word), word
            for named, member in re.findall(r"(\w+)\.(\w+)", use):
                members = {"fleetfit": fleetfit.__all__, owner.lower(): (*dir(kind), *fields)}
                assert member in members[named], use


def test_an_unknown_attribute_stays_an_attribute_error() -> None:
    class Broken(fleetfit.Run):
        @property
        def trouble(self) -> None:
            raise AttributeError("of the property")

    run, broken = fleetfit.Run.__new__(fleetfit.Run), Broken.__new__(Broken)
    with raises(AttributeError, "evaluate(data)"):
        _ = operator.attrgetter("score")(run)
    with raises(AttributeError, "no attribute"):
        _ = operator.attrgetter("scores")(run)
    with raises(AttributeError, "of the property"):
        _ = broken.trouble
    assert not hasattr(run, "score") and not hasattr(run, "_repr_png_") and getattr(run, "plot", 3) == 3
    assert vars(copy.copy(run)) == vars(copy.deepcopy(run)) == {}


def test_members_of_a_run() -> None:
    assert {name for name in vars(fleetfit.Run) if not name.startswith("_")} == RUN


def test_every_verb_and_option_has_a_help_text() -> None:
    command: Any = typer.main.get_command(make_app())
    for verb in (*command.commands.values(), *command.commands["flower"].commands.values()):
        assert verb.help
        for parameter in verb.params:
            if parameter.param_type_name == "option":
                assert parameter.help, (verb.name, parameter.name)


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
    assert fleetfit.plan(described, fleet={"levels": [0.5, 1.0]}).levels[0].target == 0.5
    with raises(ConfigError, "fleetfit compare", "[compare]"):
        fleetfit.plan({"compare": {"row": [{}]}})


@pytest.mark.parametrize("call", [fleetfit.run, fleetfit.compare, fleetfit.plan])
def test_overrides_are_of_the_command_line(call: Callable[..., Any]) -> None:
    with raises(ConfigError, key="overrides"):
        call(overrides=["rounds=1"])

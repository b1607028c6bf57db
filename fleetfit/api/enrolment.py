"""How nodes come to take part in a fleet's run: who fits, how long the run waits, and what is written of them."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fleetfit.config import Experiment
from fleetfit.config.assembly import spec_of_method
from fleetfit.config.enrolled import facts_of_all
from fleetfit.config.naming import called
from fleetfit.config.schema import Group
from fleetfit.engines.flower import Rules
from fleetfit.errors import RunError
from fleetfit.method import build
from fleetfit.planner import budget_problem
from fleetfit.values import Facts, Told

if TYPE_CHECKING:
    from fleetfit.engines.flower.post import Post
    from fleetfit.engines.flower.roll import Roll

LOOK_S = 0.2
"""Between two looks at who is connected, when the run begins to wait."""
LATER = 0.05
"""Part of the time that it has waited, which is added."""
SETTLE_S = 10.0
"""That a round waits for nodes that are just enrolling."""
SAY_S = 30.0
"""Between two lines that say so."""


def for_fleet(experiment: Experiment) -> Experiment:
    """Return the experiment with engine flower, and a checkpoint after each round."""
    changes: dict[str, Any] = {}
    if experiment.engine.name != "flower":
        changes["engine"] = type(experiment.engine)(name="flower")
    if experiment.checkpoint.every != 1:
        changes["checkpoint"] = experiment.checkpoint.model_copy(update={"every": 1})
    return experiment.model_copy(update=changes)


def changed_for_fleet(experiment: Experiment) -> list[str]:
    """Return what a fleet's run does otherwise than its file says, beyond what its nodes have of their own."""
    found, engine = [], experiment.engine
    if "engine" in experiment.model_fields_set and engine.name != "flower":
        found.append(f'[engine] is not used here: on a fleet the engine is "flower", and not "{engine.name}".')
    if experiment.checkpoint.every != 1:
        found.append("[checkpoint] every is not used here: a fleet's run writes a checkpoint after each round.")
    return found


def rules_of(experiment: Experiment) -> Rules:
    """Return when the run begins and when its rounds end."""
    rules: Rules = called("engines", "flower", "[engine]", experiment.engine.settings)
    return rules


def with_enrolled(experiment: Experiment, told: Sequence[Told]) -> Experiment:
    """Return the experiment with the enrolled nodes as its groups, where they told what they afford."""
    if not build(spec_of_method(experiment)).told:
        return experiment
    groups = [
        Group(name=t.name, budget=dict(t.budget) if isinstance(t.budget, Mapping) else t.budget, tolerance=t.tolerance)
        for t in told
        if t.budget is not None
    ]
    return experiment.model_copy(update={"fleet": experiment.fleet.model_copy(update={"groups": groups})})


# ---- enrolment ---------------------------------------------------------------------------------------------------


def new_roll(post: "Post", experiment: Experiment, say: Callable[[str], None]) -> "Roll":
    """Return the roll of a run, with nobody on it yet."""
    from fleetfit.engines.flower.roll import Roll

    method = build(spec_of_method(experiment))
    asks = {"asks_budget": method.told, "asks_labels": experiment.fleet.tells_labels}
    return Roll(post, asks, fits(experiment), say)


def fits(experiment: Experiment, facts: Facts | None = None) -> Callable[[Told], str]:
    """Return what says why a node does not fit the run, or ""."""
    method = build(spec_of_method(experiment))

    def wrong(told: Told) -> str:
        if facts is not None and told.facts.shape != facts.shape:
            return f"its data are {told.facts}, and the others' {facts}."
        if told.facts.task == "regression":
            return "its task is a regression, whose targets each node would scale by its own mean."
        if not told.num_examples:
            return "it has no training data."
        if method.told and told.budget is None:
            return (
                f"it does not tell a budget, and {experiment.method.name} chooses a level for each client. Set budget "
                "and tell_budget in its configuration, or run adaptivefl."
            )
        if told.budget is not None and (found := budget_problem(told.budget, experiment.fleet.cost)):
            return f"its budget does not fit this run: {found}"
        if experiment.fleet.tells_labels and told.labels is None:
            return "it does not tell its samples by class, and fleet.tells_labels asks for them: set tell_labels there."
        return ""

    return wrong


def enrolled(roll: "Roll", rules: Rules, say: Callable[[str], None]) -> None:
    """Wait until enough nodes have enrolled, and number them; those whose data are unlike most others' are left out.

    Raises:
        RunError: Too few came in time.
    """
    began = said = time.monotonic()
    enough: float | None = None
    say(f"Waiting for {rules.nodes} node{'s' if rules.nodes > 1 else ''}.")
    while True:
        roll.advance()
        now = time.monotonic()
        enough = None if roll.arrived < rules.nodes else enough or now
        if enough is not None and (not roll.pending or now - enough > SETTLE_S):
            roll.settle()
            roll.keep_only(facts_of_all([member.told for member in roll.members]))
            if roll.arrived >= rules.nodes:
                return
        if time.monotonic() - began > rules.wait_s:
            raise RunError(
                f"{roll.arrived} of {rules.nodes} nodes enrolled within {rules.wait_s:g} s. Start more, or lower "
                "engine.nodes."
            )
        if time.monotonic() - said > SAY_S:
            said = time.monotonic()
            say(f"Waiting: {roll.arrived} of {rules.nodes} nodes have enrolled, {len(roll.online)} are connected.")
        look_again(began)


def look_again(began: float) -> None:
    """Let a moment pass until the next look; looks cost the SuperLink something, and after a while none is urgent."""
    time.sleep(min(LOOK_S + LATER * (time.monotonic() - began), 1.0))


def nodes_text(key: str, planned: Sequence[Told], roll: "Roll") -> str:
    """Return what `nodes.json` says: the run, for whom its levels were planned, and who takes part."""
    facts = facts_of_all(planned)
    data = {**vars(facts), "sample_shape": list(facts.sample_shape)}
    nest = {"run": key, "data": data, "planned": [told.nest for told in planned], "members": roll.saved(roll.members)}
    return json.dumps(nest, indent=2) + "\n"

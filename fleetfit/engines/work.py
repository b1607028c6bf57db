"""The worker's side of an engine: rebuild the simulation from what the engine sends, and answer jobs.

Nothing is pickled and the caller's main module is not imported again: problem and method are rebuilt from their specs.
"""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fleetfit.data import Data, Parts
from fleetfit.engines.local import on_accelerator
from fleetfit.errors import ConfigError, FleetFitError, RunError, Unexpected
from fleetfit.messages import dump_reply, load_job, pack
from fleetfit.method import build, rebuild_problem
from fleetfit.names import describe_failure, find_plug_in
from fleetfit.training import resolve_device, run_job
from fleetfit.training.runtime import keep_freed_memory
from fleetfit.values import DeviceResources, Simulation


def check_rebuildable(simulation: Simulation, engine: str) -> None:
    """Raise a ConfigError where workers could not rebuild the model."""
    if simulation.problem.spec is None:
        raise ConfigError(
            f"engine {engine} rebuilds the model in each worker, so it needs a model with an import path "
            '("package.module:function" or "file.py:function"); objects made in Python run with engine.name = "local".',
            key="model",
        )


def setup_nest(simulation: Simulation, threads: int) -> dict[str, Any]:
    """Return what a worker needs besides the data set, as a nest for `fleetfit.messages.pack`."""
    return {
        "problem": simulation.problem.spec, "base": simulation.problem.base, "threads": threads,
        "parts": _parts_nest(simulation.parts), "resources": simulation.resources.payload,
    }  # fmt: skip


def _parts_nest(parts: Sequence[Mapping[str, Tensor]]) -> Any:
    if isinstance(parts, Parts):
        return {"indices": parts.indices, "ends": parts.ends}
    return [dict(part) for part in parts]


def simulation_of(nest: Mapping[str, Any], data: Data, device: str) -> Simulation:
    """Return the simulation of a worker, and prepare its process for jobs."""
    problem = replace(rebuild_problem(nest["problem"]), base=nest["base"])
    told = nest["parts"]
    parts = Parts(**told) if isinstance(told, Mapping) else told
    simulation = Simulation(problem, data, parts, DeviceResources.from_payload(nest["resources"]))
    torch.set_num_threads(nest["threads"])
    keep_freed_memory()
    return on_accelerator(simulation, resolve_device(device))


def answer(nest: Mapping[str, Any], simulation: Simulation) -> bytes:
    """Run the job of a message {"job", "memory"}; return the message {"reply", "memory"}, or {"error"}.

    An error is what nobody can go on with. What a method raises that is no `FleetFitError` is a bug, its own or ours:
    the engine says it, instead of a worker that dies again and again.
    """
    layout = simulation.problem.layout
    job = load_job(nest["job"], layout)
    try:
        build(job.method)
        reply, memory = run_job(job, simulation.device(job.client, nest["memory"], job.round))
        return pack({"reply": dump_reply(reply, layout), "memory": memory})
    except BaseException as error:
        return pack(said(error))


def said(error: BaseException) -> dict[str, Any]:
    """Return what a person needs of an error in a worker, as the message of a worker that cannot go on."""
    if isinstance(error, FleetFitError):
        return {"error": str(error)}
    plug_in = find_plug_in(error)
    sentence = f"{plug_in or 'FleetFit'} {describe_failure(error)}."
    if plug_in is None:
        sentence += " This is a fault of FleetFit, not yours; please report it."
    details = "".join(traceback.format_exception(error))
    return {"error": sentence, "details": details, "foreign": plug_in is not None}


def raised(reply: Mapping[str, Any]) -> FleetFitError:
    """Return the error of a worker that cannot go on."""
    sentence = f"a worker could not go on: {reply['error']}"
    if not reply.get("details"):
        return RunError(sentence)
    return Unexpected(sentence, str(reply["details"]), bool(reply.get("foreign")))

"""The user's code of a run: the files of its plug-ins and of its model's classes, and their changes."""

import contextlib
import inspect
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from fleetfit import names
from fleetfit.anatomy.derived import DerivedArchitecture
from fleetfit.config import Experiment
from fleetfit.config.keys import dump_section
from fleetfit.errors import one_line
from fleetfit.runs.folder import RunFolder


def compute_code_digests(experiment: Experiment) -> dict[str, str]:
    """Return the SHA-256 of the files of plug-ins and of the model's classes, by path.

    A class of the running script has the digest of its own text: the rest of a script changes for other reasons.
    """
    digests: dict[str, str] = {}
    stack: list[Any] = [dump_section(experiment)]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, str) and (file := names.find_code(value)) is not None:
            digests |= names.compute_code_digests(file)
    model = experiment.model.name
    model = model.net if isinstance(model, DerivedArchitecture) else model
    if not isinstance(model, str):
        modules = model.modules() if isinstance(model, torch.nn.Module) else [model]
        for owner in {one if inspect.isroutine(one) or inspect.isclass(one) else type(one) for one in modules}:
            with contextlib.suppress(OSError, TypeError):  # built in, or typed into a session
                if owner.__module__ == "__main__":
                    text = inspect.getsource(owner)
                    digests[f"__main__:{owner.__qualname__}"] = sha256(text.encode()).hexdigest()
                else:
                    digests |= names.compute_code_digests(Path(inspect.getfile(owner)))
    return digests


def find_code_changes(files: RunFolder, experiment: Experiment) -> str:
    """Return a sentence if code of a run has changed since its start; "" otherwise."""
    recorded = files.environment.code
    now = compute_code_digests(experiment)
    for path in recorded.keys() - now.keys():
        now |= names.compute_code_digests(Path(path))
    changed = sorted(path for path, digest in recorded.items() if now.get(path, digest) != digest)
    if not changed:
        return ""
    return (
        f"{', '.join(one_line(path) for path in changed)}: this code has changed since {files.path} began. The new "
        "version is used, but the model may have been trained with the old one. Restore the code, or start a new run."
    )

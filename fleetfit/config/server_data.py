"""The server's own data (`[data] server`), and where it trains on them."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fleetfit import names, paths
from fleetfit.config.schema import Experiment, ServerDataSection
from fleetfit.data import Data, unlabelled
from fleetfit.errors import ConfigError
from fleetfit.train import accelerator_named
from fleetfit.values import Facts


def server_data(experiment: Experiment, data: Data | Facts, load: Callable[..., Data]) -> Data:
    """Return the server's own data, without labels.

    Texts are cut into the tokens of the clients' texts, unless `tokenizer` says otherwise.

    Args:
        experiment: The run.
        data: The clients' data.
        load: Loads the data set of a section.

    Raises:
        FleetFitError: They cannot be had, or a model for the clients' data cannot take them.
    """
    section = experiment.data.server
    assert section is not None
    found = load(section, "[data] server", **_same_tokens(experiment, section, data))
    _check_alike(data, found)
    return unlabelled(found, experiment.seed)


def _same_tokens(experiment: Experiment, section: ServerDataSection, data: Data | Facts) -> dict[str, Any]:
    if "tokenizer" in section.settings or isinstance(section.name, Data):
        return {}
    factory = section.name if callable(section.name) else names.resolve("data", section.name)
    theirs = experiment.data.settings.get("tokenizer") or data.tokenizer
    return {"tokenizer": theirs} if theirs and "tokenizer" in inspect.signature(factory).parameters else {}


def _check_alike(data: Data | Facts, server: Data) -> None:
    """Refuse data that a model for the clients' data cannot take.

    Raises:
        ConfigError: Shapes or tokens differ.
    """
    if server.sample_shape != data.sample_shape:
        raise ConfigError(
            f"[data] server: a sample of {server.name} is {list(server.sample_shape)} and one of the clients' "
            f"{data.name} is {list(data.sample_shape)}; they must be alike. Images can be brought to one size with "
            "resize, texts with length."
        )
    if data.tokenizer and server.tokenizer and _text(data.tokenizer) != _text(server.tokenizer):
        raise ConfigError(
            f"[data] server: the texts of {server.name} are cut into other tokens than the clients' {data.name}. Give "
            "both the same tokenizer, or none to the server's."
        )
    ours, theirs = (data.vocabulary, data.padding), (server.vocabulary, server.padding)
    if ours != theirs:
        raise ConfigError(
            f"[data] server: {server.name} has {theirs[0]} tokens and padding {theirs[1]}, the clients' {data.name} "
            f"{ours[0]} and {ours[1]}; the same token must mean the same in both. Give both the same tokenizer."
        )


def _text(file: str) -> str:
    return paths.text_of(Path(file), ConfigError)


def server_accelerator(experiment: Experiment) -> torch.device:
    """Return where the server computes: on the engine's device, if there is one here."""
    named = experiment.engine.settings.get("device", "cpu")
    try:
        return accelerator_named(named if isinstance(named, str) else "cpu")
    except ConfigError:  # the engine will say so, if a run is started
        return torch.device("cpu")

"""Choose the settings of local training for models of one's own."""

from collections.abc import Mapping
from typing import Any

from fleetfit.anatomy import Architecture
from fleetfit.config.assemble.model import find_derived
from fleetfit.config.keys import replace_key
from fleetfit.config.schema import Experiment
from fleetfit.core.local import OPTIMIZER_KEYS, OPTIMIZERS, LocalSection
from fleetfit.hooks import Method

RECIPE = ("optimizer", *OPTIMIZER_KEYS, "clip_norm", "clip_value")
"""The keys of `[local]` that depend on the model by default."""
_LR, _LARGE_LR, _LARGE = 0.005, 0.001, 1_000_000  # of modules below and from _LARGE parameters on
_CLIP_NORM = 1.0


def list_open_keys(experiment: Experiment) -> set[str]:
    """Return the keys of `RECIPE` that neither the run file nor its method sets."""
    return {key for key in RECIPE if f"local.{key}" not in experiment.request.decided}


def choose_training(experiment: Experiment, architecture: Architecture, method: Method) -> Experiment:
    """Return the experiment with the local training that suits a plain module, where the run file leaves it open.

    SGD at its default learning rate learns next to nothing where no norm stands before a layer; AdamW at these rates
    learns with and without norms, and SGD with clipped gradients (experiments/LOG.md). A file with all keys of its
    optimizer, such as the `config.toml` of a run, leaves nothing open.
    """
    open_keys, local, derived = list_open_keys(experiment), experiment.local, find_derived(architecture)
    is_closed = not open_keys & OPTIMIZERS[local.optimizer].keys() or "momentum" in method.fixed_keys
    recipes = list_recipes(open_keys, local.optimizer)
    if derived is None or is_closed or not recipes:
        return experiment
    if "optimizer" in recipes[0]:
        parameters = sum(tensor.numel() for tensor in derived.net.parameters())
        return _replace_recipe(experiment, recipes[0 if parameters < _LARGE else 1])
    return replace_key(experiment, "local.clip_norm", _CLIP_NORM)


def list_recipes(open_keys: set[str], optimizer: Any) -> list[dict[str, Any]]:
    """Return what is chosen for a plain module: for a small and for a large one, or for both.

    Args:
        open_keys: See `list_open_keys`.
        optimizer: That of the run file, or the default.
    """
    if open_keys == set(RECIPE):
        return [{"optimizer": "adamw", "lr": lr} for lr in (_LR, _LARGE_LR)]
    return [{"clip_norm": _CLIP_NORM}] if optimizer == "sgd" and {"clip_norm", "clip_value"} <= open_keys else []


def restore_training(experiment: Experiment, recorded: Experiment) -> Experiment:
    """Return the experiment with the keys of `RECIPE` that it leaves open as an earlier run recorded them."""
    values = {key: getattr(recorded.local, key) for key in RECIPE}
    open_keys = list_open_keys(experiment)
    values |= {key: getattr(experiment.local, key) for key in RECIPE if key not in open_keys}
    return _replace_recipe(experiment, {key: value for key, value in values.items() if value is not None})


def _replace_recipe(experiment: Experiment, recipe: Mapping[str, Any]) -> Experiment:
    """Return the experiment with other keys of `RECIPE`; what is left out has the optimizer's defaults."""
    others = {key: value for key, value in experiment.local if key not in RECIPE}
    return replace_key(experiment, "local", LocalSection(**others, **recipe))


def describe_training(experiment: Experiment) -> list[str]:
    """Return what was chosen for a plain module, for the first lines of a run."""
    open_keys, local = list_open_keys(experiment), experiment.local
    if local.optimizer == "adamw" and "optimizer" in open_keys:
        return [
            f'A module of your own is trained by "adamw" at lr = {local.lr:g}, since no key of [local] says how. For '
            "another, set local.optimizer and local.lr."
        ]
    if local.clip_norm is not None and "clip_norm" in open_keys:
        return [
            f"A module of your own is trained by SGD with clip_norm = {local.clip_norm:g}. For another, set "
            "local.clip_norm."
        ]
    return []

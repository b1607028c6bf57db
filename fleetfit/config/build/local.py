"""Build the settings of local training from `[local]`."""

from dataclasses import fields

from fleetfit.config.schema import CohortSection, LocalSection
from fleetfit.values import Local
from fleetfit.values.local import OPTIMISER_KEYS, OPTIMISERS


def build_local_training(section: LocalSection, cohort: CohortSection) -> Local:
    """Return the settings of local training: each field from the key of its name, plus the cohort's deadline.

    Keys of other optimisers stay at their defaults, and so does `check_every` without `patience`.
    """
    keys = LocalSection.model_fields.keys() & {field.name for field in fields(Local)}
    keys -= set(OPTIMISER_KEYS) - OPTIMISERS[section.optimiser].keys()
    if section.patience is None:
        keys -= {"check_every"}
    values = {key: getattr(section, key) for key in keys}
    values["batch_size"] = None if section.batch_size == "all" else section.batch_size
    return Local(**values, deadline_s=cohort.deadline_s, late=cohort.late)

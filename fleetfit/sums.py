"""From the sums of a round to the server after it: what a secure round has in place of validation, merge and step."""

from dataclasses import replace

from fleetfit.aggregate import from_sums
from fleetfit.errors import ConfigError, FleetFitError, RunError, format_exception
from fleetfit.evaluate import trained_levels
from fleetfit.privacy import Privacy
from fleetfit.secure import Quantiser
from fleetfit.soundness import spoilt
from fleetfit.submodel import concat_state
from fleetfit.timekeeper import Timekeeper
from fleetfit.validation import wrong_sums
from fleetfit.values import Federation, Server, Summed


def stepped_by(
    federation: Federation, server: Server, summed: Summed, grid: Quantiser, watch: Timekeeper,
    privacy: Privacy | None = None,
) -> tuple[Server | None, str]:  # fmt: skip
    """Return the server after a round of sums, or None where it cannot stand, and why not.

    Args:
        federation: The server's view.
        server: Before the round.
        summed: What came of it.
        grid: In which numbers.
        watch: Counts seconds.
        privacy: What adds noise to the sums; None: nothing does.
    """
    with watch.on("validation"):
        if privacy is not None:
            summed = privacy.held(summed, grid.most_clipped)
        why = summed.lost or wrong_sums(summed, concat_state(server.state).numel(), grid.most)
    if why:
        return None, why
    with watch.on("averaging"):
        try:
            aggregate = (
                from_sums(federation.problem.layout, server.state, summed.blocks, summed.step)
                if privacy is None
                else privacy.from_sums(federation, server, summed)
            )
            found = federation.method.step(federation, server, aggregate, summed.reports)
        except Exception as error:
            if isinstance(error, FleetFitError) and not isinstance(error, RunError):
                raise
            return None, f"the server's step raised an error: {format_exception(error)}"
        if not isinstance(found, Server):
            raise ConfigError(
                f"the server's step must return the server after the round, got {type(found).__name__}.", key="step"
            )
    trained = trained_levels(federation, server, summed.reports)
    after = replace(found, round=server.round + 1, trained=trained)
    with watch.on("validation"):
        why = spoilt(server, after)
    return (after, "") if why is None else (None, why)

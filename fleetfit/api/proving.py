"""The proof of a layout before anything is trained with it."""

import weakref
from collections.abc import Callable
from dataclasses import replace

from fleetfit.check import check_layout
from fleetfit.config import Assembly

_proven: "weakref.WeakSet[Assembly]" = weakref.WeakSet()


def proven(assembly: Assembly, say: Callable[[str], None] | None = None) -> Assembly:
    """Prove the layout of what is trained; once, however often it is asked for.

    Args:
        assembly: What is run.
        say: Called with what is being done where it takes more than a moment.

    Returns:
        The assembly, with a warning among its notes if its architecture says why something cannot be proved.

    Raises:
        ModelError: The layout is wrong, or could not be proved.
    """
    if assembly in _proven:
        return assembly
    problem, levels = assembly.federation.problem, assembly.federation.levels
    report = check_layout(
        problem.architecture,
        problem.layout,
        [level.submodel for level in levels],
        input_shape=problem.input_shape,
        say=say,
    )
    if report.warning:
        assembly = replace(assembly, notes=(*assembly.notes, report.warning))
    _proven.add(assembly)
    return assembly

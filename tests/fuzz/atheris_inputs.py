"""The suite's mutations, led by coverage: `PYTHONPATH=tests python -m fuzz.atheris_inputs messages -runs=20000`.

Kinds of input: messages, run_files, folders, data_files. It needs `atheris`, which is in no extra: there are wheels for
Linux only. All further options are libFuzzer's. What it finds goes into `tests/corpus`.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

Target = Callable[[bytes], object]


def messages(place: Path) -> Target:
    from fuzz.checking import lives, one
    from hypothesis import strategies as st

    lives()
    return _of_hypothesis(st.data(), lambda data: one(lambda most: data.draw(st.integers(0, most))))


def run_files(place: Path) -> Target:
    from fuzz.test_run_files import FILES, outcome

    return _of_hypothesis(FILES, lambda data: outcome(place / "run.toml", data))


def data_files(place: Path) -> Target:
    from fuzz.test_data_files import KINDS, changes_of, outcome
    from hypothesis import strategies as st

    cases = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.tuples(st.just(kind), changes_of(kind)))
    return _of_hypothesis(cases, lambda case: outcome(*case))


def folders(place: Path) -> Target:
    from fuzz.test_folders import kinds, made_folders, measured_as_said, one, several, verbs
    from hypothesis import strategies as st

    from fleetfit.api import profiling

    profiling.profile_level = measured_as_said
    originals = made_folders(place)
    return _of_hypothesis(st.tuples(kinds, verbs, several), lambda case: one(originals, *case))


INPUTS: dict[str, tuple[Callable[[Path], Target], list[str]]] = {
    "messages": (messages, ["fleetfit.validation", "fleetfit.messages", "fleetfit.fleet.protocol"]),
    "run_files": (run_files, ["fleetfit.config", "fleetfit.files"]),
    "data_files": (data_files, ["fleetfit.data", "fleetfit.files"]),
    "folders": (folders, ["fleetfit.runs", "fleetfit.files", "fleetfit.rounds"]),
}
"""How each kind of input is made of bytes and delivered, and the modules whose lines lead the search."""


def _of_hypothesis(strategy: Any, deliver: Callable[[Any], object]) -> Target:
    """Return what draws a case from bytes, and delivers it."""
    from hypothesis import HealthCheck, given, settings

    @settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def case(value: Any) -> None:
        deliver(value)

    target: Target = case.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    return target


def main() -> None:
    try:
        import atheris
    except ImportError:
        raise SystemExit("atheris is not installed: pip install atheris (Linux, Python 3.11 to 3.13)") from None
    if len(sys.argv) < 2 or sys.argv[1] not in INPUTS:
        raise SystemExit(f"say which inputs: {', '.join(INPUTS)}.")
    make_target, led_by = INPUTS[sys.argv.pop(1)]
    with tempfile.TemporaryDirectory(prefix="fleetfit-fuzz-") as place:
        os.environ.update(FLEETFIT_CACHE=f"{place}/cache", HF_HUB_OFFLINE="1")
        os.environ.pop("FLEETFIT_DATA", None)
        os.chdir(place)
        with atheris.instrument_imports(include=led_by):
            target = make_target(Path(place))
        atheris.Setup(sys.argv, target)
        atheris.Fuzz()


if __name__ == "__main__":
    main()

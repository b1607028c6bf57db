"""What FleetFit adds to the work itself, as ratios: `make bench`, or `python -m benchmarks [part ...]`.

Each part is a module of this folder with a function `figures(options)`, which yields one `Figure` after the other; the
figures of all parts stand in one Markdown table at the end, ready for `benchmarks/README.md`.

    python -m benchmarks                          all parts but those that only run when they are named
    python -m benchmarks round codec --quick      some parts, with fewer repetitions
    python -m benchmarks --check [part ...]       compare with the ratios written down (`make bench-check`)
    python -m benchmarks --write [part ...]       write the ratios down
    python -m benchmarks ship RUN                 measure the exported levels of a run
"""

import argparse
import sys

# One line per part: its module, and what it measures.
PARTS = {
    "round": "a round of ours against a bare loop and against a naive one, on four models",
    "fast": "a fast round against a bare loop in fp32, on four models",
    "aggregation": "averaging against a plain copy of the same bytes",
    "averaging": "the share of a round that averaging takes, and memory, as the cohort grows",
    "robust": "averages that compare updates (outliers, krum, trimmed mean) against the plain mean: time and memory",
    "secure": "secure rounds against plain ones: CPU of all parties, bytes of a client, by number of clients",
    "start": "the first training step, `list` and `--help`, against an import of torch",
    "techniques": "what each technique costs a client: exits, distillation, Ree, FedDyn, compression, early stopping",
    "evaluation": "the shares of a run that evaluation, averaging, validation and checkpoints take",
    "clients": "a round as the number of registered clients grows; ten thousand jobs a round out of a million",
    "engines": "processes and ray with two workers against local and a bare loop",
    "codec": "messages and checkpoints against a copy of the same bytes",
    "tables": "reading a table of a million rows against pyarrow's own reader: CPU and memory",
    "derivation": "levels of a plain module: deriving, proving, building, a training step against the constructor's",
    "frozen": "a step on a frozen backbone against gradients for everything; a round with its features kept",
}
# These take long or need more than the package: they run when they are named.
WHEN_NAMED = {
    "formats": "channels-last against the plain memory format: a training step and an evaluation pass, by shape",
    "compare": "two runs of a comparison side by side against one after the other",
    "peers": "the same task on Flower's simulation and on pfl-research: CPU, start, memory (`make peers-env` first)",
    "fleet": "a message to a node of a real fleet, in three ways of running its work",
    "secure_fleet": "a round on a fleet of four real nodes: plain, with [secure], with [privacy] as well",
    "manager": "what a node costs the server of a real fleet: ten and a hundred light nodes over loopback",
}


def main(given: list[str] | None = None) -> int:
    """Run the parts that are named, or all."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog="parts:\n" + "\n".join(f"  {name:<12} {what}" for name, what in {**PARTS, **WHEN_NAMED}.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="part", help="parts to run; none, or all: every one but "
                        + ", ".join(WHEN_NAMED))  # fmt: skip
    parser.add_argument("--repetitions", type=int, help="pairs that each ratio is the median of (9; 5 with --quick)")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller cases")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="fail where a ratio is worse than written down")
    what.add_argument("--write", action="store_true", help="write the ratios down for --check")
    options = parser.parse_args(given)
    if options.parts[:1] == ["ship"]:
        from benchmarks.ship import ship

        for folder in options.parts[1:]:
            ship(folder)
        return 0
    every = {**PARTS, **WHEN_NAMED}
    wanted = [name for part in options.parts or ["all"] for name in (PARTS if part == "all" else [part])]
    if unknown := [part for part in wanted if part not in every]:
        parser.error(f"there is no part {', '.join(unknown)}; there are {', '.join(every)}, and ship RUN.")
    if options.repetitions is not None and options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {options.repetitions}.")
    from benchmarks.running import run

    return run(list(dict.fromkeys(wanted)), options.repetitions, options.quick, options.check, options.write)


if __name__ == "__main__":
    sys.exit(main())

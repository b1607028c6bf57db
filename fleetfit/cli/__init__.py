"""The command line.

`run`, `plan`, `compare`, `resume`, `watch`, `eval`, `list` and `check-model` are in `verbs`; `predict`, `calibrate`,
`export`, `pictures` and `attention` in `shipping`; `profile` in `profiling`; `runs` in `keeping`; `report` in
`reporting`; `flower` in `fleet`. `door` says in a sentence what went wrong, and `streams` prints it. Nothing is
imported here, so that Ctrl-C has its answer from the first moment.
"""

import sys


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit: the script's entry point.

    Args:
        arguments: What was typed; None: that of this process, which then ends.
    """
    try:
        from fleetfit.cli import door

        code = door.passed(sys.argv[1:], process=True) if arguments is None else door.passed(arguments)
    except KeyboardInterrupt:
        print("fleetfit: stopped.", file=sys.stderr)
        code = 130
    sys.exit(code)


__all__ = ["main"]

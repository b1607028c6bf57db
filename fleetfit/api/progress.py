"""Show the progress of runs, comparisons and counted work: bars in a terminal (rich), lines in a pipe, a notebook cell.

All facts come from the reports of rounds in `metrics.jsonl`, so another process can show them, too. Facts that
`[privacy]` and `[secure]` withhold are left out.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TextIO

from fleetfit.api.commands import format_resume
from fleetfit.config import Experiment
from fleetfit.errors import COMMAND, Interrupt, ScriptInterrupt, make_printable, truncate
from fleetfit.markup import escape_html
from fleetfit.report.text import format_bytes, format_duration, format_percent, format_privacy, wrap_text
from fleetfit.rounds.report import LEFT_OUT, format_rollback
from fleetfit.runs.folder import RunFolder

if TYPE_CHECKING:  # `import fleetfit` does not import rich
    from rich.progress import Progress

ProgressOption = Literal["auto"] | bool
"""Whether to show progress: in a notebook in the cell, elsewhere on stderr; False: nothing. "auto" is True."""
OnReport = Callable[[Mapping[str, Any]], None]
"""Called with the report of each round."""
_LEVELS = 8  # whose accuracies are shown
_REASONS = 5  # of failures, each shown once
_SAVING = "checkpoints"  # the key of their note
_SAVING_S, _SAVING_SHARE = 10.0, 0.2  # seconds and share of the time of checkpoints from which on a note says so
_TITLE_WIDTH = 36  # characters of a title next to a bar
_REDRAW_S = 0.2  # between two updates of a bar of counted work


# ---- the facts -----------------------------------------------------------------------------------------------------


class RoundFacts:
    """The facts in the reports of a run so far, each as text; "" if a fact is missing or withheld.

    Args:
        rounds: Number of rounds of the run.
        norm: The batch-norm policy of the accuracies.

    Attributes:
        notes: Sentences on the first job that failed by each reason, and on checkpoints that take long.
    """

    def __init__(self, rounds: int, norm: str) -> None:
        self.notes: dict[str, str] = {}
        self.rounds, self.done = rounds, 0
        self._norm, self._seconds, self._saving, self._count = norm, 0.0, 0.0, 0
        self._bytes: int | None = 0
        self._report: Mapping[str, Any] = {}
        self._columns: Mapping[str, Any] = {}
        self._evaluated_round, self._part = 0, ""

    def add(self, report: Mapping[str, Any]) -> None:
        """Add the report of a round."""
        self._report, self.done = report, report["round"]
        self._seconds, self._count = self._seconds + report["seconds"], self._count + 1
        self._saving += report.get("seconds_of", {}).get("checkpoints", 0.0)
        if self._saving > max(_SAVING_S, _SAVING_SHARE * self._seconds) and _SAVING not in self.notes:
            self.notes[_SAVING] = (
                f"Checkpoints have taken {self._saving / self._seconds:.0%} of the time so far. Stop the run, and "
                "resume it with checkpoint.every = 10, to write fewer."
            )
        message_bytes = report["bytes_down"], report["bytes_up"]
        self._bytes = None if None in message_bytes or self._bytes is None else self._bytes + sum(message_bytes)
        for failure in (*report["failures"], *report.get("evaluate", {}).get("failures", ())):
            self._add_failure(failure.get("reason", ""), failure["client"])
        columns = report.get("evaluate", {}).get(self._norm)
        if columns:
            self._columns, self._evaluated_round = columns, self.done
            clients = report["evaluate"].get("partial", {}).get("clients")
            self._part = f" (on {clients} clients)" if clients else ""

    def _add_failure(self, reason: str, client: int | None) -> None:
        if reason not in ("", LEFT_OUT, *self.notes) and (count := len(self.notes.keys() - {_SAVING})) < _REASONS:
            who = "a job of the server" if client is None else f"client {client}"
            further = " Further reasons are in metrics.jsonl." if count == _REASONS - 1 else ""
            self.notes[reason] = f"Round {self.done}: {who} failed: {truncate(reason, 300).rstrip('.')}.{further}"

    @property
    def time_left(self) -> str:
        """The wall time left, estimated from the mean of the rounds so far: "6.0 s left"."""
        seconds = (self.rounds - self.done) * self._seconds / self._count if self._count else 0.0
        return f"{format_duration(seconds)} left" if seconds else ""

    @property
    def loss(self) -> str:
        """The loss of the last round; with `[privacy]` the spent epsilon."""
        if "privacy" in self._report:
            return format_privacy(self._report["privacy"]["epsilon"], self._report["privacy"]["delta"])
        loss = self._report.get("train", {}).get("loss")
        return f"loss {'-' if loss is None else f'{loss:.3f}'}"

    @property
    def cohort(self) -> str:
        """Numbers of clients that trained, that failed and that the method left out in the last round."""
        trained = self._report.get("train", {}).get("clients")
        if trained is None or "privacy" in self._report:
            return ""
        reasons = [failure.get("reason") for failure in self._report["failures"]]
        left_out = reasons.count(LEFT_OUT)
        failed = len(reasons) - left_out
        noun = "trained" if self._part else "client" if trained == 1 else "clients"  # beside those of a part
        others = f", {failed} failed" * bool(failed) + f", {left_out} left out by the method" * bool(left_out)
        return f"{trained} {noun}{others}"

    @property
    def traffic(self) -> str:
        """Bytes of all messages so far, in both directions."""
        return "" if self._bytes is None or "privacy" in self._report else f"{format_bytes(self._bytes)} sent"

    @property
    def rollback(self) -> str:
        """The reason why the last round was rolled back."""
        return f"Round {self.done} was {format_rollback(self._report['undone'])}" if "undone" in self._report else ""

    @property
    def is_evaluated(self) -> bool:
        """Whether the last round was evaluated."""
        return bool(self._columns) and self._evaluated_round == self.done

    @property
    def accuracies(self) -> str:
        """The two main accuracies of the last evaluation."""
        if not self._columns:
            return ""
        names = ("avg", "full") if "privacy" in self._report else ("local", "global")
        return "  ".join(f"{name} {format_percent(self._columns.get(name))}%" for name in names) + self._part

    @property
    def lines(self) -> list[str]:
        """The facts below a bar: losses and messages, the newest accuracies, and those of the levels."""
        first = "  ".join(filter(None, [self.loss, self.cohort, self.traffic]))
        accuracies = f"{self.accuracies}  (round {self._evaluated_round})" if self._columns else ""
        return list(filter(None, [first, accuracies, self.level_accuracies]))

    @property
    def level_accuracies(self) -> str:
        """The accuracy of each level on its own clients in the last evaluation."""
        levels = [(name, entry["local"]) for name, entry in self._columns.get("levels", {}).items()]
        evaluated = [(name, local) for name, local in levels if local is not None]
        if len(levels) < 2 or not evaluated:
            return ""
        first = [f"{truncate(name)} {format_percent(local)}%" for name, local in evaluated[:_LEVELS]]
        return "by level: " + "  ".join(first) + ("  ..." if len(evaluated) > _LEVELS else "")


# ---- the rounds of a run -------------------------------------------------------------------------------------------


class RoundProgress:
    """Shows the rounds of a run: in a notebook's cell, as a bar in a terminal with lines below it, else as lines.

    Args:
        title: The beginning of each line.
        experiment: The experiment of the run.
        bars: Bars of several runs, which the caller closes; None: make a bar for this run.
        format_time_left: Returns the time left of the whole comparison in words.
        stream: The stream of bars and lines; stdout by default.
        cell: Shows HTML in a notebook (see `open_cell`).
        folder: The run folder, with the rounds before the first one that is shown, of a resumed or followed run.
    """

    def __init__(
        self,
        title: str,
        experiment: Experiment,
        bars: "Progress | None" = None,
        format_time_left: Callable[[], str] = str,
        stream: TextIO | None = None,
        cell: "ShowHTML | None" = None,
        folder: Path | None = None,
    ) -> None:
        self._title, self._format_time_left = make_printable(title), format_time_left
        self._stream, self._cell, self._folder = stream or sys.stdout, cell, folder
        self.facts, self._noted = RoundFacts(experiment.rounds, experiment.evaluate.batch_norm[0]), 0
        self._bars, self._is_alone = bars, bars is None
        if cell is not None:
            cell(format_html(title, self.facts))
        elif self._is_alone and self._stream.isatty():
            self._bars = make_bars(self._stream)
            self._bars.start()
        if self._bars is not None:
            self._task = self._bars.add_task(self._title, total=experiment.rounds, score="", time_left="", below=())

    def __call__(self, report: Mapping[str, Any]) -> None:
        """Show the report of a round."""
        if self._folder is not None and not self.facts.done and report["round"] > 1:
            for earlier in RunFolder(self._folder).metrics()[: report["round"] - 1]:
                self.facts.add(earlier)
        self.facts.add(report)
        if self._cell is not None:
            self._cell(format_html(self._title, self.facts, self.facts.time_left))
            return
        for note in list(self.facts.notes.values())[self._noted :]:
            print_above(self._bars, wrap_text(f"Note: {note}", self._stream), self._stream)
        self._noted = len(self.facts.notes)
        if self.facts.rollback:
            print_above(self._bars, self.facts.rollback, self._stream)
        if self._bars is None:
            self._print_lines()
            return
        self._draw(self._bars)
        if self.facts.done == self.facts.rounds:
            self.close()

    def _print_lines(self) -> None:
        facts, prefix = self.facts, f"{self._title}  " if self._title else ""
        accuracies = facts.accuracies if facts.is_evaluated else ""
        parts = [f"round {facts.done}/{facts.rounds}", facts.loss, accuracies, facts.cohort, facts.traffic,
                 facts.time_left, self._format_time_left()]  # fmt: skip
        print_above(None, prefix + "  ".join(filter(None, parts)), self._stream)
        if facts.is_evaluated and facts.level_accuracies:
            print_above(None, f"{prefix}  {facts.level_accuracies}", self._stream)

    def _draw(self, bars: "Progress") -> None:
        facts, whole = self.facts, self._format_time_left()
        if self._is_alone:
            time_left = "  ".join(filter(None, [facts.time_left, whole]))
            bars.update(self._task, completed=facts.done, time_left=time_left, below=facts.lines)
            return
        for task in bars.tasks:  # the comparison's time left is shown once, at the bottom
            bars.update(task.id, below=())
        score = facts.accuracies.partition("  ")[0] or facts.loss  # a line per run has space for one number
        below = (whole,) if whole else ()
        bars.update(self._task, completed=facts.done, score=score, time_left=facts.time_left, below=below)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bars is not None and self._is_alone:
            self._bars.stop()
            self._bars = None


# ---- in a notebook -------------------------------------------------------------------------------------------------

ShowHTML = Callable[[str], None]
"""Shows HTML in place of the one before."""


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def open_cell() -> ShowHTML | None:
    """Return the function that shows HTML in an output of the notebook's cell; None outside of a notebook."""
    if not is_notebook():
        return None
    from IPython import display

    untyped: Any = display
    handle = untyped.display(untyped.HTML(""), display_id=True)
    return lambda html: handle.update(untyped.HTML(html))


def format_html(title: str, facts: RoundFacts, time_left: str = "") -> str:
    """Return a bar with the facts below it as HTML without colors, for light and dark themes."""
    head = " · ".join(filter(None, [title, f"round {facts.done}/{facts.rounds}", time_left, facts.rollback]))
    bar = f'<progress value="{facts.done}" max="{facts.rounds}" style="width:20em"></progress>'
    lines = [*facts.lines, *facts.notes.values()]
    below = "".join(f'<div style="white-space:pre-wrap">{escape_html(line)}</div>' for line in lines)
    return f"<div>{bar} {escape_html(head)}{below}</div>"


# ---- the display of a run ------------------------------------------------------------------------------------------


class RunDisplay:
    """Shows the slow steps, the notes and the rounds of a run, in a notebook's cell or on a stream.

    Args:
        stream: The stream; None: show nothing.
        print_result: Called with the content of `summary.json` and the printed notes, before the plots are drawn.
        folder: The run folder, if it exists before the run starts.

    Attributes:
        folder: The run folder; None until there is one.
    """

    def __init__(
        self,
        stream: TextIO | None,
        print_result: Callable[[Mapping[str, Any], Sequence[str]], None] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.folder = folder
        self._stream, self._print_result = stream, print_result
        self._notes: Sequence[str] = ()
        self._rounds: RoundProgress | None = None

    def say(self, sentence: str) -> None:
        """Print a sentence on a slow step."""
        if self._stream is not None:
            print_above(None, sentence, self._stream)

    def start(self, folder: Path, experiment: Experiment, notes: Sequence[str]) -> None:
        """Print the notes and the run folder, before the first round."""
        self.folder, self._notes = folder, notes
        if self._stream is not None:
            for note in notes:
                print_above(None, wrap_text(f"Note: {note}", self._stream), self._stream)
            self.say(f"Run folder: {folder}")
            self._rounds = RoundProgress("", experiment, stream=self._stream, cell=open_cell(), folder=folder)

    def show_round(self, report: Mapping[str, Any]) -> None:
        """Show the report of a round."""
        if self._rounds is not None:
            self._rounds(report)

    def show_result(self, summary: Mapping[str, Any]) -> None:
        """Show the content of `summary.json`."""
        self.close()
        if self._print_result is not None:
            self._print_result(summary, self._notes)

    def close(self) -> None:
        """Restore the terminal."""
        if self._rounds is not None:
            self._rounds.close()


def find_stream() -> TextIO:
    """Return the stream for a call from Python: what a script prints to stdout is its own."""
    return sys.stdout if is_notebook() else sys.stderr


@contextlib.contextmanager
def open_display(progress: ProgressOption | RunDisplay, folder: Path | None = None) -> Iterator[RunDisplay]:
    """Yield the display of a call. In a script, Ctrl-C ends with the call that continues it.

    Args:
        progress: See `fleetfit.run`. The command line passes a display of its own, and explains Ctrl-C itself.
        folder: The run folder, if it exists before the run starts.
    """
    if isinstance(progress, RunDisplay):
        yield progress
        return
    display = RunDisplay(find_stream() if progress else None, folder=folder)
    with explain_interrupt(lambda: _format_advice(display.folder)):
        yield display


def _format_advice(folder: Path | None) -> str:
    if folder is None:
        return "Nothing was written."
    return f"Nothing is half written; continue with:{COMMAND}{format_resume(folder, is_script=True)}"


@contextlib.contextmanager
def explain_interrupt(format_advice: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C in a script into a sentence with what continues it. The exit code is 130, without a traceback.

    Args:
        format_advice: Returns how to continue, as a sentence.
    """
    try:
        yield
    except Interrupt:
        raise
    except KeyboardInterrupt:
        sentence = f"stopped. {format_advice()}"
        if hasattr(sys, "ps1"):  # SystemExit would end an interactive session
            raise Interrupt(sentence) from None
        with contextlib.suppress(OSError, ValueError):
            behind = "\n" if sys.stderr.isatty() else ""  # the terminal's ^C
            print_above(None, f"{behind}fleetfit: {sentence}", sys.stderr)
        raise ScriptInterrupt(sentence) from None


# ---- the display of a comparison -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComparisonProgress:
    """State of a comparison.

    Attributes:
        runs: Number of runs, including tuning.
        tuning: Number of tuning runs.
        finished: Number of finished runs.
        jobs: Runs at a time.
        seconds_left: Estimated wall seconds left; None before the first round.
        rows: Number of rows.
        rows_measured: Number of rows with a finished round. The times of the others are guesses.
    """

    runs: int
    tuning: int
    finished: int
    jobs: int
    seconds_left: float | None
    rows: int
    rows_measured: int


class ComparisonDisplay:
    """Shows the runs of a comparison and their rounds. It prints each note once per row, not once per seed.

    Args:
        jobs: Number of runs at a time.
        stream: The stream of bars and lines; None: show nothing.
    """

    def __init__(self, jobs: int, stream: TextIO | None) -> None:
        self._stream, self._notes = stream, set[tuple[str, str]]()
        self._has_started, self._time_left = False, ""
        self._cell = None if stream is None else open_cell()
        self._bars: Progress | None = None
        if jobs > 1 and stream is not None and stream.isatty():
            self._bars = make_bars(stream)
            self._bars.start()

    def say(self, sentence: str) -> None:
        """Print a sentence on a slow step."""
        if self._stream is not None:
            print_above(self._bars, sentence, self._stream)

    def show_run(self, title: str, number: int, count: int, run: Any) -> OnReport | None:
        """Print the title and the notes of a `Run`; return its progress display, or None if nothing is shown."""
        if self._stream is None:
            return None
        heading = f"[{number}/{count}] {title}"
        for note in run.notes:
            if (run.experiment.name, note) not in self._notes:
                self._notes.add((run.experiment.name, note))
                print_above(self._bars, wrap_text(f"{heading}: {note}", self._stream), self._stream)
        if run.finished:
            self.say(f"{heading}: already finished.")
            return None
        time_left, cell = lambda: self._time_left, self._cell
        return RoundProgress(heading, run.experiment, self._bars, time_left, self._stream, cell, run.folder)

    def show_progress(self, progress: ComparisonProgress) -> None:
        """Print the number of runs at first, and the estimated duration once; the rounds show it from then on."""
        if not self._has_started:
            self._has_started = True
            self.say(format_run_count(progress))
        if progress.seconds_left:
            is_first, about = not self._time_left, format_duration(progress.seconds_left)
            is_guess = progress.rows_measured < progress.rows
            self._time_left = f"{'perhaps ' * is_guess}{about} left of all"
            if is_first:
                rows = f" ({progress.rows_measured} of {progress.rows} rows measured)"
                self.say(
                    f"About {about} left for the whole comparison, estimated from the rounds so far{rows * is_guess}."
                )

    def close(self) -> None:
        """Restore the terminal."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


def format_run_count(progress: ComparisonProgress) -> str:
    """Return the number of runs: "8 runs, of which 4 tune before the others; 3 are finished."."""
    text = f"{progress.runs} run{'s' * (progress.runs != 1)}"
    if progress.tuning:
        text += f", of which {progress.tuning} tune before the others"
    if progress.jobs > 1:
        text += f", {progress.jobs} at a time"
    if progress.finished:
        text += f"; {progress.finished} {'is' if progress.finished == 1 else 'are'} finished"
    return f"{text}."


def make_comparison_display(progress: ProgressOption | ComparisonDisplay, jobs: int) -> ComparisonDisplay | None:
    """Return the display of a comparison that was started from Python; None: show nothing."""
    if isinstance(progress, ComparisonDisplay):
        return progress
    return ComparisonDisplay(jobs, find_stream()) if progress else None


# ---- counted work, and bars ----------------------------------------------------------------------------------------


class TaskProgress:
    """Shows counted work: a bar with the time left in a terminal, else a line from time to time.

    Only `update` draws, not a thread, so that measurements are not disturbed.

        with TaskProgress("Waiting for nodes", total=5, print_line=say, line_s=30) as progress:
            progress.update(2, lambda: "Waiting: 2 of 5 nodes have enrolled.")

    Args:
        description: The text beside the bar.
        total: The count at the end.
        print_line: Prints a line if the stream is not a terminal.
        line_s: Seconds between two lines, and before the first one.
        stream: The stream of the bar; stderr by default.
    """

    def __init__(
        self,
        description: str,
        total: int,
        print_line: Callable[[str], None],
        line_s: float,
        stream: TextIO | None = None,
    ) -> None:
        self._total, self._print_line, self._line_s = total, print_line, line_s
        self._start = self._last = time.monotonic()
        self._done = 0
        self._bar: Progress | None = None
        stream = stream or sys.stderr
        if stream.isatty():
            from rich import console, progress

            columns = (progress.TextColumn("{task.description}", markup=False), progress.BarColumn(30),
                       progress.MofNCompleteColumn(), progress.TimeRemainingColumn())  # fmt: skip
            self._bar = progress.Progress(
                *columns, console=console.Console(file=stream), auto_refresh=False, transient=True
            )
            self._bar.start()
            self._task = self._bar.add_task(make_printable(description), total=total)
            self._bar.refresh()

    def __enter__(self) -> "TaskProgress":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def time_left(self) -> str:
        """The wall time left, estimated from the mean so far; "" before the first update and after the last."""
        if not 0 < self._done < self._total:
            return ""
        return f"{format_duration((time.monotonic() - self._start) * (self._total - self._done) / self._done)} left"

    def update(self, count: int, format_line: Callable[[], str]) -> None:
        """Show the count. `format_line` returns the line if one is due; it may use `time_left`."""
        self._done = count
        now = time.monotonic()
        if now - self._last < (self._line_s if self._bar is None else _REDRAW_S) or count >= self._total:
            return
        self._last = now
        if self._bar is None:
            self._print_line(format_line())
        else:
            self._bar.update(self._task, completed=count, refresh=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()


def make_bars(stream: TextIO | None = None) -> "Progress":
    """Return bars of rounds for a terminal, each with lines on its run. Long lines are cut, not wrapped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column
    from rich.text import Text

    class RoundBars(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                for line in task.fields["below"]:
                    yield Text(f"  {line}", no_wrap=True, overflow="ellipsis")

    def make_column(text: str, width: int | None = None) -> TextColumn:
        column = Column(no_wrap=True, overflow="ellipsis", max_width=width)
        return TextColumn(text, markup=False, table_column=column)

    return RoundBars(
        make_column("{task.description}", _TITLE_WIDTH), BarColumn(None), MofNCompleteColumn(),
        make_column("{task.fields[score]}"), make_column("{task.fields[time_left]}"), expand=True,
        console=Console(file=stream),
    )  # fmt: skip


def print_above(bars: "Progress | None", text: str, stream: TextIO | None = None) -> None:
    """Print a line to a stream, above the bars if there are any."""
    text = make_printable(text)
    if bars is not None:
        bars.console.print(text, markup=False, soft_wrap=True, highlight=False)
    else:
        print(text, file=stream or sys.stdout, flush=True)

"""Live progress of a run: one set of facts, shown in a terminal (by rich), in a pipe, or in a notebook.

The facts come from the reports of the rounds, as they are in `metrics.jsonl`, so that another process can show the
same. They lack what `[privacy]` and `[secure]` withhold.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fleetfit.config import Experiment
from fleetfit.errors import make_printable, truncate
from fleetfit.markup import escape_html
from fleetfit.report.text import duration, percent, size, spent
from fleetfit.soundness import in_words

if TYPE_CHECKING:  # `import fleetfit` does without
    from rich.progress import Progress

ProgressOption = Literal["auto"] | bool
"""Whether progress is shown; "auto": in a notebook only."""
_LEVELS = 8  # whose accuracies are shown
_TITLE = 36  # characters of a title beside a bar


# ---- the facts -------------------------------------------------------------------------------------------------------


class RoundFacts:
    """The facts about a run that its reports so far have.

    Args:
        rounds: How many the run has.
        norm: The headline's batch-norm policy.
    """

    def __init__(self, rounds: int, norm: str) -> None:
        self.rounds, self.done = rounds, 0
        self._norm, self._seconds, self._count = norm, 0.0, 0
        self._bytes: int | None = 0
        self._report: Mapping[str, Any] = {}
        self._columns: Mapping[str, Any] = {}
        self._evaluated = 0

    def take(self, report: Mapping[str, Any]) -> None:
        """Take in the report of a round."""
        self._report, self.done = report, report["round"]
        self._seconds, self._count = self._seconds + report["seconds"], self._count + 1
        sent = report["bytes_down"], report["bytes_up"]
        self._bytes = None if None in sent or self._bytes is None else self._bytes + sum(sent)
        columns = report.get("evaluate", {}).get(self._norm)
        if columns:
            self._columns, self._evaluated = columns, self.done

    @property
    def seconds_left(self) -> float | None:
        """Wall seconds that are left, by the rounds seen; None before any was."""
        return (self.rounds - self.done) * self._seconds / self._count if self._count else None

    @property
    def left(self) -> str:
        """The same in words."""
        return f"{duration(self.seconds_left)} left" if self.seconds_left and self.done < self.rounds else ""

    @property
    def loss(self) -> str:
        """The loss of the last round; with `[privacy]`, what was spent."""
        if "privacy" in self._report:
            return spent(self._report["privacy"])
        loss = self._report.get("train", {}).get("loss")
        return f"loss {'-' if loss is None else f'{loss:.3f}'}"

    @property
    def cohort(self) -> str:
        """How many trained in the last round and how many brought nothing back; empty where it is withheld."""
        trained = self._report.get("train", {}).get("clients")
        if trained is None or "privacy" in self._report:
            return ""
        failed = len(self._report["failures"])
        return f"{trained} client{'' if trained == 1 else 's'}" + (f", {failed} failed" if failed else "")

    @property
    def sent(self) -> str:
        """The bytes sent both ways so far; empty where it is withheld."""
        return "" if self._bytes is None or "privacy" in self._report else f"{size(self._bytes)} sent"

    @property
    def undone(self) -> str:
        """Why the last round was undone, if it was."""
        return f"Round {self.done} was {in_words(self._report['undone'])}" if "undone" in self._report else ""

    @property
    def just_evaluated(self) -> bool:
        """Whether the last round was evaluated."""
        return bool(self._columns) and self._evaluated == self.done

    @property
    def accuracies(self) -> str:
        """The headline of the last evaluation."""
        if not self._columns:
            return ""
        told = ("avg", "full") if "privacy" in self._report else ("local", "global")
        return "  ".join(f"{name} {percent(self._columns.get(name))}%" for name in told)

    @property
    def by_level(self) -> str:
        """The accuracy of each level on its own clients in the last evaluation; empty where it is withheld."""
        levels = [(name, entry["local"]) for name, entry in self._columns.get("levels", {}).items()]
        known = [(name, local) for name, local in levels if local is not None]
        if len(levels) < 2 or not known:
            return ""
        first = [f"{truncate(name)} {percent(local)}%" for name, local in known[:_LEVELS]]
        return "by level: " + "  ".join(first) + ("  ..." if len(known) > _LEVELS else "")

    @property
    def measured(self) -> str:
        """The last evaluation with its round."""
        return f"{self.accuracies}  (round {self._evaluated})" if self._columns else ""

    @property
    def table(self) -> list[tuple[str, str]]:
        """The same as names and values, without those that are empty."""
        name, _, value = self.loss.partition(" ")
        columns = [(f"accuracy in round {self._evaluated}", self.accuracies), ("", self.by_level)]
        rows = [(name, value), ("cohort", self.cohort), ("sent", self.sent.removesuffix(" sent")), *columns]
        return [(name, value) for name, value in rows if value]


# ---- in a terminal, and in a pipe ------------------------------------------------------------------------------------


class RunProgress:
    """Shows the rounds of one run: a live bar in a terminal, else a line per round.

    Args:
        title: The beginning of each line.
        experiment: The experiment of the run.
        bars: The bars of a comparison, one for each run, which its owner closes; None: this run has its own.
        format_time_left: Returns the time left of the whole comparison, in words.
    """

    def __init__(
        self,
        title: str,
        experiment: Experiment,
        bars: "Progress | None" = None,
        format_time_left: Callable[[], str] = str,
    ) -> None:
        self._title, self._format_time_left = make_printable(title), format_time_left
        self.facts = RoundFacts(experiment.rounds, experiment.evaluate.norms[0])
        self._bar, self._is_alone = bars, bars is None
        if self._is_alone and sys.stdout.isatty():
            self._bar = make_bars()
            self._bar.start()
        if self._bar is not None:
            self._task = self._bar.add_task(self._title, total=experiment.rounds, what="", left="", below=())

    def __call__(self, report: Mapping[str, Any]) -> None:
        """Show a round's report."""
        facts = self.facts
        facts.take(report)
        if facts.undone:
            self._print(facts.undone)
        if self._bar is not None:
            self._draw()
            if facts.done == facts.rounds:
                self.close()
            return
        prefix = f"{self._title}  " if self._title else ""
        accuracies = facts.accuracies if facts.just_evaluated else ""
        parts = [f"round {facts.done}/{facts.rounds}", facts.loss, accuracies, facts.cohort, facts.sent, facts.left,
                 self._format_time_left()]  # fmt: skip
        self._print(prefix + "  ".join(filter(None, parts)))
        if facts.just_evaluated and facts.by_level:
            self._print(f"{prefix}  {facts.by_level}")

    def skip(self, report: Mapping[str, Any]) -> None:
        """Count a round without showing it."""
        self.facts.take(report)
        if self._bar is not None:
            self._draw()

    def _draw(self) -> None:
        assert self._bar is not None
        facts, time_left = self.facts, self._format_time_left()
        if self._is_alone:
            left = "  ".join(filter(None, [facts.left, time_left]))
            first = "  ".join(filter(None, [facts.loss, facts.cohort, facts.sent]))
            below = tuple(filter(None, (first, facts.measured, facts.by_level)))
            self._bar.update(self._task, completed=facts.done, left=left, below=below)
        else:
            for task in self._bar.tasks:  # the time left of the comparison is shown once, at the bottom
                self._bar.update(task.id, below=())
            what = facts.accuracies.partition("  ")[0] or facts.loss  # a line each: room for one number
            below = (time_left,) if time_left else ()
            self._bar.update(self._task, completed=facts.done, what=what, left=facts.left, below=below)

    def _print(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        text = make_printable(text)
        if self._bar is not None:
            self._bar.console.print(text, markup=False, soft_wrap=True, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None and self._is_alone:
            self._bar.stop()
            self._bar = None


def make_bars() -> "Progress":
    """Return bars for a terminal, with lines on the run below each; long lines are cut, not wrapped."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column
    from rich.text import Text

    class RoundBars(Progress):
        def get_renderables(self) -> Iterator[Any]:
            yield self.make_tasks_table(self.tasks)
            for task in self.tasks:
                for line in task.fields["below"]:
                    yield Text(f"  {line}", no_wrap=True, overflow="ellipsis")

    def text(what: str, most: int | None = None) -> TextColumn:
        column = Column(no_wrap=True, overflow="ellipsis", max_width=most)
        return TextColumn(what, markup=False, table_column=column)

    columns = (text("{task.description}", _TITLE), BarColumn(None), MofNCompleteColumn(), text("{task.fields[what]}"),
               text("{task.fields[left]}"))  # fmt: skip
    return RoundBars(*columns, expand=True)


# ---- in a notebook ---------------------------------------------------------------------------------------------------


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class NotebookProgress:
    """Shows rounds in a cell's output, which is written anew each time."""

    def __init__(self) -> None:
        from IPython import display

        shows: Any = display  # which carries no types
        self._html, self._handle = shows.HTML, shows.display(shows.HTML(""), display_id=True)

    def add_run(self, title: str, experiment: Experiment) -> Callable[[Mapping[str, Any]], None]:
        """Return what is called with each report of a run."""
        facts = RoundFacts(experiment.rounds, experiment.evaluate.norms[0])
        self._handle.update(self._html(format_html(title, facts)))

        def after_round(report: Mapping[str, Any]) -> None:
            facts.take(report)
            self._handle.update(self._html(format_html(title, facts, facts.left)))

        return after_round


def format_html(title: str, facts: RoundFacts, left: str = "") -> str:
    """Return the facts as HTML without colours of its own, for light and dark; `left` says how long it will take."""
    head = " · ".join(filter(None, [title, f"round {facts.done}/{facts.rounds}", left, facts.undone]))
    rows = "".join(
        f'<tr><td style="text-align:left">{escape_html(what)}</td>'
        f'<td style="text-align:left;white-space:pre-wrap">{escape_html(value)}</td></tr>'
        for what, value in facts.table
    )
    bar = f'<progress value="{facts.done}" max="{facts.rounds}" style="width:20em"></progress>'
    return f"<div>{bar} {escape_html(head)}<table>{rows}</table></div>"


# ---- what shows a run ------------------------------------------------------------------------------------------------


class RunLike(Protocol):
    """A run, as far as its progress needs it."""

    @property
    def experiment(self) -> Experiment:
        """The experiment with all defaults."""
        ...

    @property
    def folder(self) -> Path:
        """The run folder."""
        ...


class Display(Protocol):
    """Shows a run while it lasts."""

    def say(self, sentence: str) -> None:
        """Show what takes more than a moment before the first round."""

    def start(self, run: RunLike, notes: Sequence[str]) -> None:
        """Show that the first round begins.

        Args:
            run: The run.
            notes: Sentences that the user must see.
        """

    def show_round(self, report: Mapping[str, Any]) -> None:
        """Show the report of a round."""

    def show_result(self, summary: Mapping[str, Any]) -> None:
        """Show the content of `summary.json`; called before the plots are drawn."""

    def close(self) -> None:
        """Restore the terminal; called once, however the run ends."""


class _RoundDisplay:
    """Shows the rounds, in a notebook's cell or on stdout, or nothing."""

    def __init__(self, is_silent: bool) -> None:
        self._is_silent = is_silent
        self._show: Callable[[Mapping[str, Any]], None] | None = None

    def say(self, sentence: str) -> None:
        pass

    def start(self, run: RunLike, notes: Sequence[str]) -> None:
        if not self._is_silent:
            progress = NotebookProgress().add_run if is_notebook() else RunProgress
            self._show = progress("", run.experiment)

    def show_round(self, report: Mapping[str, Any]) -> None:
        if self._show is not None:
            self._show(report)

    def show_result(self, summary: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        if isinstance(self._show, RunProgress):
            self._show.close()


def make_display(progress: ProgressOption | Display) -> Display:
    """Return the display of a run that was started from Python."""
    if isinstance(progress, bool | str):
        return _RoundDisplay(is_silent=not (progress is True or (progress == "auto" and is_notebook())))
    return progress


def make_comparison_progress(
    progress: ProgressOption,
) -> Callable[[str, int, int, RunLike], Callable[[Mapping[str, Any]], None]] | None:
    """Return a function that shows each run of a comparison that was started from Python; None: nothing is shown."""
    if progress is False or (progress == "auto" and not is_notebook()):
        return None
    cell = NotebookProgress() if is_notebook() else None

    def show_run(title: str, number: int, count: int, run: RunLike) -> Callable[[Mapping[str, Any]], None]:
        heading = f"[{number}/{count}] {title}"
        return RunProgress(heading, run.experiment) if cell is None else cell.add_run(heading, run.experiment)

    return show_run

"""`python -m benchmarks`: what `--check` says of ratios beside those that were written down, and the table."""

import sys
import types

import pytest

from benchmarks import machine, measuring, written
from benchmarks.__main__ import PARTS, WHEN_NAMED, main
from benchmarks.measuring import Figure, alternate, ratio

WRITTEN = """
[toy."ours against theirs"]
value = 1.0
margin = 0.1
better = "lower"
machine = "some"

[toy."a speed-up"]
value = 2.0
margin = 0.1
better = "higher"
machine = "some"
"""


def figures(lower, higher):
    return [
        Figure("ours against theirs", lower, lower, lower, 1),
        Figure("a speed-up", higher, higher, higher, 1, better="higher"),
        Figure("seconds", 3.0, 3.0, 3.0, 1, unit="s"),
    ]


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Return a function that runs the command on a part `toy` with given figures: exit code and what it printed."""
    file = tmp_path / "written.toml"
    file.write_text(WRITTEN)
    monkeypatch.setattr(written, "FILE", file)
    monkeypatch.setitem(PARTS, "toy", "nothing")

    def run(source, *arguments):
        toy = types.ModuleType("benchmarks.toy")
        toy.figures = lambda options: iter(source) if isinstance(source, list) else source(options)
        monkeypatch.setitem(sys.modules, "benchmarks.toy", toy)
        code = main(["toy", *arguments])
        return code, capsys.readouterr().out

    run.file = file
    return run


def test_passes_within_the_margin(bench):
    code, output = bench(figures(1.099, 1.801), "--check")
    assert code == 0 and "bench-check: passed" in output and "FAILED" not in output


@pytest.mark.parametrize(
    ("lower", "higher", "complaint"),
    [
        (1.11, 2.0, "toy, ours against theirs: expected at most 1.100 (1.000 with a margin of 10.0%), found 1.110."),
        (1.0, 1.79, "toy, a speed-up: expected at least 1.800 (2.000 with a margin of 10.0%), found 1.790."),
        (float("nan"), 2.0, "toy, ours against theirs: expected at most 1.100"),
    ],
)
def test_figures_beyond_the_margin_fail(bench, lower, higher, complaint):
    code, output = bench(figures(lower, higher), "--check")
    assert code == 1 and complaint in output and "bench-check: FAILED" in output
    assert output.count("expected at ") == 1


def test_better_and_new_figures_pass(bench):
    measured = [*figures(0.8, 2.3), Figure("new", 1.0, 1.0, 1.0, 1)]
    code, output = bench(measured, "--check")
    assert code == 0
    assert "found 0.800, better than the 1.000 written down" in output
    assert "found 2.300, better than the 2.000 written down" in output
    assert "toy, new: 1.000 is not written down yet." in output


def test_another_processor_is_noted(bench):
    assert f"toy: written down on some, now on {machine.processor()}." in bench(figures(1.0, 2.0), "--check")[1]
    bench.file.write_text(WRITTEN.replace('"some"', f'"4 cores of {machine.processor()}, quiet"'))
    assert "written down on" not in bench(figures(1.0, 2.0), "--check")[1]


def test_a_written_figure_that_was_not_measured_fails(bench):
    code, output = bench(figures(1.0, 2.0)[1:], "--check")
    assert code == 1 and "toy, ours against theirs: written down as 1.000, but nothing was measured." in output


def test_a_part_that_raises_keeps_earlier_figures(bench):
    def broken(options):
        yield figures(1.0, 2.0)[0]
        raise OSError("no such thing")

    code, output = bench(broken)
    assert (
        code == 1
        and "toy failed: OSError: no such thing" in output
        and "| toy | ours against theirs | 1.000 |" in output
    )


def test_parts_without_figures_cannot_be_checked(bench):
    bench.file.write_text("")
    code, output = bench(figures(1.0, 2.0), "--check")
    assert code == 1 and "has no figure of these parts" in output


def test_write_keeps_margins_and_other_parts(bench):
    bench.file.write_text(WRITTEN + '[other.one]\nvalue = 3.0\nmargin = 0.2\nbetter = "lower"\nmachine = "some"\n')
    new = Figure("new", 1.0, 0.9, 1.3, 5)
    code, _ = bench([*figures(1.5, 1.9), new], "--write")
    before = written.read(bench.file)
    assert code == 0 and before["other"]["one"].value == 3.0
    assert {name: (entry.value, entry.margin) for name, entry in before["toy"].items()} == {
        "ours against theirs": (1.5, 0.1), "a speed-up": (1.9, 0.1), "new": (1.0, 0.3),
    }  # fmt: skip
    assert bench([*figures(1.6, 1.8), new], "--check")[0] == 0


def test_a_broken_entry_is_named(bench):
    bench.file.write_text("[toy.one]\nvalue = 1.0\n")
    with pytest.raises(ValueError, match=r"written.toml: toy, one: expected value, margin"):
        written.read(bench.file)
    bench.file.write_text("[toy.one]\nvalue = 1.0\nmargin = 0\n")
    with pytest.raises(ValueError, match=r"margin above 0"):
        written.read(bench.file)


def test_the_table_marks_missed_goals(bench):
    code, output = bench([Figure("one", 1.2, 1.1, 1.4, 5, wanted=1.04, detail="a | b")])
    assert code == 0
    assert "| toy | one | 1.200 | 1.100-1.400 | 5 | at most 1.04: **not met** | " in output and "a / b" in output


def test_unknown_parts_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        main(["toy", "rounds"])
    assert "there is no part rounds; there are round, " in capsys.readouterr().err


def test_sides_alternate():
    order = []
    assert len(list(alternate(lambda: order.append("a"), lambda: order.append("b"), 3))) == 3
    assert order == ["a", "b"] * 4


class Hands:
    """Clocks that move only where a side says so."""

    def __init__(self):
        self.cpu = self.wall = 0.0

    def process_time(self):
        return self.cpu

    def perf_counter(self):
        return self.wall

    def side(self, *cpu):
        """Return a side that takes so many CPU seconds, call by call, and ten times as many wall seconds."""
        left = list(cpu)

        def work():
            self.cpu += left[0]
            self.wall += 10 * left.pop(0)

        return work


def test_a_ratio_is_the_median_of_its_pairs(monkeypatch):
    """The pairs are 9/1 (unmeasured), 2/1, 3/1, 8/2 seconds: quotients 2, 3, 4; medians 3 s and 1 s."""
    hands = Hands()
    monkeypatch.setattr(measuring, "time", hands)
    figure = ratio("x", hands.side(9, 2, 3, 8), hands.side(1, 1, 1, 2), 3)
    assert (figure.value, figure.low, figure.high, figure.repetitions) == (3.0, 2.0, 4.0, 3)
    assert figure.detail == "3,000 ms against 1,000 ms; wall 3.000"


def test_every_written_figure_belongs_to_a_part():
    assert written.read().keys() <= PARTS.keys() | WHEN_NAMED.keys()


@pytest.mark.parametrize(("busy", "own", "verdict"), [(10.0, 9.0, "quiet"), (25.0, 10.0, "busy (1.5 cores)")])
def test_other_processes_work_is_noticed(monkeypatch, busy, own, verdict):
    """In ten seconds the machine works `busy` core seconds, of which `own` are ours."""
    clocks = {"_busy_s": busy, "_own_s": own, "_uptime_s": 10.0}
    for name in clocks:
        monkeypatch.setattr(machine, name, lambda: 100.0)
    watch = machine.Watch()
    for name, passed in clocks.items():
        monkeypatch.setattr(machine, name, lambda passed=passed: 100.0 + passed)
    assert watch.verdict() == verdict

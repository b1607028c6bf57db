"""`python -m benchmarks`: what `--check` says of ratios beside those that were written down, and the table."""

import re
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


OURS = "toy, ours against theirs"


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
        (1.11, 2.0, (OURS, "1.100", "1.000", "10.0%", "1.110")),
        (1.0, 1.79, ("toy, a speed-up", "1.800", "2.000", "10.0%", "1.790")),
        (float("nan"), 2.0, (OURS, "1.100")),
    ],
)
def test_figures_beyond_the_margin_fail(bench, lower, higher, complaint):
    code, output = bench(figures(lower, higher), "--check")
    assert code == 1 and "FAILED" in output
    (line,) = [line for line in output.splitlines() if "10.0%" in line]
    assert all(value in line for value in complaint)


def test_better_and_new_figures_pass(bench):
    measured = [*figures(0.8, 2.3), Figure("new", 1.0, 1.0, 1.0, 1)]
    code, output = bench(measured, "--check")
    assert code == 0
    lines = [line for line in output.splitlines() if not line.startswith("|")]
    for values in (("0.800", "1.000"), ("2.300", "2.000"), ("toy, new", "1.000")):
        assert any(all(value in line for value in values) for line in lines), values


def test_another_processor_is_noted(bench):
    def notes():
        return [line for line in bench(figures(1.0, 2.0), "--check")[1].splitlines() if "toy: " in line]

    (note,) = notes()
    assert "some" in note and machine.processor() in note
    bench.file.write_text(WRITTEN.replace('"some"', f'"4 cores of {machine.processor()}, quiet"'))
    assert notes() == []


def test_a_written_figure_that_was_not_measured_fails(bench):
    code, output = bench(figures(1.0, 2.0)[1:], "--check")
    assert code == 1 and "FAILED" in output and f"{OURS}: " in output


def test_a_part_that_raises_keeps_earlier_figures(bench):
    def broken(options):
        yield figures(1.0, 2.0)[0]
        raise OSError("gone")

    code, output = bench(broken)
    assert code == 1 and "OSError" in output and "| 1.000 |" in output


def test_parts_without_figures_cannot_be_checked(bench):
    bench.file.write_text("")
    code, output = bench(figures(1.0, 2.0), "--check")
    assert code == 1 and bench.file.name in output


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
    assert {"rounds", "round"} <= set(re.findall(r"\w+", capsys.readouterr().err))


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

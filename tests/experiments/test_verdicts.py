"""Verdicts on made-up claims and results, worked by hand; the page in docs/ is as the stored results say.

All made-up differences of three seeds are m - 1, m and m + 1: their mean is m, its standard error 1 / sqrt(3), so that
t^2 = 3 m^2; and with two degrees of freedom the two-sided p of a t is 1 - sqrt(t^2 / (t^2 + 2)), the 95% quantile
4.302653, half the interval 2.484138:

    m = 10    t^2 = 300      p = 0.003317    interval 7.52 to 12.48
    m = 3.3   t^2 = 32.67    p = 0.029273    interval 0.82 to 5.78
    m = 2     t^2 = 12       p = 0.074180    interval -0.48 to 4.48
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import raises

from experiments.verdicts import headline
from experiments.verdicts.__main__ import PAGE, ROOT, built, main
from fleetfit.errors import RunError

FILE = "small/made-up.toml"
Run = dict[str, Any]


def run(row: str, seed: int, final: dict[str, float] | None = None, **more: Any) -> Run:
    bare = {"seconds": 1.0, "speed": "fast", "digest": "", "rounds": 100, "final": {}, "curves": {"round": []}}
    return {**bare, "row": row, "setting": "", "seed": seed, "final": final or {}, **more}


def spread(row: str, mean: float, seeds: tuple[int, ...] = (0, 1, 2)) -> list[Run]:
    """Runs whose accuracy minus that of `flat` is mean - 1, mean, mean + 1."""
    return [run(row, seed, {"global": 50 + 7 * seed + mean + seed - 1}) for seed in seeds]


def flat(row: str = "Base") -> list[Run]:
    """Runs that differ between seeds much more than rows do: without pairing all verdicts were inconclusive."""
    return [run(row, seed, {"global": 50.0 + 7 * seed}) for seed in (0, 1, 2)]


def claim(name: str, body: str) -> str:
    return f'[[table.claim]]\nid = "{name}"\nsays = "Says {name}."\ncolumn = "global"\n{body}\n'


def above(name: str, greater: str, lesser: str = "Base") -> str:
    return claim(
        name, f'greater = {{ row = "{greater}", printed = 85.5 }}\nlesser = {{ row = "{lesser}", printed = 84.0 }}'
    )


def table(*claims: str, title: str = "Table 1", file: str = FILE, paper: str = "Paper", family: str = "") -> str:
    head = f'paper = "{paper}"\ntitle = "{title}"\nfile = "{file}"\nfamily = "{family}"\n'
    return f"[[table]]\n{head}" + "\n".join(claims)


class Repository:
    """A folder with claims and results, and what becomes of them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "experiments" / "results").mkdir(parents=True)
        (root / "docs").mkdir()

    def claims(self, *tables: str) -> None:
        (self.root / "experiments" / "claims.toml").write_text("\n".join(tables))

    def results(self, runs: list[Run], name: str = "made-up", file: str = FILE, **more: Any) -> None:
        stored = {"format": 1, "name": name, "file": f"experiments/{file}", "versions": {}, "machine": {},
                  "against": "", "settings_of_file": {}, "runs": runs, **more}  # fmt: skip
        (self.root / "experiments" / "results" / f"{name}.json").write_text(json.dumps(stored))

    @property
    def page(self) -> str:
        return built(self.root)[0]

    def judged(self) -> dict[str, list[str]]:
        """Return paper's size, ours, seeds, p and verdict by the claim's id."""
        rows = re.findall(r"^\| [^|]*\(`([^`]+)`\) \| (.+) \|$", self.page, re.MULTILINE)
        return {name: cells.replace("**", "").split(" | ") for name, cells in rows}

    def verdicts(self) -> dict[str, str]:
        return {name: cells[-1] for name, cells in self.judged().items()}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_holms_correction_is_within_a_table(repository: Repository) -> None:
    """0.003317 x 3; 0.029273 x 2, above 0.05 though its interval excludes zero; 0.074180 x 1.

    Alone, the second holds.
    """
    repository.claims(
        table(above("clear", "Ten"), above("near", "Three"), above("far", "Two")),
        table(above("alone", "Three"), title="Table 2"),
    )
    repository.results([*flat(), *spread("Ten", 10), *spread("Three", 3.3), *spread("Two", 2)])
    assert repository.judged() == {
        "clear": ["+1.50 pp", "+10.00 pp [+7.52, +12.48]", "3", "0.010", "holds"],
        "near": ["+1.50 pp", "+3.30 pp [+0.82, +5.78]", "3", "0.059", "inconclusive"],
        "far": ["+1.50 pp", "+2.00 pp [-0.48, +4.48]", "3", "0.074", "inconclusive"],
        "alone": ["+1.50 pp", "+3.30 pp [+0.82, +5.78]", "3", "0.029", "holds"],
    }
    assert "| [Paper](#paper) | 4 | 2 | 0 | 2 | 0 |" in repository.page


def test_tables_of_one_family_are_corrected_together(repository: Repository) -> None:
    """As above, on two files: 0.003317 x 3, 0.029273 x 2, 0.074180 x 1."""
    other = "small/other.toml"
    repository.claims(
        table(above("clear", "Ten"), family="lead"),
        table(above("alone", "Three"), title="Table 2"),
        table(above("near", "Three"), above("far", "Two"), title="Table 3", file=other, family="lead"),
    )
    repository.results([*flat(), *spread("Ten", 10), *spread("Three", 3.3)])
    repository.results([*flat(), *spread("Three", 3.3), *spread("Two", 2)], "other", other)
    assert {name: cells[3] for name, cells in repository.judged().items()} == {
        "clear": "0.010", "alone": "0.029", "near": "0.059", "far": "0.074",
    }  # fmt: skip


def test_own_claims_have_no_paper_and_are_not_counted_among_those_of_papers(repository: Repository) -> None:
    own = claim("own", 'greater = { row = "Ten" }\nlesser = { row = "Base" }')
    repository.claims(table(own, paper="FleetFit"), table(above("clear", "Ten"), title="Table 2"))
    repository.results([*flat(), *spread("Ten", 10)])
    assert repository.judged()["own"] == ["+10.00 pp [+7.52, +12.48]", "3", "0.003", "holds"]
    assert "Of 1 claims of papers" in headline.evidence(built(repository.root)[2], "docs/")


def test_a_corrected_p_is_never_below_a_smaller_one(repository: Repository) -> None:
    """0.029273 x 2 = 0.058546 for the smaller; the larger, 0.031 x 1, is raised to it."""
    repository.claims(table(above("smaller", "Three"), above("larger", "Less")))
    repository.results([*flat(), *spread("Three", 3.3), *spread("Less", 3.2)])
    assert [cells[3] for cells in repository.judged().values()] == ["0.059", "0.059"]


def test_missing_runs_are_named(repository: Repository) -> None:
    repository.claims(
        table(above("one-seed", "Ten"), above("no-row", "Nobody"), above("no-seed", "Elsewhere"),
              above("no-column", "Ten").replace('"global"', '"avg"')),
        table(above("no-file", "Ten"), title="Table 2", file="small/other.toml"),
    )  # fmt: skip
    repository.results([*flat(), *spread("Ten", 10, (1,)), *spread("Elsewhere", 10, (8, 9))])
    assert set(repository.verdicts().values()) == {"not run"}
    for name, values in {
        "`one-seed`": (),
        "`no-row`": ('"Nobody"', f"`experiments/{FILE}`"),
        "`no-seed`": (),
        "`no-column`": ('"Ten"', f"`experiments/{FILE}`", '"avg"'),
        "all": ("`experiments/small/other.toml`",),
    }.items():
        (line,) = (line for line in repository.page.splitlines() if line.startswith(f"- {name}: not run: "))
        assert all(value in line for value in values)
    assert repository.judged()["one-seed"][1] == "+10.00 pp", "what there is is shown, without an interval"


def test_the_weakest_difference_decides_a_claim(repository: Repository) -> None:
    """All have to hold: 0.074180 where one of them is 2. One that is -10 contradicts it: 0.003317 x 2."""
    last = """greater = [{{ row = "Ten", printed = 9.0 }}, {{ row = "{}", printed = 8.0 }}]
              lesser = {{ row = "Base", printed = 5.0 }}"""
    repository.claims(
        table(claim("all-hold", last.format("Nine"))),
        table(claim("one-open", last.format("Two")), title="Table 2"),
        table(claim("one-against", last.format("Below")), title="Table 3"),
    )
    repository.results([*flat(), *(r for name, mean in {"Ten": 10, "Nine": 9, "Two": 2, "Below": -10}.items()
                                   for r in spread(name, mean))])  # fmt: skip
    verdicts = repository.judged()
    assert verdicts["all-hold"][:2] == [
        "+3.00 pp",
        "+9.00 pp [+6.52, +11.48]; of 2: Nine over Base (global)",
    ]
    assert verdicts["all-hold"][-1] == "holds"
    repository.claims(table(claim("other-decides", last.format("Eleven"))))
    repository.results([*flat(), *spread("Ten", 10), *spread("Eleven", 11)])
    assert repository.judged()["other-decides"][0] == "+4.00 pp", "9 - 5 is Ten's, though Eleven's 8 - 5 is smaller"
    repository.results([*flat(), *spread("Ten", 10)])
    assert repository.judged()["other-decides"][0].startswith("+3.00 pp "), "of what was not run the smallest"
    assert verdicts["one-open"][1:] == [
        "+2.00 pp [-0.48, +4.48]; of 2: Two over Base (global)", "3", "0.074", "inconclusive",
    ]  # fmt: skip
    assert verdicts["one-against"][1:] == [
        "-10.00 pp [-12.48, -7.52]; of 2: Below over Base (global)", "3", "0.007", "contradicted",
    ]  # fmt: skip


def test_a_chain_is_the_pairs_of_neighbors(repository: Repository) -> None:
    repository.claims(table(claim("chain", 'chain = [{ row = "Twenty" }, { row = "Ten" }, { row = "Base" }]')))
    runs = [*flat(), *spread("Ten", 10)]
    repository.results([*runs, *(run("Twenty", s, {"global": 70.0 + 7 * s + 2 * (s - 1)}) for s in (0, 1, 2))])
    assert repository.verdicts() == {"chain": "holds"}
    repository.results([*runs, *spread("Twenty", -5)])
    assert repository.verdicts()["chain"] != "holds"


def test_one_difference_is_larger_than_another(repository: Repository) -> None:
    """(A - B) - (C - D) is 9, 10, 11; the paper's (9 - 5) - (4 - 3) is 3."""
    body = """wider = [[{ row = "A", printed = 9.0 }, { row = "B", printed = 5.0 }],
                        [{ row = "C", printed = 4.0 }, { row = "D", printed = 3.0 }]]"""
    repository.claims(table(claim("wider", body)))
    ours = {"A": (70, 81, 92), "B": (50, 57, 64), "C": (43, 48, 50), "D": (32, 34, 33)}
    repository.results(
        [run(row, s, {"global": float(v)}) for row, values in ours.items() for s, v in enumerate(values)]
    )
    assert repository.judged()["wider"] == ["+3.00 pp", "+10.00 pp [+7.52, +12.48]", "3", "0.003", "holds"]


def test_how_much_may_be_lost_and_how_much_must_be_won(repository: Repository) -> None:
    """Ten below, where eleven may be lost: -10 - (-11) = 1, t^2 = 3, p = 0.225. Thirty may be: 20, p = 0.001."""
    repository.claims(
        table(claim("little", 'greater = { row = "Below" }\nlesser = { row = "Base" }\nby = -11.0')),
        table(claim("much", 'greater = { row = "Below" }\nlesser = { row = "Base" }\nby = -30.0'), title="Table 2"),
    )
    repository.results([*flat(), *spread("Below", -10)])
    verdicts = repository.judged()
    assert verdicts["little"][3:] == ["0.225", "inconclusive"]
    assert verdicts["much"] == [
        "order only; claimed: loses under 30 pp", "-10.00 pp [-12.48, -7.52]", "3", "<0.001", "holds",
    ]  # fmt: skip


def test_all_seeds_alike_give_no_interval(repository: Repository) -> None:
    repository.claims(table(above("alike", "Same")))
    repository.results([*flat(), *(run("Same", s, {"global": 51.0 + 7 * s}) for s in (0, 1, 2))])
    assert repository.verdicts() == {"alike": "inconclusive"}


def test_numbers_without_chance_need_one_run(repository: Repository) -> None:
    body = """measure = "ratio"
              exact = true
              by = 3.6
              greater = { row = "A", column = "size 4", printed = 8.0 }
              lesser = { row = "A", column = "size 2", printed = 2.0 }"""
    repository.claims(table(claim("smaller", body), claim("too-much", body.replace("3.6", "5.0"))))
    repository.results([run("A", 0, {"size 4": 400.0, "size 2": 100.0})])
    verdicts = repository.judged()
    assert verdicts["smaller"] == ["4.00x; claimed: at least 3.6x", "4.00x", "1", "exact", "holds"]
    assert verdicts["too-much"][-1] == "contradicted"
    repository.results([run("A", 0, {"size 4": 400.0, "size 2": 0.0})])
    assert set(repository.verdicts().values()) == {"inconclusive"}


# ---- rounds to a target ----------------------------------------------------------------------------------------------

RATIO = """measure = "ratio"
greater = {{ row = "Slow", column = "rounds", printed = 600.0 }}
lesser = {{ row = "Fast", column = "rounds", printed = 20.0 }}
{}"""


def timed(row: str, values: list[float | None], first: int = 1) -> list[Run]:
    """Runs that reach a target in so many rounds; None: not at all, and then the number is absent."""
    return [run(row, seed, {} if value is None else {"rounds_to_90": value}, rounds=500,
                curves={"round": [first, 500], "global": [1.0, 2.0]}) for seed, value in enumerate(values)]  # fmt: skip


def test_rounds_are_compared_as_ratios(repository: Repository) -> None:
    """8, 16 and 32 times: with logarithms to base 2 m = 4, t^2 = 48, p = 0.020204; half the interval is 2.484138."""
    repository.claims(
        table(claim("ratio", RATIO.format(""))), table(claim("ten", RATIO.format("by = 10.0")), title="B")
    )
    repository.results([*timed("Slow", [80.0, 160.0, 320.0]), *timed("Fast", [10.0, 10.0, 10.0])])
    verdicts = repository.judged()
    assert verdicts["ratio"] == ["30.0x", "16.0x [2.86x, 89.5x]", "3", "0.020", "holds"]
    assert verdicts["ten"][-1] == "inconclusive"


def test_missing_the_target_is_at_least_slower(repository: Repository) -> None:
    """250 / 10, 500 / 10 and 500 / 11: the third root of 25 x 50 x 45.45 is 38.4."""
    repository.claims(table(claim("ratio", RATIO.format(""))))
    repository.results([*timed("Slow", [250.0, None, None]), *timed("Fast", [10.0, 10.0, 11.0])])
    verdict = repository.judged()["ratio"]
    assert verdict[1].startswith("at least 38.4x [")
    assert verdict[-1] == "holds"


def test_a_fast_row_that_never_arrives_shows_nothing(repository: Repository) -> None:
    """However slow the other is: 500 rounds are the least that the fast one would take."""
    repository.claims(table(claim("ratio", RATIO.format(""))))
    repository.results([*timed("Slow", [9000.0, 9100.0, 9300.0]), *timed("Fast", [None, None, None])])
    assert repository.verdicts() == {"ratio": "inconclusive"}
    repository.results([*timed("Slow", [None, None, None]), *timed("Fast", [None, None, None])])
    assert repository.verdicts() == {"ratio": "inconclusive"}


def test_a_target_that_is_reached_at_once_shows_nothing(repository: Repository) -> None:
    repository.claims(table(claim("ratio", RATIO.format(""))))
    repository.results([*timed("Slow", [80.0, 160.0, 320.0]), *timed("Fast", [5.0, 6.0, 7.0], first=5)])
    assert repository.verdicts() == {"ratio": "inconclusive"}
    assert '"Fast"' in repository.page


# ---- levels and exits, files -----------------------------------------------------------------------------------------


def test_levels_and_exits_are_columns(repository: Repository) -> None:
    body = 'greater = {{ row = "A", column = "{}" }}\nlesser = {{ row = "A", column = "{}" }}'
    repository.claims(
        table(
            claim("levels", body.format("level 4", "level 1")), claim("exits", body.format("exit last", "exit first"))
        )
    )
    repository.results([
        run("A", s, per_level={"1": 40.0, "4": 50.0 + s - 1}, per_exit={"2": 20.0, "9": 25.0, "10": 32.0 + s - 1})
        for s in (0, 1, 2)
    ])  # fmt: skip
    verdicts = repository.judged()
    assert [verdicts[name][1] for name in ("levels", "exits")] == [
        "+10.00 pp [+7.52, +12.48]",
        "+12.00 pp [+9.52, +14.48]",
    ]


def test_seeds_of_one_experiment_may_lie_in_two_files(repository: Repository) -> None:
    repository.claims(table(above("both", "Ten")))
    ten = spread("Ten", 10)
    repository.results([*flat()[:2], *ten[:2]], "first", settings_of_file={"local": {"lr": 1}, "engine": 1})
    repository.results([flat()[2], ten[2]], "second", settings_of_file={"local": {"lr": 1}, "engine": 2})
    assert repository.judged()["both"][1:] == ["+10.00 pp [+7.52, +12.48]", "3", "0.003", "holds"]
    assert "[first.json](../experiments/results/first.json), [second.json]" in repository.page


def test_conflicting_or_repeated_files_are_refused(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.claims(table(above("both", "Ten")))
    repository.results(flat(), "first", settings_of_file={"local": 5})
    repository.results(spread("Ten", 10), "second", settings_of_file={"local": 6})
    assert main([], repository.root) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("first.json", "second.json", f"experiments/{FILE}", "(local)"))
    repository.results([*spread("Ten", 10), flat()[1]], "second", settings_of_file={"local": 5})
    assert main([], repository.root) == 2
    error = capsys.readouterr().err
    assert all(name in error for name in ("first.json", "second.json", '"Base", seed 1', f"experiments/{FILE}"))
    assert not (repository.root / PAGE).exists()


def test_compared_experiments_share_their_settings(repository: Repository) -> None:
    body = 'greater = { row = "Ten", file = "small/other.toml" }\nlesser = { row = "Base" }'
    repository.claims(table(claim("across", body)))
    repository.results(flat(), settings_of_file={"local": 5, "method": 1, "evaluate": {"every": 5}})
    other = {"local": 5, "evaluate": {"every": 9}}
    repository.results(spread("Ten", 10), "other", "small/other.toml", settings_of_file=other)
    assert repository.verdicts() == {"across": "holds"}
    repository.results(spread("Ten", 10), "other", "small/other.toml", settings_of_file=other | {"local": 6})
    assert repository.verdicts() == {"across": "inconclusive"}
    assert re.search(rf"`experiments/small/other.toml` .*`experiments/{FILE}` .* local\b", repository.page)
    longer = [one | {"rounds": 200} for one in spread("Ten", 10)]
    repository.results(longer, "other", "small/other.toml", settings_of_file=other)
    assert repository.verdicts() == {"across": "inconclusive"}
    assert re.search(rf"`experiments/small/other.toml` .*`experiments/{FILE}` .* rounds\b", repository.page)
    repository.claims(table(claim("across", body + "\nrounds_differ = true")))
    assert repository.verdicts() == {"across": "holds"}


def test_seeds_of_a_row_have_the_same_rounds(repository: Repository) -> None:
    repository.claims(table(above("rows", "Ten")))
    longer = [one | {"rounds": 200} for one in spread("Ten", 10)]
    repository.results([*flat(), *spread("Ten", 10, (0, 1)), longer[2]])
    with raises(RunError, "200"):
        repository.verdicts()
    repository.results([*flat(), *spread("Ten", 10, (0, 1)), longer[2]], settings_of_file={"evaluate": {"patience": 2}})
    assert repository.verdicts() == {"rows": "holds"}, "early stopping ended one"


def test_the_page_has_runs_and_differences(repository: Repository) -> None:
    repository.claims(table(above("clear", "Ten")))
    partition = {"kind": "dirichlet", "alpha": 100.0, "clients": 50}
    settings = {
        "model": {"name": "resnet20"}, "local": {"epochs": 2, "lr": 0.1},
        "data": {"name": "cifar10", "samples": 10000, "resize": 16, "partition": partition},
    }  # fmt: skip
    repository.results([*flat(), *(one | {"rounds": 75} for one in spread("Ten", 10))], settings_of_file=settings)
    (repository.root / "experiments" / "small").mkdir()
    (repository.root / "experiments" / FILE).write_text('[compare]\nnote = "ResNet-20 for ResNet-110."\n')
    (line,) = (line for line in repository.page.splitlines() if "Settings: " in line)
    parts = ("resnet20", "cifar10", "16x16", "10000 ", "50 clients (dirichlet, alpha = 100)", "75 or 100 rounds",
             "2 local epochs", "0.1")  # fmt: skip
    assert all(part in line for part in parts) and "ResNet-20 for ResNet-110." in repository.page


def test_settings_of_all_runs_are_shown(repository: Repository) -> None:
    repository.claims(table(above("clear", "Ten")))
    partition = {"kind": "dirichlet", "alpha": 5.0, "clients": 50}
    settings = {"local": {"epochs": 1, "lr": 0.1}, "cohort": {"fraction": 0.2}, "data": {"partition": partition}}
    skewed = {"overrides": {"data.partition.alpha": 1.0, "local.epochs": 20}, "tuned": {"local.lr": 0.03}}
    even = {"overrides": {"data.partition.alpha": 100.0, "cohort.count": 1}, "tuned": {"local.lr": 0.003}}
    runs = [*(one | even for one in flat()), *(one | skewed for one in spread("Ten", 10))]
    repository.results(runs, settings_of_file=settings)
    (line,) = (line for line in repository.page.splitlines() if "Settings: " in line)
    parts = ("50 clients (dirichlet, alpha = 1 or 100)", "0.2", "100 rounds", "1 or 20 local epochs", "0.003 or 0.03")
    assert all(part in line for part in parts)
    runs = [
        one | {"tuned": {"local.lr": lr}} for one, lr in zip([*flat(), *spread("Ten", 10)], range(1, 7), strict=True)
    ]
    repository.results(runs, settings_of_file=settings)
    assert "1 local epoch, learning rate 1 to 6.\n" in repository.page


# ---- figures ---------------------------------------------------------------------------------------------------------


def drawable(row: str, shift: float) -> list[Run]:
    return [
        run(row, s, {"global": 50 + 7 * s + shift + s * (shift > 0)}, per_level={"1": 40.0 + shift, "2": 45.0},
            per_exit={"1": 30.0, "2": 33.0}, curves={"round": [5, 10], "global": [20.0, 30.0 + shift]})
        for s in (0, 1, 2)
    ]  # fmt: skip


TWO_LEVELS = [
    {"row": row, "setting": "", "level": str(n), "width": n / 2, "depth": n, "blocks": 2, "parameters": 100 * n,
     "multiply_adds": 1000 * n}
    for row in ("HeteroFL", "ScaleFL") for n in (1, 2)
]  # fmt: skip


def test_figures_are_drawn_named_and_the_same_each_time(repository: Repository) -> None:
    repository.claims(table(above("clear", "ScaleFL", "HeteroFL")))
    repository.results([*drawable("HeteroFL", 0.0), *drawable("ScaleFL", 10.0)], levels=TWO_LEVELS)
    folder = repository.root / PAGE.with_suffix("")
    assert main([], repository.root) == 0
    first = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(first) == {
        "effects-paper.svg", "small-made-up-rounds.svg", "small-made-up-exits.svg", "small-made-up-levels.svg",
        "small-made-up-shapes.svg",
    }  # fmt: skip
    assert set(re.findall(r"\]\(results/([\w.-]+)\)", (repository.root / PAGE).read_text())) == set(first)
    assert main([], repository.root) == 0
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == first
    repository.results([*flat("HeteroFL"), *spread("ScaleFL", 10)])
    assert main([], repository.root) == 0
    assert {path.name for path in folder.iterdir()} == {"effects-paper.svg"}, "old ones go"


def _luminance(color: str) -> float:
    """WCAG's relative luminance of "#rrggbb"."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_figures_are_readable_in_dark_mode() -> None:
    """Lines and text have WCAG's contrast of 3 to 1 with the dark ground."""
    for path in sorted((ROOT / PAGE.with_suffix("")).glob("*.svg")):
        text = path.read_text()
        dark = dict(re.findall(r'\[style\*="(?:fill|stroke): (#\w+)"\] { \w+: (#\w+) !important }', text))
        used = set(re.findall(r"(?:fill|stroke): (#\w{6})[;\"]", text.partition("</style>")[2]))
        assert used and used <= set(dark), path.name
        ground = _luminance(dark["#ffffff"])
        lines = {color: _luminance(dark[color]) for color in used - {"#ffffff", "#d9dee4"}}  # not the grid
        assert not [color for color, light in lines.items() if (light + 0.05) / (ground + 0.05) < 3], path.name
        assert ground < 0.02


def test_compared_exits_are_drawn(repository: Repository) -> None:
    runs = [*flat("HeteroFL"), *drawable("ScaleFL", 10.0)]

    def exits() -> set[str]:
        return {one.name for one in built(repository.root)[1] if one.name.endswith("-exits.svg")}

    repository.results(runs)
    repository.claims(table(above("clear", "ScaleFL", "HeteroFL")))
    assert exits() == set()
    deeper = 'greater = { row = "ScaleFL", column = "exit 2" }\nlesser = { row = "ScaleFL", column = "exit 1" }'
    repository.claims(table(above("clear", "ScaleFL", "HeteroFL"), claim("deeper", deeper)))
    assert exits() == {"small-made-up-exits.svg"}
    repository.results([*drawable("HeteroFL", 0.0), *drawable("ScaleFL", 10.0)])
    repository.claims(table(above("clear", "ScaleFL", "HeteroFL")))
    assert exits() == {"small-made-up-exits.svg"}, "two rows have some"


# ---- what was written after the runs, and the numbers behind it ------------------------------------------------------


def test_later_claims_are_judged_apart(repository: Repository) -> None:
    """0.029273 alone in its table, and 0.003317 alone among the later ones: neither is multiplied by two."""
    later = above("later", "Ten").replace("[[table.claim]]", "[[table.also]]")
    repository.claims(
        table(above("alone", "Three"), later).replace('title = "Table 1"', 'title = "Table 1"\nlater = "Found since."')
    )
    repository.results([*flat(), *spread("Ten", 10), *spread("Three", 3.3)])
    judged = repository.judged()
    assert judged["alone"][3:] == ["0.029", "holds"]
    assert judged["later"][3:] == ["0.003", "holds"]
    assert "| [Paper](#paper) | 1 | 1 | 0 | 0 | 0 |" in repository.page
    assert len(built(repository.root)[2]) == 1
    assert repository.page.count("Found since.") == 1
    assert (
        repository.page.index("(`alone`)")
        < repository.page.index("not counted:\n\n")
        < repository.page.index("(`later`)")
    )


def test_later_claims_need_an_id_and_a_column(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    later = above("one", "Ten").replace("[[table.claim]]", "[[table.also]]")
    repository.claims(table(above("one", "Ten"), later))
    assert main([], repository.root) == 2
    assert '"one"' in capsys.readouterr().err
    repository.claims(table(above("one", "Ten"), later.replace('"one"', '"two"').replace('column = "global"\n', "")))
    assert main([], repository.root) == 2
    assert 'claim "two", row "Ten": no column' in capsys.readouterr().err


def test_every_row_shows_its_tuned_values(repository: Repository) -> None:
    """Of 50, 57 and 64 mean and standard deviation are 57 and 7; of 70, 78 and 86 they are 78 and 8."""
    repository.claims(table(above("clear", "Ten")), table(above("again", "Ten"), title="Table 2"))
    runs = [
        *flat(),
        *[run("Ten", s, {"global": 70.0 + 8 * s}) for s in (0, 1, 2)],
        run("Not claimed", 0, {"global": 2.5}),
    ]
    tried = [{"values": {"local.lr": lr}, "score": 1.0, "seed": 3} for lr in (0.1, 0.3, 0.01)]
    chosen = [("Base", 0.1), ("Ten", 0.3)]
    tuning = [{"row": row, "setting": "", "chosen": {"local.lr": lr}, "candidates": tried} for row, lr in chosen]
    repository.results(runs, tuning=tuning)
    expected = """\
| row | learning rate | seeds | global |
| --- | --- | --- | --- |
| Base | 0.1 | 3 | 57.0 ± 7.0 |
| Ten | 0.3, the largest of 3 | 3 | 78.0 ± 8.0 |
| Not claimed | - | 1 | 2.50 |
"""
    assert repository.page.replace("\u00a0", " ").count(expected) == 1, "once, though two tables are judged by it"


def test_compared_rows_of_other_experiments_follow(repository: Repository) -> None:
    other = 'lesser = { row = "Base", file = "small/other.toml" }'
    repository.claims(table(claim("across", f'greater = {{ row = "Ten" }}\n{other}\nrounds_differ = true')))
    tried = [{"values": {"local.lr": lr}, "score": 1.0, "seed": 3} for lr in (0.1, 0.3)]
    tuning = [
        {"row": "Base", "setting": "", "chosen": {"local.lr": 0.1, "local.optimizer": "adamw"}, "candidates": tried}
    ]
    repository.results(spread("Ten", 10))
    repository.results([*flat(), *flat("Not compared")], name="other", file="small/other.toml", tuning=tuning)
    expected = """\
| row | learning rate | local.optimizer | seeds | global |
| --- | --- | --- | --- | --- |
| Ten | - | - | 3 | 67.0 ± 8.0 |
| Base (other) | 0.1, the smallest of 2 | adamw | 3 | 57.0 ± 7.0 |
"""
    assert expected in repository.page.replace("\u00a0", " ") and "Not compared" not in repository.page


def test_one_row_reads_downwards(repository: Repository) -> None:
    body = """greater = { row = "Ten", column = "exit last" }
              lesser = [{ row = "Ten", column = "exit 10" }, { row = "Ten", column = "exit 9" }]"""
    beside = table().rstrip() + '\nbeside = ["waste", "exit first"]\n'
    repository.claims(beside + claim("own", body))
    runs = [run("Ten", s, {"waste": 2.5}, per_exit={"9": 1.0 + s, "10": 10.0, "11": 20.0}) for s in (0, 1)]
    repository.results(runs)
    expected = """\
|  | Ten |
| --- | --- |
| exit first | 1.50 ± 0.71 |
| exit 9 | 1.50 ± 0.71 |
| exit 10 | 10.0 |
| exit last | 20.0 |
| waste | 2.50 |
"""
    assert expected in repository.page.replace("\u00a0", " ")
    repository.results([*runs, run("Two", 0, {"waste": 3.0})])
    assert "| row | seeds | exit first | exit 9 | exit 10 | exit last | waste |\n" in repository.page


def test_each_experiment_is_described_once(repository: Repository) -> None:
    repository.claims(table(above("one", "Ten")), table(above("two", "Ten"), title="Table 2"))
    repository.results([*(one | {"seconds": 1800.0} for one in flat()), *spread("Ten", 10)])
    (repository.root / "experiments" / "small").mkdir()
    (repository.root / "experiments" / FILE).write_text('[compare]\nnote = "All of it."\n')
    (repository.root / "experiments" / "LOG.md").write_text(
        "## A trial (`small/made-up.toml`)\n\n## Paper's Table 1, judged (`small/made-up.toml`, three seeds)\n"
    )
    log = "[log](../experiments/LOG.md#papers-table-1-judged-smallmade-uptoml-three-seeds)"
    assert (
        f"results: [made-up.json](../experiments/results/made-up.json); {log}; 6 runs, 1.5 core-hours."
        in repository.page
    )
    assert "In all: 6 runs, 1.5 core-hours" in repository.page
    assert repository.page.count("All of it.") == 1
    assert repository.page.count(f"Experiment: [experiments/{FILE}](../experiments/{FILE}), as above.\n") == 1


def test_models_that_were_measured_are_no_runs(repository: Repository) -> None:
    other = "small/measured.toml"
    repository.claims(table(above("one", "Ten")), table(above("two", "Ten"), title="Table 2", file=other))
    repository.results([*flat(), *spread("Ten", 10)])
    repository.results([one | {"seconds": 0.0} for one in (*flat(), *spread("Ten", 10))], name="measured", file=other)
    assert "](../experiments/results/measured.json); " in repository.page
    assert "In all: 6 runs, 0.0 core-hours" in repository.page


def test_a_chapter_has_the_notes_on_its_paper(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.claims('[about]\nPaper = "Know this."\n', table(above("one", "Ten")))
    assert "\n## Paper\n\nKnow this.\n\n" in repository.page
    repository.claims('[about]\nPapre = "Know this."\n', table(above("one", "Ten")))
    assert main([], repository.root) == 2
    assert '"Papre"' in capsys.readouterr().err


def test_critiques_are_counted_apart(repository: Repository) -> None:
    (repository.root / "README.md").write_text(f"{headline.BEGIN}\n{headline.END}\n")
    own, suggested = table(above("one", "Ten"), above("two", "Ten")), table(above("three", "Ten"), title="2")
    repository.claims(own, suggested.replace('"Paper"', '"Critique of Paper"'))
    assert main([], repository.root) == 0
    page = " ".join((repository.root / "README.md").read_text().split())
    sentence = page.partition(headline.BEGIN)[2].partition(headline.END)[0]
    assert [number for number in map(int, re.findall(r"\b\d+\b", sentence)) if number] == [2, 1, 3]


def test_only_compared_settings_are_shown(repository: Repository) -> None:
    even = claim("even", 'setting = "even"\ngreater = { row = "Ten" }\nlesser = { row = "Base" }')
    skewed = even.replace("even", "skewed")
    runs = [one | {"setting": name} for name in ("even", "skewed") for one in (*flat(), *spread("Ten", 10))]
    repository.results(runs)
    repository.claims(table(even))
    assert repository.page.count("All rows (even)") == 1 and "\n\n| row | seeds | global |\n" in repository.page
    repository.claims(table(even, skewed))
    assert "\n\n| setting | row | seeds | global |\n" in repository.page
    repository.claims(table(even), table(even.replace('"even"', '"again"', 1), title="2"), table(skewed, title="3"))
    assert repository.page.count("All rows (even)") == 1
    assert repository.page.count("All rows (skewed)") == 1


def test_missed_targets_are_shown_as_at_least(repository: Repository) -> None:
    body = 'measure = "ratio"\ngreater = { row = "Slow" }\nlesser = { row = "Quick" }'
    repository.claims(table(claim("rounds", body).replace('"global"', '"rounds"')))
    quick = [run("Quick", s, {"rounds_to_90": 20.0 + s}) for s in (0, 1, 2)]
    repository.results([*quick, *[run("Slow", s, {} if s else {"rounds_to_90": 70.0}) for s in (0, 1, 2)]])
    assert "| Quick | 3 | 21.0 ± 1.0 |\n| Slow | 3 | at least 90.0 ± 17.3 |\n" in repository.page.replace("\u00a0", " ")


# ---- what is wrong is said -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "mention"),
    [
        (table(above("a", "X"), above("a", "Y")), '"a"'),
        (table(claim("a", 'greater = { row = "X" }')), '"a": greater and lesser '),
        (table(claim("a", "by = 1.0")), "pairs, chain, wider"),
        (table(above("a", "X").replace("column", "colum")), '"a", colum: '),
        (table(above("a", "X").replace("row", "rwo", 1)), '"a", greater, rwo: '),
        (table(above("a", "X").replace('column = "global"', "")), 'claim "a", row "X": no column'),
        (table(above("a", "X", "X")), '"a": '),
        (table(above("a", "X") + "\nby = nan"), 'claim "a", by: '),
        (table(above("a", "X") + '\nmeasure = "ratio"\nby = -2.0'), '"a": by '),
        (table(claim("a", 'chain = [{ row = "X" }]')), 'claim "a", chain: '),
        (table(above("a", "X").replace("says", "said")), "said: "),
        ('[[table]]\npaper = "P"\ntitle = "T"\nfile = "x.toml"\n', "table #1, claim: "),
        ("table = 3", "table: "),
        ("[[table]", "valid TOML"),
    ],
)  # fmt: skip
def test_a_broken_claims_file_gives_a_sentence(
    repository: Repository, capsys: pytest.CaptureFixture[str], broken: str, mention: str
) -> None:
    repository.claims(broken)
    assert main([], repository.root) == 2
    error = capsys.readouterr().err
    assert "claims.toml" in error
    assert mention in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "mention"),
    [
        ("{", "JSON"),
        ('{"format": 2}', " 2"),
        ('{"format": 1, "name": "x", "file": "experiments/x.toml", "runs": []}', "versions"),
        (json.dumps({"format": 1, "name": "x", "file": "x.toml", "versions": {}, "machine": {}, "against": "",
                     "settings_of_file": {}, "runs": [run("A", 0)]}), "experiments/"),
    ],
)  # fmt: skip
def test_a_broken_file_of_results_gives_a_sentence(
    repository: Repository, capsys: pytest.CaptureFixture[str], text: str, mention: str
) -> None:
    repository.claims(table(above("a", "X")))
    (repository.root / "experiments" / "results" / "bad.json").write_text(text)
    assert main([], repository.root) == 2
    error = capsys.readouterr().err
    assert "bad.json" in error
    assert mention in error
    assert len(error.splitlines()) == 1


# ---- the repository's own page ---------------------------------------------------------------------------------------


def test_the_page_is_as_the_stored_results_say() -> None:
    text, figures, judged = built()
    assert (ROOT / PAGE).read_text() == text, "run make results"
    names = {one.name for one in figures}
    assert {path.name for path in (ROOT / PAGE.with_suffix("")).glob("*")} == names, "run make results"
    assert set(re.findall(r"\]\(results/([\w.-]+)\)", text)) == names
    assert len(judged) > 80
    assert {one.table.paper for one in judged} >= {"ScaleFL", "FedAvg", "ReeFL", "AdaptiveFL"}


def test_first_pages_quote_the_stored_results() -> None:
    _, _, judged = built()
    pages = headline.pages(judged, ROOT)
    assert {path.relative_to(ROOT).as_posix() for path in pages} == set(headline.PLACES)
    assert not [path for path, content in pages.items() if path.read_text() != content], "run make results"
    for path, content in pages.items():
        text = " ".join(content.partition(headline.BEGIN)[2].partition(headline.END)[0].split())
        own, _, sentence = text.rpartition(" Of ")
        assert own.count("results/lead.svg") == 1 and "in 6 settings" in own and "10 of 12" in own, path
        assert len(re.findall(r"\]\((?:docs/)?results\.md\)", sentence)) == 1, path
        assert "| verdict |" not in content, "the tables stay on their page"
        numbers = [int(number) for number in re.findall(r"\d+", sentence)]
        of_papers = [one for one in judged if one.table.paper != "FleetFit"]
        assert sum(numbers[:2]) == sum(numbers[2:]) == len(of_papers), "each claim has a verdict"
        assert numbers[2] == sum(one.verdict.value == "holds" for one in of_papers)


def test_first_pages_follow_the_results(repository: Repository) -> None:
    repository.claims(table(above("clear", "Ten")))
    (repository.root / "README.md").write_text(f"a\n{headline.BEGIN}\nstale\n{headline.END}\nb\n")
    assert main([], repository.root) == 0
    page = (repository.root / "README.md").read_text()
    assert page.startswith(f"a\n{headline.BEGIN}\n") and page.endswith(f"{headline.END}\nb\n") and "stale" not in page
    assert re.search(r"\b1 are not run", " ".join(page.split())) and "| verdict |" not in page
    repository.results([*flat(), *spread("Ten", 10)])
    assert main(["--check"], repository.root) == 1
    assert main([], repository.root) == 0
    page = (repository.root / "README.md").read_text()
    assert " 1 hold: " in " ".join(page.split()) and "(docs/results.md)" in page
    assert "lead.svg" not in page, "no claim is the proof's"
    repository.claims(table(above("clear", "Ten"), title="Digits", family=headline.LEAD))
    assert main([], repository.root) == 0
    assert "in 1 settings" in " ".join((repository.root / "README.md").read_text().split())
    svg = (repository.root / PAGE.with_suffix("") / "lead.svg").read_text()
    assert all(f">{text}</text>" in svg for text in ("Base", "Digits", "global"))
    (repository.root / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match=re.escape(headline.BEGIN)):
        main([], repository.root)


def test_check_finds_a_stale_page(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.claims(table(above("clear", "Ten")))
    assert main(["--check"], repository.root) == 1
    assert main([], repository.root) == 0
    assert main(["--check"], repository.root) == 0
    repository.results([*flat(), *spread("Ten", 10)])
    capsys.readouterr()
    assert main(["--check"], repository.root) == 1
    assert "make results" in capsys.readouterr().out


def test_needs_lists_rows_and_gaps(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.claims(table(above("a", "Ten"), above("b", "Two")))
    (repository.root / "experiments" / "small").mkdir()
    (repository.root / "experiments" / FILE).write_text(
        '[[compare.row]]\nlabel = "Ten"\n[[compare.row]]\nlabel = "Base"\n'
    )
    assert main(["--needs"], repository.root) == 0
    assert capsys.readouterr().out.splitlines() == [
        FILE, "  Base | - | global", "  Ten | - | global", '  Two | - | global   LACKS row "Two"',
    ]  # fmt: skip

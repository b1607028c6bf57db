"""The page `docs/results.md`: a verdict for every claim, the paper's size of the effect beside ours."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from experiments.verdicts.claims import OWN, Claim, Claims, ClaimTable, contrasts
from experiments.verdicts.figures import Drawn
from experiments.verdicts.judging import Judged, Verdict, judge_also
from experiments.verdicts.measured import compared, measured, places_of
from experiments.verdicts.stored import ROUNDS, ExperimentResults
from fleetfit.config.toml import read_toml
from fleetfit.report.columns import is_rounds

HEAD = """# What the papers claim, and what came out

<!-- made by `make results` from experiments/claims.toml and experiments/results/: change those -->

The papers print tables of full-size experiments. Here a small experiment, which two cores finish, judges each claim.
[experiments/claims.toml](../experiments/claims.toml) has each claim, its size and the rows that decide it. It was
written from the papers' texts before these runs, and has claims that may well fail at this size.
[experiments/LOG.md](../experiments/LOG.md) has findings and earlier trials. Text that was written after the runs is
marked: notes, and orders of the same tables that were looked at later, which are judged alike and not counted. A
claim that was added or changed later has a note below its table: when, why, and whether runs had been seen by then.

**Verdicts.** Runs are paired by seed, since a seed fixes the clients' data, the first weights and the cohorts. The
differences (for ratios, their logarithms) give the mean and the 95% interval of a t-test. A claim that consists of
several differences ("Decoupled is last") counts once, and its weakest difference decides. Such a claim is contradicted
if one difference speaks against it, with a p that is multiplied by their number. Within each table of a paper, Holm's
procedure corrects the p-values of all claims that could be tested. A claim *holds* if the corrected p is below 0.05 in
its direction, is *contradicted* if it is below 0.05 in the other, and is *inconclusive* at this size otherwise. With no
run, or one seed, it is *not run*. Numbers without chance, such as parameters, are compared as they are.

**Sizes.** The paper's effects and ours belong to different models, data and lengths, so the order is compared, or the
bound where one is claimed. Differences are in percentage points (pp). If several differences make a claim, both sizes
are those of the one that decides. "Order only": the paper prints no number. Intervals are not corrected, so an interval
may exclude zero where the verdict is inconclusive.
"""

TERMS = """**Words.** *local* is the accuracy of each client's own level on its own test data, averaged over the
clients, *global* that of the largest model there. *avg* and *full* are on the whole test set: the mean over all
levels' models, and the largest alone. Accuracies are in percent. *Rounds* count up to the target accuracy in the
experiment's file. *Level 1* is the smallest piece, *exit 1* the earliest classifier of the largest model, *ensemble*
the mean of all its exits' probabilities. *4:3:3* are the shares of weak, medium and strong devices. *alpha* is the
parameter of the Dirichlet shares of classes: the lower, the more skewed. *C* is the share of the clients in a round
(0: one client), *E* the local epochs, *B* the batch (all: a client's data at once). *Credit* is what a row of
AdaptiveFL's table earns by what comes back. More: [runs](runs.md), [methods](methods.md), [the papers](papers.md).
"""


def page(
    claims: Claims,
    judged: Sequence[Judged],
    results: Mapping[str, ExperimentResults],
    drawn: Sequence[Drawn],
    root: Path,
) -> str:
    """Return the page.

    Args:
        claims: What is claimed.
        judged: The verdicts, in the order of the claims.
        results: What was run, by the experiment's file.
        drawn: The figures.
        root: The repository.
    """
    parts = [HEAD, _summary(judged), _spent(claims, results), TERMS]
    left = list(drawn)  # an experiment that judges two tables shows its figures once
    shown: set[tuple[str, str, str]] = set()  # and each of its numbers
    told: set[str] = set()  # and what was run
    log = _headings(root)
    for paper in dict.fromkeys(table.paper for table in claims.table):
        parts.append(f"## {paper}\n")
        parts += [claims.about[paper] + "\n"] if paper in claims.about else []
        parts += _figures(left, paper=paper)
        for table in claims.table:
            if table.paper == paper:
                own = [one for one in judged if one.table is table]
                parts += _chapter(table, own, results, [_about(f, results, root, told, log) for f in files_of(table)])
                parts += _measured(table, results, shown)
                parts += _figures(left, file=table.file)
    parts += _left_out(claims)
    return "\n".join(parts)


def _summary(judged: Sequence[Judged]) -> str:
    papers: dict[str, Counter[Verdict]] = {}
    for one in judged:
        papers.setdefault(one.table.paper, Counter())[one.verdict] += 1
    total: Counter[Verdict] = Counter(one.verdict for one in judged)
    rows = [(f"[{paper}](#{anchor(paper)})", *_counts(count)) for paper, count in papers.items()]
    rows.append(("all", *_counts(total)))
    return markdown_table(("paper", "claims", *(verdict.value for verdict in Verdict)), rows)


def _spent(claims: Claims, results: Mapping[str, ExperimentResults]) -> str:
    used = [file for table in claims.table for file in files_of(table) if file in results]
    return f"In all: {_spending(*(results[file] for file in dict.fromkeys(used)))}, tuning and trials not counted.\n"


def _spending(*every: ExperimentResults) -> str:
    """Return how many runs there are and how long they took; each had one core, most beside other runs.

    What has taken no time was measured on the models of other runs.
    """
    seconds = [run.seconds for found in every for by_seed in found.runs.values() for run in by_seed.values()]
    trained = [each for each in seconds if each]
    if not trained:
        return f"measured on the models of {len(seconds)} {'run' if len(seconds) == 1 else 'runs'}"
    return f"{len(trained)} {'run' if len(trained) == 1 else 'runs'}, {sum(trained) / 3600:.1f} core-hours"


def _headings(root: Path) -> dict[str, str]:
    """Return by experiment where the log last speaks of it under a heading of its own."""
    path = root / "experiments" / "LOG.md"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return {
        file: f"../experiments/LOG.md#{anchor(line.removeprefix('## '))}"
        for line in lines
        if line.startswith("## ")
        for file in re.findall(r"`((?:small|proof)/[\w-]+\.toml)`", line)
    }


def anchor(heading: str) -> str:
    """Return what a heading is called in a link, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _counts(found: Counter[Verdict]) -> list[str]:
    return [str(found.total()), *(str(found[verdict]) for verdict in Verdict)]


# ---- a table of a paper ----------------------------------------------------------------------------------------------


def _chapter(
    table: ClaimTable, judged: Sequence[Judged], results: Mapping[str, ExperimentResults], about: Sequence[str]
) -> list[str]:
    parts = [f"### {table.title}\n"]
    if table.note:
        parts.append(table.note + "\n")
    if table.later:
        parts.append(f"Written after the runs: {table.later}\n")
    parts += about
    parts += _verdicts(table, judged)
    also = [one for one in judge_also(table, results) if one.verdict is not Verdict.NOT_RUN]
    if also:
        parts.append("Looked at after the runs, corrected among themselves, and not counted:\n")
        parts += _verdicts(table, also)
    return parts


def _verdicts(table: ClaimTable, judged: Sequence[Judged]) -> list[str]:
    paper = [] if table.paper == OWN else ["paper"]
    rows = [
        (f"{one.claim.says} (`{one.claim.id}`)", *(of_paper(one) for _ in paper), here(one), _seeds(one), _p(one),
         f"**{one.verdict.value}**" if one.verdict is not Verdict.NOT_RUN else one.verdict.value)
        for one in judged
    ]  # fmt: skip
    parts = [markdown_table(("claim", *paper, "here", "seeds", "corrected p", "verdict"), rows)]
    reasons: dict[tuple[Verdict, str], list[str]] = {}
    for one in judged:
        if one.reason:
            reasons.setdefault((one.verdict, one.reason), []).append(f"`{one.claim.id}`")
    parts += [
        f"- {_and(ids) if len(ids) < len(judged) else 'all'}: {verdict.value}: {reason}."
        for (verdict, reason), ids in reasons.items()
    ]
    changes = [f"- `{one.claim.id}`: {one.claim.changed}" for one in judged if one.claim.changed]
    return parts + changes + [""] * bool(reasons or changes)


def _measured(
    table: ClaimTable, results: Mapping[str, ExperimentResults], shown: set[tuple[str, str, str]]
) -> list[str]:
    """Return the numbers of all rows that the table's claims compare, but for those that the page has shown."""
    columns, within = compared(table)
    columns = [column for column in columns if any((table.file, column, setting) not in shown for setting in within)]
    if table.file not in results or not columns:
        return []
    shown |= {(table.file, column, setting) for column in columns for setting in within}
    known = {setting for setting, _ in results[table.file].runs}
    some = f" ({', '.join(sorted(within))})" if len(within) == 1 < len(known) else ""
    places = [place for place in places_of(table) if place.file != table.file and place.file in results]
    others = [
        (results[file], {(place.setting, place.row) for place in places if place.file == file})
        for file in dict.fromkeys(place.file for place in places)
    ]
    lines = markdown_table(*measured(results[table.file], columns, within, others))
    rounds = any(column == ROUNDS or is_rounds(column) for column in columns)
    said = "; the ratios above are geometric means over pairs of seeds" * rounds
    return [f"All rows{some}, mean and standard deviation over the seeds{said}:\n", lines]


def files_of(table: ClaimTable) -> list[str]:
    """Return the experiments that a table's claims need, its own first."""
    return list(dict.fromkeys([table.file, *(place.file for place in places_of(table))]))


def _about(
    file: str, results: Mapping[str, ExperimentResults], root: Path, told: set[str], log: Mapping[str, str]
) -> str:
    """Return a paragraph on an experiment: its file, its settings in a line, what differs from the paper's.

    Of an experiment that was not run it says no more than the name, since its file may still change; of one that the
    page has told of, too.
    """
    if file not in results:
        return f"Experiment: `experiments/{file}`; results: none yet.\n"
    found, path = results[file], root / "experiments" / file
    links = ", ".join(f"[{name}](../experiments/results/{name})" for name in found.sources)
    named = f"[experiments/{file}](../experiments/{file})"
    if file in told and path.is_file():
        return f"Experiment: {named}, as above.\n"
    told.add(file)
    found_since = f"; [log]({log[file]})" if file in log else ""
    spent = f"; {_spending(found)}"
    said = (
        [f"Experiment: {named}; results: {links}{found_since}{spent}."]
        if path.is_file()
        else [f"Results: {links}{spent}."]
    )
    line = settings_line(found) if found.settings else ""
    said += [f"Settings: {line}."] if line else []
    compared = read_toml(path).get("compare", {}) if path.is_file() else {}
    differs = str(compared.get("note", "")).strip().rstrip(".")
    said += [f"Differs from the paper: {differs}."] if differs else []
    return "  \n".join(said) + "\n"


def settings_line(found: ExperimentResults) -> str:
    """Return what was run, in one line; where runs differ in a number, all of its values, or the least and greatest."""
    ran = [run for by_seed in found.runs.values() for run in by_seed.values()]
    told = [_set_in(found.settings, {**run.overrides, **run.tuned}) for run in ran]

    def each(*path: str) -> str | None:
        return _listed([_inside(one, path) for one in told])

    size, alpha = each("data", "resize"), each("data", "partition", "alpha")
    kinds, epochs = each("data", "partition", "kind") or "", each("local", "epochs")
    asked = [
        (each("model", "name"), "{}"),
        (each("data", "name"), "{}" + (f" of {size}x{size} pixels" if size else "")),
        (each("data", "samples"), "{} training samples"),
        (each("data", "partition", "clients"), f"{{}} clients ({kinds}{f', alpha = {alpha}' if alpha else ''})"),
        (_listed([_cohort(one) for one in told]), "{} a round"),
        (_listed([run.rounds for run in ran]), "{} rounds"),
        (epochs, "{} local epoch" if epochs == "1" else "{} local epochs"),
        (each("local", "batch_size"), "batch {}"),
        (each("local", "lr"), "learning rate {}"),
    ]
    return ", ".join(form.format(value) for value, form in asked if value is not None)


def _cohort(settings: Mapping[str, Any]) -> str | None:
    """Return how many take part in a round: a number of clients where one is set, else their share."""
    count, fraction = _inside(settings, ("cohort", "count")), _inside(settings, ("cohort", "fraction"))
    return str(count) if count is not None else None if fraction is None else f"a fraction {fraction}"


def _listed(values: Sequence[Any]) -> str | None:
    """Return different values as "1 or 5", more than three numbers as "1 to 20"; None where there are none."""
    kept = list(dict.fromkeys(value for value in values if isinstance(value, str | int | float)))
    numbers = sorted(value for value in kept if not isinstance(value, str))
    texts = [f"{value:g}" if isinstance(value, float) else str(value) for value in numbers or kept]
    return f"{texts[0]} to {texts[-1]}" if len(numbers) > 3 else " or ".join(texts) or None


def _set_in(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the file's settings with those of a run, which stand by dotted key."""
    made = deepcopy(dict(settings))
    for key, value in changes.items():
        *path, last = key.split(".")
        table = made
        for part in path:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[last] = value
    return made


def _inside(table: Mapping[str, Any], path: Sequence[str]) -> Any:
    found: Any = table
    for part in path:
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


# ---- cells -----------------------------------------------------------------------------------------------------------


def of_paper(one: Judged) -> str:
    """Return the paper's size of the effect that decides; the smallest, where a claim of several was not run."""
    claim, sums = one.claim, contrasts(one.table, one.claim)
    if one.weakest is not None:
        decides = one.weakest.contrast.printed
        said = "order only" if decides is None else amount(decides, claim)
    else:
        known = [c.printed for c in sums if c.printed is not None]
        said = amount(min(known), claim) + " or more" * (len(sums) > 1) if known else "order only"
    return said + (f"; claimed: {_bound(claim)}" if claim.by is not None else "")


def _bound(claim: Claim) -> str:
    by = claim.by or 0.0
    if claim.measure == "ratio":
        return f"at least {by:g}x"
    return f"loses under {-by:g} pp" if by < 0 else f"over {by:g} pp"


def here(one: Judged) -> str:
    """Return what was measured here, and which difference of a claim with several it is."""
    name = f"; of {one.contrasts}: {one.weakest.contrast.named()}" if one.weakest and one.contrasts > 1 else ""
    return weakest_difference(one) + name


def weakest_difference(one: Judged) -> str:
    """Return the weakest difference with its interval: "+3.30 pp [+1.81, +4.80]"."""
    found = one.weakest
    if found is None:
        return "-"
    text = " ".join(filter(None, [found.bounded, amount(found.mean, one.claim)]))
    if found.low is not None and found.high is not None:
        text += f" [{amount(found.low, one.claim, unit=False)}, {amount(found.high, one.claim, unit=False)}]"
    return text


def amount(value: float, claim: Claim, unit: bool = True) -> str:
    """Return the size of an effect: "+1.18 pp", "31.3x"."""
    if claim.measure == "ratio":
        return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
    return f"{value:+.2f}" + (" pp" if unit else "")


def _seeds(one: Judged) -> str:
    return "-" if one.weakest is None else str(one.weakest.seeds)


def _p(one: Judged) -> str:
    if one.claim.exact and one.weakest is not None:
        return "exact"
    return "-" if one.p is None else "<0.001" if one.p < 0.001 else f"{one.p:.3f}"


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _and(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# ---- the rest --------------------------------------------------------------------------------------------------------


def _figures(left: list[Drawn], paper: str = "", file: str = "") -> list[str]:
    """Return the figures of a paper or an experiment, and take them from those that are left."""
    chosen = [one for one in left if (one.paper, one.file) == (paper, file)]
    left[:] = [one for one in left if one not in chosen]
    return [f"![{one.kind}](results/{one.name})\n\n{one.title}\n" for one in chosen]


def _left_out(claims: Claims) -> list[str]:
    if not claims.left_out:
        return []
    rows = [(one.paper, one.what, one.why) for one in claims.left_out]
    return ["## What is not judged, and why\n", markdown_table(("paper", "what", "why"), rows)]


def needs(claims: Claims, root: Path) -> dict[str, list[str]]:
    """Return by experiment which rows and columns its claims need, and which of the rows its file lacks.

    Args:
        claims: What is claimed.
        root: The repository.
    """
    places = {place for table in claims.table for place in places_of(table)}
    found: dict[str, list[str]] = {}
    for file in sorted({place.file for place in places}):
        own = [place for place in places if place.file == file]
        path = root / "experiments" / file
        compared = read_toml(path).get("compare", {}) if path.is_file() else {}
        rows = {row.get("label") for row in compared.get("row", [])}
        settings = {one.get("label") for one in compared.get("setting", [])} or {""}
        for row, setting in sorted({(place.row, place.setting) for place in own}):
            columns = sorted({place.column for place in own if (place.row, place.setting) == (row, setting)})
            lacks = [f'row "{row}"'] * (row not in rows) + [f'setting "{setting}"'] * (setting not in settings)
            line = f"{row} | {setting or '-'} | {', '.join(columns)}"
            found.setdefault(file, []).append(line + (f"   LACKS {' and '.join(lacks)}" if lacks else ""))
    return found

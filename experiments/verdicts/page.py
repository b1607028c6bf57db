"""The page `docs/results.md`: a verdict for every claim, the paper's size of the effect beside ours."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from experiments.verdicts.claims import Claim, Claims, ClaimTable, contrasts
from experiments.verdicts.figures import Drawn
from experiments.verdicts.judging import Judged, Verdict, judge_also
from experiments.verdicts.measured import compared, measured
from experiments.verdicts.stored import ExperimentResults
from fleetfit.config.tables import read_table

HEAD = """# What the papers claim, and what came out

<!-- made by `make results` from experiments/claims.toml and experiments/results/: change those -->

The papers print tables of full-size experiments; here a small one, which two cores finish, judges each claim. What is
claimed, by how much, and which rows decide it was written down from the papers' texts before these runs, in
[experiments/claims.toml](../experiments/claims.toml), with claims that may well fail at this size; what was found
along the way, and earlier trials, stand in [experiments/LOG.md](../experiments/LOG.md). What was written after the
runs says so: notes, and orders of the same tables that were looked at later, which are judged alike and not counted.

How a verdict is made: runs are paired by seed, since a seed fixes the clients' data, the first weights and who takes
part in which round, and the differences (of ratios, their logarithms) give the mean and the 95% interval of a t-test.
A claim that several differences make ("Decoupled is last") counts once, and the difference that has least for it
decides; it is contradicted where one of them speaks against it, with a p that is multiplied by how many there are.
Within each table of a paper the p-values of all claims that could be tested are corrected by Holm's procedure. A claim
*holds* if the corrected p is below 0.05 in its direction, is *contradicted* if it is so in the other, and *cannot be
told at this size* otherwise; with no run, or one seed, it is *not run*. Numbers without chance, such as parameters,
are compared as they are.

The sizes of a paper's effects and ours belong to different models, data and lengths; what is compared is the order, or
the bound where one is claimed. Intervals are not corrected, so that one may exclude zero where the corrected p does not
say "holds".
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
    parts = [HEAD, _summary(judged)]
    left = list(drawn)  # an experiment that judges two tables shows its figures once
    shown: set[tuple[str, str, str]] = set()  # and each of its numbers
    for paper in dict.fromkeys(table.paper for table in claims.table):
        parts.append(f"## {paper}\n")
        parts += _figures(left, paper=paper)
        for table in claims.table:
            if table.paper == paper:
                parts += _chapter(table, [one for one in judged if one.table is table], results, root)
                parts += _measured(table, results, shown)
                parts += _figures(left, file=table.file)
    parts += _left_out(claims)
    return "\n".join(parts)


def _summary(judged: Sequence[Judged]) -> str:
    papers: dict[str, Counter[Verdict]] = {}
    for one in judged:
        papers.setdefault(one.table.paper, Counter())[one.verdict] += 1
    total: Counter[Verdict] = Counter(one.verdict for one in judged)
    rows = [(paper, *_counts(count)) for paper, count in papers.items()]
    rows.append(("all", *_counts(total)))
    return markdown_table(("paper", "claims", *(verdict.value for verdict in Verdict)), rows)


def _counts(found: Counter[Verdict]) -> list[str]:
    return [str(found.total()), *(str(found[verdict]) for verdict in Verdict)]


# ---- a table of a paper ----------------------------------------------------------------------------------------------


def _chapter(
    table: ClaimTable, judged: Sequence[Judged], results: Mapping[str, ExperimentResults], root: Path
) -> list[str]:
    parts = [f"### {table.title}\n"]
    if table.note:
        parts.append(table.note + "\n")
    if table.later:
        parts.append(f"Written after the runs: {table.later}\n")
    parts += [_about(file, results, root) for file in files_of(table)]
    parts += _verdicts(table, judged)
    also = [one for one in judge_also(table, results) if one.verdict is not Verdict.NOT_RUN]
    if also:
        parts.append("Looked at after the runs, corrected among themselves, and not counted:\n")
        parts += _verdicts(table, also)
    return parts


def _verdicts(table: ClaimTable, judged: Sequence[Judged]) -> list[str]:
    rows = [
        (f"{one.claim.says} (`{one.claim.id}`)", of_paper(one.claim, table), here(one), _seeds(one), _p(one),
         f"**{one.verdict.value}**" if one.verdict is not Verdict.NOT_RUN else one.verdict.value)
        for one in judged
    ]  # fmt: skip
    parts = [markdown_table(("claim", "paper", "here", "seeds", "corrected p", "verdict"), rows)]
    reasons: dict[tuple[Verdict, str], list[str]] = {}
    for one in judged:
        if one.reason:
            reasons.setdefault((one.verdict, one.reason), []).append(f"`{one.claim.id}`")
    parts += [
        f"- {_and(ids) if len(ids) < len(judged) else 'all'}: {verdict.value}: {reason}."
        for (verdict, reason), ids in reasons.items()
    ]
    return parts + [""] * bool(reasons)


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
    lines = markdown_table(*measured(results[table.file], columns, within))
    return [f"All rows{some}, mean and standard deviation over the seeds:\n", lines]


def files_of(table: ClaimTable) -> list[str]:
    """Return the experiments that a table's claims need, its own first."""
    places = [place for claim in table.every for c in contrasts(table, claim) for place in (*c.plus, *c.minus)]
    return list(dict.fromkeys([table.file, *(place.file for place in places)]))


def _about(file: str, results: Mapping[str, ExperimentResults], root: Path) -> str:
    """Return a paragraph on an experiment: its file, its settings in a line, what differs from the paper's.

    Of an experiment that was not run it says no more than the name, since its file may still change.
    """
    if file not in results:
        return f"Experiment: `experiments/{file}`; results: none yet.\n"
    found, path = results[file], root / "experiments" / file
    links = ", ".join(f"[{name}](../experiments/results/{name})" for name in found.sources)
    named = f"[experiments/{file}](../experiments/{file})"
    said = [f"Experiment: {named}; results: {links}."] if path.is_file() else [f"Results: {links}."]
    line = settings_line(found) if found.settings else ""
    said += [f"Settings: {line}."] if line else []
    compared = read_table(path).get("compare", {}) if path.is_file() else {}
    differs = str(compared.get("differs", "")).strip().rstrip(".")
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


def of_paper(claim: Claim, table: ClaimTable) -> str:
    """Return the paper's size: the smallest, where a claim has several."""
    sums = contrasts(table, claim)
    known = [c for c in sums if c.printed is not None]
    if not known:
        said = "order only"
    else:
        least = min(c.printed for c in known if c.printed is not None)
        some = "" if len(sums) == 1 else " or more"
        said = amount(least, claim) + some
    return said + (f"; claimed: {_bound(claim)}" if claim.by is not None else "")


def _bound(claim: Claim) -> str:
    by = claim.by or 0.0
    if claim.measure == "ratio":
        return f"at least {by:g}x"
    return f"loses under {-by:g} points" if by < 0 else f"over {by:g} points"


def here(one: Judged) -> str:
    found = one.weakest
    if found is None:
        return "-"
    text = " ".join(filter(None, [found.bounded, amount(found.mean, one.claim)]))
    if found.low is not None and found.high is not None:
        text += f" [{amount(found.low, one.claim, unit=False)}, {amount(found.high, one.claim, unit=False)}]"
    return text + (f"; of {one.contrasts}: {found.contrast.named()}" if one.contrasts > 1 else "")


def amount(value: float, claim: Claim, unit: bool = True) -> str:
    """Return the size of an effect: "+1.18 points", "31.3x"."""
    if claim.measure == "ratio":
        return f"{value:.2f}x" if value < 10 else f"{value:.1f}x"
    return f"{value:+.2f}" + (" points" if unit else "")


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
    return [f"![{one.name}](results/{one.name})\n\n{one.title}\n" for one in chosen]


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
    places = {place for table in claims.table for claim in table.every
              for c in contrasts(table, claim) for place in (*c.plus, *c.minus)}  # fmt: skip
    found: dict[str, list[str]] = {}
    for file in sorted({place.file for place in places}):
        own = [place for place in places if place.file == file]
        path = root / "experiments" / file
        compared = read_table(path).get("compare", {}) if path.is_file() else {}
        rows = {row.get("label") for row in compared.get("row", [])}
        settings = {one.get("label") for one in compared.get("setting", [])} or {""}
        for row, setting in sorted({(place.row, place.setting) for place in own}):
            columns = sorted({place.column for place in own if (place.row, place.setting) == (row, setting)})
            lacks = [f'row "{row}"'] * (row not in rows) + [f'setting "{setting}"'] * (setting not in settings)
            line = f"{row} | {setting or '-'} | {', '.join(columns)}"
            found.setdefault(file, []).append(line + (f"   LACKS {' and '.join(lacks)}" if lacks else ""))
    return found

"""What README.md and the site's first page show: a paper's table beside ours, drawn too, and how many claims stand."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.verdicts import page
from experiments.verdicts.figures import Drawn
from experiments.verdicts.judging import Judged, Verdict
from experiments.verdicts.stored import ExperimentResults

PREFERRED = ("small/scalefl-table3.toml", "small/fedavg-mnist-2nn.toml")
"""The experiments whose claims are shown: the first of them that was run."""
PLACES = {"README.md": "docs/", "docs/index.md": ""}
"""The pages that have the table, and how docs/ is reached from each."""
WIDTH = 120
NOTE = (
    "pp: percentage points. Inconclusive: the runs at this size do not decide the claim. Verdicts use tests with "
    "Holm's correction; intervals are uncorrected, so an interval may exclude zero where the verdict is inconclusive. "
    '"Weakest of 4": the claim consists of four differences, and the weakest one, which is shown, decides.'
)
BEGIN, END = "<!-- evidence: made by make results -->", "<!-- end of evidence -->"


def evidence(
    judged: Sequence[Judged], results: Mapping[str, ExperimentResults], drawn: Sequence[Drawn], docs: str
) -> str:
    """Return the figure and the table with what was run and what differs, and a line on all claims.

    Args:
        judged: The verdicts.
        results: What was run, by the experiment's file.
        drawn: The figures.
        docs: How docs/ is reached from the page, such as "docs/".
    """
    counts = Counter(one.verdict for one in judged)
    verdicts = {"holds": Verdict.HOLDS, "contradicted": Verdict.CONTRADICTED,
                "inconclusive": Verdict.OPEN, "not run yet": Verdict.NOT_RUN}  # fmt: skip
    told = ", ".join(f"{name} {counts[verdict]}" for name, verdict in verdicts.items() if counts[verdict])
    asked = sum(one.table.paper.startswith("Critique") for one in judged)
    whose = f" ({len(judged) - asked} of the papers, {asked} of critiques)" if asked else " of the papers"
    total = (
        f"All {len(judged)} claims{whose}: {told}. Details and figures: "
        f"[what the papers claim, and what came out]({docs}results.md)."
    )
    shown = first_table(judged)
    if not shown:
        return textwrap.fill(total, WIDTH) + "\n"
    table = shown[0].table
    figure = next((one for one in drawn if one.file == table.file and one.name.endswith("-rows.svg")), None)
    head = figure.title if figure else f"{table.paper}, {table.title}."
    link = f"[How the paper's setting differs]({docs}results.md#{page.anchor(table.title)})"
    said = f"{head} Run: {page.settings_line(results[table.file])}. {link}."
    rows = [(one.claim.says, page.of_paper(one), _shown_difference(one), one.verdict.value) for one in shown]
    made = page.markdown_table(("claim of the paper", "paper", "ours, 95% interval", "verdict"), rows)
    image = [f"![{figure.kind}]({docs}results/{figure.name})", ""] if figure else []
    parts = [
        *image,
        textwrap.fill(said, WIDTH, break_long_words=False),
        "",
        textwrap.fill(NOTE, WIDTH),
        "",
        made,
        textwrap.fill(total, WIDTH, break_long_words=False),
    ]
    return "\n".join(parts) + "\n"


def _shown_difference(one: Judged) -> str:
    """Return the difference that decides, and of how many: "-1.85 pp [-2.83, -0.87] (weakest of 4)"."""
    return page.weakest_difference(one) + (f" (weakest of {one.contrasts})" if one.contrasts > 1 else "")


def with_evidence(text: str, made: str) -> str:
    """Return a page with the table between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def first_table(judged: Sequence[Judged]) -> list[Judged]:
    """Return the verdicts of the paper's table that is shown; none where none of the preferred experiments was run."""
    found = [one for file in PREFERRED for one in judged
             if one.table.file == file and one.verdict is not Verdict.NOT_RUN]  # fmt: skip
    return [one for one in found if one.table is found[0].table]


def pages(
    judged: Sequence[Judged], results: Mapping[str, ExperimentResults], drawn: Sequence[Drawn], root: Path
) -> dict[Path, str]:
    """Return the pages that have the table, as they should be; those that a repository lacks are left out."""
    there = {root / name: docs for name, docs in PLACES.items() if (root / name).is_file()}
    return {
        path: with_evidence(path.read_text(encoding="utf-8"), evidence(judged, results, drawn, docs))
        for path, docs in there.items()
    }

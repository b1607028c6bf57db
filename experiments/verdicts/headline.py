"""What README.md and the site's first page show: one table of a paper beside ours, and how many claims stand."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.verdicts import page
from experiments.verdicts.claims import Claims
from experiments.verdicts.judging import Judged, Verdict
from experiments.verdicts.stored import ExperimentResults
from fleetfit.config.tables import read_table

PREFERRED = ("small/scalefl-table3.toml", "small/fedavg-mnist-2nn.toml")
"""The experiments whose claims are shown: the first of them that was run."""
PLACES = {"README.md": "docs/", "docs/index.md": ""}
"""The pages that have the table, and how docs/ is reached from each."""
WIDTH = 120
BEGIN, END = "<!-- evidence: made by make results -->", "<!-- end of evidence -->"


def evidence(
    claims: Claims, judged: Sequence[Judged], results: Mapping[str, ExperimentResults], root: Path, docs: str
) -> str:
    """Return the table with what was run and what differs, and a line on all claims.

    Args:
        claims: What is claimed.
        judged: The verdicts.
        results: What was run, by the experiment's file.
        root: The repository.
        docs: How docs/ is reached from the page, such as "docs/".
    """
    counts = Counter(one.verdict for one in judged)
    verdicts = {"holds": Verdict.HOLDS, "contradicted": Verdict.CONTRADICTED,
                "cannot be told at the size that was run": Verdict.OPEN, "not run yet": Verdict.NOT_RUN}  # fmt: skip
    told = ", ".join(f"{name} {counts[verdict]}" for name, verdict in verdicts.items() if counts[verdict])
    total = (
        f"The {len(judged)} claims of the papers by verdict: {told}. All of them, with figures: "
        f"[what the papers claim, and what came out]({docs}results.md)."
    )
    found = [one for file in PREFERRED for one in judged
             if one.table.file == file and one.verdict is not Verdict.NOT_RUN]  # fmt: skip
    if not found:
        return textwrap.fill(total, WIDTH) + "\n"
    table = found[0].table
    shown = [one for one in found if one.table is table]
    said = f"{table.paper}, {table.title}. Here: {page.settings_line(results[table.file])}."
    path = root / "experiments" / table.file
    differs = str(read_table(path).get("compare", {}).get("differs", "")).strip() if path.is_file() else ""
    rows = [(one.claim.says, page.of_paper(one.claim, one.table), page.here(one), one.verdict.value) for one in shown]
    said += f" The paper's setting differs: {differs.rstrip('.')}." if differs else ""
    made = page.markdown_table(("the paper says", "its number", "ours, 95% interval", "verdict"), rows)
    parts = [
        textwrap.fill(said, WIDTH, break_long_words=False),
        "",
        made,
        textwrap.fill(total, WIDTH, break_long_words=False),
    ]
    return "\n".join(parts) + "\n"


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


def pages(
    claims: Claims, judged: Sequence[Judged], results: Mapping[str, ExperimentResults], root: Path
) -> dict[Path, str]:
    """Return the pages that have the table, as they should be; those that a repository lacks are left out."""
    there = {root / name: docs for name, docs in PLACES.items() if (root / name).is_file()}
    return {
        path: with_evidence(path.read_text(encoding="utf-8"), evidence(claims, judged, results, root, docs))
        for path, docs in there.items()
    }

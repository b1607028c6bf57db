"""What README.md and the site's first page say of the evidence, and the paper's table that is drawn by rows."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.verdicts.claims import OWN
from experiments.verdicts.judging import Judged, Verdict

PREFERRED = ("small/scalefl-table3.toml", "small/fedavg-mnist-2nn.toml")
"""The experiments whose rows are drawn: the first of them that was run."""
PLACES = {"README.md": "docs/", "docs/index.md": ""}
"""The pages that have the sentence, and how docs/ is reached from each."""
WIDTH = 120
BEGIN, END = "<!-- evidence: made by make results -->", "<!-- end of evidence -->"


def evidence(judged: Sequence[Judged], docs: str) -> str:
    """Return the sentence on the claims of papers, with a link to their tables.

    Args:
        judged: The verdicts.
        docs: How docs/ is reached from the page, such as "docs/".
    """
    judged = [one for one in judged if one.table.paper != OWN]
    counts = Counter(one.verdict for one in judged)
    verbs = {"hold": Verdict.HOLDS, "are contradicted": Verdict.CONTRADICTED,
             "are inconclusive": Verdict.OPEN, "are not run yet": Verdict.NOT_RUN}  # fmt: skip
    told = ", ".join(f"{counts[verdict]} {verb}" for verb, verdict in verbs.items() if counts[verdict])
    critiques = sum(one.table.paper.startswith("Critique") for one in judged)
    whose = f"{len(judged) - critiques} claims of papers" + f" and {critiques} of critiques" * bool(critiques)
    text = f"Of {whose}, in runs of a small size, {told}: [claims and verdicts]({docs}results.md)."
    return textwrap.fill(text, WIDTH, break_long_words=False) + "\n"


def with_evidence(text: str, made: str) -> str:
    """Return a page with the sentence between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def first_table(judged: Sequence[Judged]) -> list[Judged]:
    """Return the verdicts of the paper's table that is drawn; none where none of the preferred experiments was run."""
    found = [one for file in PREFERRED for one in judged
             if one.table.file == file and one.verdict is not Verdict.NOT_RUN]  # fmt: skip
    return [one for one in found if one.table is found[0].table]


def pages(judged: Sequence[Judged], root: Path) -> dict[Path, str]:
    """Return the pages that have the sentence, as they should be; those that a repository lacks are left out."""
    there = {root / name: docs for name, docs in PLACES.items() if (root / name).is_file()}
    return {
        path: with_evidence(path.read_text(encoding="utf-8"), evidence(judged, docs)) for path, docs in there.items()
    }

"""What README.md and the site's first page say of the evidence: the proof of FleetFit, and the claims of papers."""

import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.verdicts.claims import OWN
from experiments.verdicts.figures import LEAD
from experiments.verdicts.judging import Judged, Verdict

PLACES = {"README.md": "docs/", "docs/index.md": ""}
"""The pages that have the sentences, and how docs/ is reached from each."""
WIDTH = 120
BEGIN, END = "<!-- evidence: made by make results -->", "<!-- end of evidence -->"
_VERBS = {"hold": Verdict.HOLDS, "are contradicted": Verdict.CONTRADICTED,
          "are inconclusive": Verdict.OPEN, "are not run yet": Verdict.NOT_RUN}  # fmt: skip


def evidence(judged: Sequence[Judged], docs: str) -> str:
    """Return the figure and the sentence of the proof, if any of it was run, and the sentence on the claims of papers.

    Args:
        judged: The verdicts.
        docs: How docs/ is reached from the page, such as "docs/".
    """
    proof = [one for one in judged if one.table.family == LEAD]
    papers = [one for one in judged if one.table.paper != OWN]
    critiques = sum(one.table.paper.startswith("Critique") for one in papers)
    whose = f"{len(papers) - critiques} claims of papers" + f" and {critiques} of critiques" * bool(critiques)
    text = f"Of {whose}, in runs of a small size, {_count(papers)}: [claims and verdicts]({docs}results.md)."
    run = [one for one in proof if one.verdict is not Verdict.NOT_RUN]
    settings, done = ({(one.table.title, one.claim.setting) for one in some} for some in (proof, run))
    ahead = [one for one in run if all(estimate.mean > 0 for estimate in one.estimates)]
    share = "" if len(done) == len(settings) else f" of {len(settings)}"
    picture = ""
    if done:
        picture = f"![FleetFit against other methods: differences with 95% intervals]({docs}results/{LEAD}.svg)\n\n"
        text = (
            "The default method `fleetfit` against the published ones, with one recipe for all (two of them also as "
            f"published) and seeds that nothing before had used: in {len(done)}{share} settings its mean is above "
            f"every other method's in {len(ahead)} of {len(run)} comparisons, of `local` and of `global`. After Holm's "
            f"correction {_count(proof)} ([which method when]({docs}which-method.md)). "
            f"{text}"
        )
    return picture + textwrap.fill(text, WIDTH, break_long_words=False) + "\n"


def _count(judged: Sequence[Judged]) -> str:
    counts = Counter(one.verdict for one in judged)
    return ", ".join(f"{counts[verdict]} {verb}" for verb, verdict in _VERBS.items() if counts[verdict])


def with_evidence(text: str, made: str) -> str:
    """Return a page with the sentences between its marks.

    Raises:
        ValueError: The page has no marks.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{made}\n{END}{after}"


def pages(judged: Sequence[Judged], root: Path) -> dict[Path, str]:
    """Return the pages that have the sentences, as they should be; those that a repository lacks are left out."""
    there = {root / name: docs for name, docs in PLACES.items() if (root / name).is_file()}
    return {
        path: with_evidence(path.read_text(encoding="utf-8"), evidence(judged, docs)) for path, docs in there.items()
    }

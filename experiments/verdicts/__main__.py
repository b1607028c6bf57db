"""Judge the papers' claims from the stored results, and write docs/results.md with its figures: `make results`.

A sentence on it goes into README.md and docs/index.md (`headline`), between marks.

python -m experiments.verdicts            write the page
python -m experiments.verdicts --check    say whether the page is as the results say, and write nothing
python -m experiments.verdicts --needs    list the rows, settings and columns that the claims need
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from experiments.verdicts import claims, figures, headline, judging, page, stored
from fleetfit import files
from fleetfit.errors import FleetFitError

ROOT = Path(__file__).parents[2]
PAGE = Path("docs/results.md")


def built(root: Path = ROOT) -> tuple[str, list[figures.Drawn], list[judging.Judged]]:
    """Return the page, its figures and the verdicts, from what a repository has stored."""
    claimed = claims.read(root / "experiments" / "claims.toml")
    results = stored.read_all(root / "experiments" / "results")
    judged = judging.judge(claimed, results)
    drawn = figures.drawn(claimed, judged, results)
    return page.page(claimed, judged, results, drawn, root), drawn, judged


def main(given: list[str] | None = None, root: Path = ROOT) -> int:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.verdicts", description=(__doc__ or "").partition("\n")[0]
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="say whether the page is up to date, and write nothing")
    what.add_argument("--needs", action="store_true", help="list the rows, settings and columns that the claims need")
    options = parser.parse_args(given)
    try:
        if options.needs:
            for file, lines in page.needs(claims.read(root / "experiments" / "claims.toml"), root).items():
                print(f"{file}\n  " + "\n  ".join(lines))
            return 0
        text, drawn, judged = built(root)
        pages = headline.pages(judged, root) | {root / PAGE: text}
    except FleetFitError as error:
        print(error, file=sys.stderr)
        return 2
    counts = Counter(one.verdict for one in judged)
    said = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in judging.Verdict)
    print(f"{len(judged)} claims: {said}.")
    if options.check:
        old = [p for p, said in pages.items() if not p.is_file() or p.read_text(encoding="utf-8") != said]
        for path in pages:
            said = "out of date: run make results" if path in old else "as the results say"
            print(f"{path.relative_to(root)} is {said}.")
        return int(bool(old))
    for path, said in pages.items():
        files.write_text(path, said)
    figures.save(drawn, root / PAGE.with_suffix(""))
    print(f"Written: {PAGE} and {len(drawn)} figures.")
    return 0


if __name__ == "__main__":
    sys.exit(main())

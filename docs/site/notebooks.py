"""Run the notebooks of docs/notebooks/, and keep what came out in build/notebooks/, from where the site shows them.

    .venv/bin/python docs/site/notebooks.py

The notebooks are kept without outputs; one that has not changed since it was last run here is not run again. A cell
that fails ends with the cell and its error, and exit code 1.
"""

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbclient
import nbformat
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS, RUN = ROOT / "docs" / "notebooks", ROOT / "build" / "notebooks"
LIMIT_S = 600  # of a cell


def digest(path: Path) -> str:
    """Return what tells whether a notebook changed."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def run(path: Path, out: Path) -> None:
    """Run a notebook in an empty folder, and write it with its outputs.

    Raises:
        CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook, timeout=LIMIT_S, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    notebook.metadata["source_sha256"] = digest(path)
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, out)


def is_current(path: Path, out: Path) -> bool:
    """Tell whether a notebook was run as it is."""
    return out.is_file() and nbformat.read(out, as_version=4).metadata.get("source_sha256") == digest(path)


def problems() -> Iterator[str]:
    """Run what changed, side by side; yield a text for each notebook that failed."""
    wanted = [path for path in sorted(NOTEBOOKS.glob("*.ipynb")) if not is_current(path, RUN / path.name)]
    with ThreadPoolExecutor(3) as pool:
        for path, done in [(path, pool.submit(run, path, RUN / path.name)) for path in wanted]:
            try:
                done.result()
            except CellExecutionError as error:
                yield f"{path.relative_to(ROOT)}: {error}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models; three kernels with all cores each wait for each other
    found = list(problems())
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))

"""MkDocs hooks: each notebook of docs/notebooks/ is a page, with what came out when it was last run (notebooks.py)."""

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS, RUN = ROOT / "docs" / "notebooks", ROOT / "build" / "notebooks"
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}


def outputs_of(cell: Any, stem: str, number: int) -> Iterator[tuple[str, str | bytes]]:
    """Yield what a cell put out: ("", Markdown), or the name of a picture and its bytes."""
    text = ""
    for place, output in enumerate(cell.get("outputs", ())):
        data = output.get("data", {})
        kind = next((kind for kind in PICTURES if kind in data), None)
        if kind:
            name = f"{stem}-{number}-{place}.{PICTURES[kind]}"
            yield name, base64.b64decode(data[kind]) if kind == "image/png" else data[kind]
        elif "<" in data.get("text/html", "") and "<script" not in data["text/html"]:
            yield "", f'<div class="out">{" ".join(data["text/html"].split())}</div>'
        else:
            text += output.get("text") or data.get("text/plain", "")
            text += "" if text.endswith("\n") else "\n"
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).strip("\n")
    if text:
        yield "", f'```text title="Out"\n{text}\n```'


def page_of(notebook: Any, stem: str) -> tuple[str, dict[str, str | bytes]]:
    """Return a notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(re.sub(r"\]\(([\w-]+)\.ipynb", r"](\1.md", cell.source))
        elif cell.cell_type == "code":
            parts.append(f"```python\n{cell.source}\n```")
            for name, made in outputs_of(cell, stem, number):
                if name:
                    pictures[name] = made
                    parts.append(f"![What the cell above drew]({name})")
                else:
                    parts.append(str(made))
    return "\n\n".join(parts) + "\n", pictures


def on_files(files: Files, *, config: Any) -> Files:
    """Add a page for each notebook, and the notebook itself to be downloaded."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        was_run = RUN / path.name
        notebook = nbformat.read(was_run if was_run.is_file() else path, as_version=4)
        page, pictures = page_of(notebook, path.stem)
        note = f'This page is <a href="{path.name}" download>a notebook</a>, as it ran when the site was built.'
        head, _, rest = page.partition("\n\n")
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=f"{head}\n\n{note}\n\n{rest}"))
        excluded = files.get_file_from_path(f"notebooks/{path.name}")
        if excluded is not None:
            files.remove(excluded)
        included = InclusionLevel.INCLUDED
        files.append(File.generated(config, f"notebooks/{path.name}", content=path.read_bytes(), inclusion=included))
        for name, made in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=made))
    return files

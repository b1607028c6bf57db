"""MkDocs hooks: where a page links into the repository (`../SECURITY.md`, `../examples/a.py`), the site has it too.

Each file that a page links to outside of docs/ becomes a page of the site under `repository/`: Markdown as it is, code
as a block, anything else as a file. So every link of the repository's Markdown leads somewhere in both places, the site
needs no address of a server, and MkDocs checks those links like all others.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
SHOWN = {".py": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml", ".yaml": "yaml", ".sh": "sh", ".ini": "ini"}
ASIDE = ("repository/", "adr/", "results.md", "papers.md", "paper-tables.md", "architecture.md")
"""Sources, logs, decisions and evidence: the search shows them below all other pages."""
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def outside_of_fences(markdown: str) -> Iterator[tuple[bool, str]]:
    """Yield the stretches of a page, and whether each is text rather than a fenced block."""
    at = 0
    for block in FENCE.finditer(markdown):
        yield True, markdown[at : block.start()]
        yield False, block[0]
        at = block.end()
    yield True, markdown[at:]


def target_of(link: str, page: str) -> str | None:
    """Return the path in the repository that a link of a page names, or None if it leads elsewhere."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    read_me = posixpath.join(path, "README.md")
    return read_me if (ROOT / read_me).is_file() else path


def uri_of(path: str) -> str:
    """Return where in the site's sources a file of the repository lies."""
    if path.startswith(DOCS):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix(DOCS))  # a notebook is a page, too
    if Path(path).suffix in SHOWN or "." not in Path(path).name:
        return f"repository/{path}.md"
    return f"repository/{path}"


def path_of(uri: str) -> str:
    """Return the file of the repository that a page of the site is made of."""
    if not uri.startswith("repository/"):
        return DOCS + uri
    path = uri.removeprefix("repository/")
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def linked(markdown: str, page: str) -> Iterator[str]:
    """Yield the files of the repository outside of docs/ that a page links to."""
    for is_text, stretch in outside_of_fences(markdown):
        for link in LINK.finditer(stretch) if is_text else ():
            path = target_of(link[2], page)
            if path and not path.startswith(DOCS) and (ROOT / path).exists():
                yield path


def as_page(path: str) -> str:
    """Return what the site shows of a file of the repository."""
    if (ROOT / path).is_dir():
        files = sorted(p.name for p in (ROOT / path).iterdir() if p.suffix in (*SHOWN, ".md"))
        return f"# {path}/\n\n" + "".join(f"- [{name}]({Path(path).name}/{name})\n" for name in files)
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    fence = "`" * (3 + max((len(run) for run in re.findall(r"`{3,}", text)), default=0))
    return f"# {path}\n\n{fence}{SHOWN.get(Path(path).suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add the files of the repository that pages link to, and those that these link to."""
    waiting = [(path_of(file.src_uri), file.content_string) for file in files.documentation_pages()]
    known: set[str] = set()
    while waiting:
        page, markdown = waiting.pop()
        for path in sorted({*linked(markdown, page)} - known):
            known.add(path)
            uri = uri_of(path)
            if uri.endswith(".md"):
                shown = as_page(path)
                files.append(File.generated(config, uri, content=shown, inclusion=InclusionLevel.NOT_IN_NAV))
                if path.endswith(".md") or (ROOT / path).is_dir():
                    waiting.append((path, shown))
            else:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def with_one_title(markdown: str) -> str:
    """Return a page in which everything below the first title is a chapter of it, so that its contents are listed."""
    stretches = list(outside_of_fences(markdown))
    titles = sum(len(re.findall(r"^# ", text, re.MULTILINE)) for is_text, text in stretches if is_text)
    if titles < 2:
        return markdown
    lower = [re.sub(r"^#", "##", text, flags=re.MULTILINE) if is_text else text for is_text, text in stretches]
    return re.sub(r"^## ", "# ", "".join(lower), count=1, flags=re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Let links into the repository lead to where the site has it."""
    uri = page.file.src_uri
    if uri.startswith(ASIDE):
        page.meta["search"] = {"boost": 1e-6}  # a word of a title counts a thousand times
    markdown = with_one_title(markdown)

    def moved(link: re.Match[str]) -> str:
        path = target_of(link[2], path_of(uri))
        if path is None or not (ROOT / path).exists():
            return link[0]
        there = posixpath.relpath(uri_of(path), posixpath.dirname(uri) or ".")
        return f"{link[1]}{there}{link[3] or ''}{link[4]}"

    return "".join(LINK.sub(moved, text) if is_text else text for is_text, text in outside_of_fences(markdown))

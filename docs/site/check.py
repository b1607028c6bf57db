"""Check a built site: no page loads anything from elsewhere, and every link inside it leads somewhere.

    .venv/bin/python docs/site/check.py build/site

MkDocs checks the links that pages are written with; this reads the pages as they came out, with what templates,
plug-ins and notebooks added.
"""

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
         "link": "href", "embed": "src", "object": "data", "use": "href"}  # fmt: skip
"""What a browser loads by itself, and the attribute that says from where."""
NOT_LOADED = {"canonical", "alternate", "next", "prev", "license", "edit"}
"""Kinds of <link> that load nothing."""
CSS = re.compile(r"url\(\s*['\"]?((?:https?:)?//[^)'\"\s]+)|@import\s+(?:url\()?['\"]((?:https?:)?//[^'\"]+)")


class Page(HTMLParser):
    """A page: what it loads, where it links to, and which places in it can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.places |= {given[name] for name in ("id", "name") if name in given}
        if tag in LOADS and not (tag == "link" and set(given.get("rel", "").split()) & NOT_LOADED):
            self.loads += filter(None, [given.get(LOADS[tag], "")])
        self.loads += [part.split()[0] for part in given.get("srcset", "").split(",") if part.split()]
        self.loads += [a or b for a, b in CSS.findall(given.get("style", ""))]
        if "mermaid" in given.get("class", "").split():
            self.loads.append("https://unpkg.com/mermaid (a diagram of Mermaid: draw it as SVG instead)")
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


def is_elsewhere(address: str) -> bool:
    """Tell whether an address is on another machine."""
    return bool(re.match(r"(https?:)?//", address))


def from_elsewhere(site: Path) -> Iterator[str]:
    """Yield a line for each thing that a page or a style sheet loads from elsewhere."""
    for path in sorted(site.rglob("*.html")):
        for address in Page(path.read_text(encoding="utf-8")).loads:
            if is_elsewhere(address):
                yield f"{path.relative_to(site)} loads {address}"
    for path in sorted(site.rglob("*.css")):
        for a, b in CSS.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {a or b}"


def broken(site: Path) -> Iterator[str]:
    """Yield a line for each link and each thing loaded inside the site that is not there."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for path, page in sorted(pages.items()):
        if path.name == "404.html":  # its links begin at the server's root
            continue
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme or link.startswith("//"):
                continue
            there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            there = there / "index.html" if there.is_dir() else there
            name = path.relative_to(site.resolve())
            if not there.is_file():
                yield f"{name} links to {link}, which is not there"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].places:
                yield f"{name} links to {link}, a page without that place"


def unsearchable(site: Path) -> Iterator[str]:
    """Yield what keeps the search from working, on a server and from disk."""
    for name in ("search/search_index.json", "search/search_index.js", "assets/iframe-worker.js"):
        if not (site / name).is_file() or not (site / name).stat().st_size:
            yield f"{name} is missing: the search needs it"


def main(folder: str) -> int:
    """Print the faults; return 1 if there are any."""
    site = Path(folder)
    found = [*from_elsewhere(site), *broken(site), *unsearchable(site)]
    pages = len([*site.rglob("*.html")])
    if not pages:
        found.append(f"{site} has no pages")
    print(*(found or [f"{pages} pages in {site}; open {site}/index.html"]), sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

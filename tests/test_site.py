"""The documentation as a site: what `make docs` checks in it, and how pages reach files of the repository."""

import json
import re
import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def check() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "site" / "check.py"))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site with nothing wrong in it."""
    (tmp_path / "search").mkdir()
    (tmp_path / "assets").mkdir()
    for name in ("search/search_index.json", "search/search_index.js", "assets/iframe-worker.js"):
        (tmp_path / name).write_text("x")
    (tmp_path / "a.css").write_text("@import 'b.css'; p { background: url(c.png) } @font-face { src: url('d.woff2') }")
    (tmp_path / "b.html").write_text('<h1 id="there">b</h1><a href="https://example.org/">out</a>')
    (tmp_path / "index.html").write_text(
        '<link rel="canonical" href="https://example.org/"><link rel="stylesheet" href="a.css">'
        '<script src="assets/iframe-worker.js"></script><a href="b.html#there">b</a><a href="#here" id="here">here</a>'
    )
    return tmp_path


def test_a_site_with_nothing_wrong_passes(
    check: dict[str, Any], site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check["main"](str(site)) == 0
    assert capsys.readouterr().out.startswith("2 pages")


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("p.html", '<script src="https://cdn.example.org/x.js"></script>', "p.html loads https://cdn.example.org/x.js"),
        ("p.html", '<link rel="stylesheet" href="//fonts.example.org/css">', "loads //fonts.example.org/css"),
        ("p.html", '<link rel="preconnect" href="https://fonts.example.org">', "loads https://fonts.example.org"),
        ("p.html", '<img src="http://example.org/x.png">', "loads http://example.org/x.png"),
        ("p.html", '<img srcset="a.png 1x, https://example.org/b.png 2x">', "loads https://example.org/b.png"),
        ("p.html", '<p style="background: url(https://example.org/x.png)">', "loads https://example.org/x.png"),
        ("p.html", '<pre class="mermaid"><code>graph</code></pre>', "draw it as SVG"),
        ("p.css", "@font-face { src: url('https://example.org/f.woff2') }", "p.css loads https://example.org/f.woff2"),
        ("p.css", "@import url('//example.org/f.css');", "p.css loads //example.org/f.css"),
        ("p.html", '<a href="nowhere.html">x</a>', "p.html links to nowhere.html, which is not there"),
        ("p.html", '<a href="b.html#nowhere">x</a>', "a page without that place"),
        ("search/search_index.js", "", "search/search_index.js is missing"),
    ],
)
def test_what_is_wrong_with_a_site_is_named(
    check: dict[str, Any], site: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    (site / file).write_text(text)
    assert check["main"](str(site)) == 1
    assert message in capsys.readouterr().out


def test_an_empty_folder_is_no_site(check: dict[str, Any], tmp_path: Path) -> None:
    assert check["main"](str(tmp_path)) == 1


def pages_in_nav() -> list[str]:
    return re.findall(r"(?m)^ +- (?:.*: )?([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text())


def test_every_page_is_in_the_navigation_once() -> None:
    """MkDocs warns, too; this needs no extra."""
    pages = {path.name for path in DOCS.glob("*.md")} | {"adr/README.md"}
    pages |= {f"notebooks/{path.stem}.md" for path in DOCS.glob("notebooks/*.ipynb")}
    assert sorted(pages_in_nav()) == sorted(pages)


def test_ci_and_the_extras_have_the_site() -> None:
    assert re.search(r"^for target in docs ", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    recipe = re.search(r"^docs: env ##.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe and "mkdocs build --strict" in recipe[1] and "--strict --quiet" not in recipe[1], (
        "quiet: no warning counts"
    )
    assert "docs/site/check.py build/site" in recipe[1]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(line.startswith("mkdocs-material") for line in extras["docs"])


def test_no_page_asks_for_fonts_or_diagrams_from_elsewhere() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^  font: false\b", config, re.MULTILINE)
    assert "http" not in re.sub(r"#.*", "", config), "the configuration names an address on another machine"
    assert not [path.name for path in DOCS.rglob("*.md") if "```mermaid" in path.read_text()]


@pytest.fixture(scope="module")
def repository() -> dict[str, Any]:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    return runpy.run_path(str(DOCS / "site" / "repository.py"))


@pytest.mark.parametrize(
    ("link", "page", "path", "uri"),
    [
        ("../SECURITY.md", "docs/trust.md", "SECURITY.md", "repository/SECURITY.md"),
        ("docs/trust.md", "SECURITY.md", "docs/trust.md", "trust.md"),
        ("adr/", "docs/index.md", "docs/adr/README.md", "adr/README.md"),
        ("../fleetfit/models/vim.py", "docs/a.md", "fleetfit/models/vim.py", "repository/fleetfit/models/vim.py.md"),
        ("../LICENSE", "docs/a.md", "LICENSE", "repository/LICENSE.md"),
        ("../experiments/results/deadlines.json", "docs/a.md", "experiments/results/deadlines.json", None),
    ],
)
def test_a_link_into_the_repository_has_a_page(
    repository: dict[str, Any], link: str, page: str, path: str, uri: str | None
) -> None:
    assert repository["target_of"](link, page) == path
    assert repository["uri_of"](path) == (uri or f"repository/{path}")
    if uri:
        assert repository["path_of"](uri) == path


def test_links_on_code_and_to_other_machines_stay(repository: dict[str, Any]) -> None:
    assert repository["target_of"]("https://example.org/a.md", "docs/a.md") is None
    links = [*repository["outside_of_fences"]("a\n```text\n[x](../y.md)\n```\nb")]
    assert [is_text for is_text, _ in links] == [True, False, True]
    assert not [*repository["linked"]("```text\n[x](../SECURITY.md)\n```", "docs/a.md")]
    assert [*repository["linked"]("[x](../SECURITY.md)", "docs/a.md")] == ["SECURITY.md"]


def test_a_page_of_several_parts_has_one_title(repository: dict[str, Any]) -> None:
    page = "# A\n\n## b\n\n```sh\n# c\n```\n\n# D\n\n## e\n"
    merged = repository["with_one_title"](page)
    assert merged == "# A\n\n### b\n\n```sh\n# c\n```\n\n## D\n\n### e\n"
    assert repository["with_one_title"]("# A\n\n## b\n") == "# A\n\n## b\n"


@pytest.mark.parametrize(
    ("uri", "is_aside"),
    [
        ("data.md", False), ("notebooks/first-run.md", False), ("adr/0024-a.md", True),
        ("repository/experiments/LOG.md", True), ("repository/fleetfit/rounds/round.py.md", True), ("results.md", True),
    ],
)  # fmt: skip
def test_sources_logs_and_decisions_are_last_in_the_search(
    repository: dict[str, Any], uri: str, is_aside: bool
) -> None:
    """The least score of a user's page, a word of its text, is above the most of another one, a word of its title."""
    page = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
    repository["on_page_markdown"]("# a", page=page, config=None, files=None)
    boost = page.meta.get("search", {}).get("boost", 1)
    assert (boost * 1000 < 0.1) if is_aside else boost == 1


# ---- notebooks -----------------------------------------------------------------------------------------------------

NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert cells[0]["cell_type"] == "markdown" and "".join(cells[0]["source"]).startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert code and not [cell for cell in code if cell["outputs"] or cell["execution_count"]]
    links = re.findall(r"\]\(([^)#]+)\)", "".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown"))
    assert not [link for link in links if "://" not in link and not (path.parent / link).exists()]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nbclient", reason="the extra docs is not installed")
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebooks = runpy.run_path(str(DOCS / "site" / "notebooks.py"))
    notebooks["run"](path, tmp_path / path.name)
    assert notebooks["is_current"](path, tmp_path / path.name)
    assert any(cell.get("outputs") for cell in json.loads((tmp_path / path.name).read_text())["cells"])


def test_make_docs_runs_the_notebooks_first() -> None:
    recipe = re.search(r"^docs: env ##.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(NOTEBOOKS) == 4
    assert recipe and recipe[1].index("docs/site/notebooks.py") < recipe[1].index("mkdocs build")


def test_a_notebook_becomes_a_page() -> None:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    nbformat = pytest.importorskip("nbformat", reason="the extra docs is not installed")
    page_of = runpy.run_path(str(DOCS / "site" / "notebook_pages.py"))["page_of"]
    cell = nbformat.v4.new_code_cell("1 + 1")
    cell.outputs = [
        nbformat.v4.new_output("stream", text="\x1b[31msaid\x1b[0m\n"),
        nbformat.v4.new_output("display_data", data={"image/png": "aGk=", "text/plain": "<Image>"}),
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# T\n\n[next](b-c.ipynb)"), cell])
    page, pictures = page_of(notebook, "a")
    assert "[next](b-c.md)" in page and "```python\n1 + 1\n```" in page and "\nsaid\n```" in page
    assert pictures == {"a-1-1.png": b"hi"} and "](a-1-1.png)" in page

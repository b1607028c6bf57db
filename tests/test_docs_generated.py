"""What docs/ takes from the code stands there as the code says it; `python docs/generate.py` writes it anew."""

import importlib
import inspect
import re
import runpy
from pathlib import Path
from typing import Any, Literal

import pytest

from fleetfit.cli import listing
from fleetfit.core.section import Fraction, Section
from fleetfit.hooks import FEDAVG, HOOKS, fedavg as hooks

DOCS = Path(__file__).parents[1] / "docs"
RENEW = "run .venv/bin/python docs/generate.py"


@pytest.fixture(scope="module")
def generate() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_page_of_hooks_is_as_the_code_says(generate: dict[str, Any]) -> None:
    assert (DOCS / "hooks.md").read_text() == generate["hooks_page"](), RENEW


def test_the_page_of_methods_matches_the_code(generate: dict[str, Any]) -> None:
    page = (DOCS / "methods.md").read_text()
    assert generate["methods_page"](page) == page, RENEW


def test_the_keys_of_attacks_are_as_the_code_says(generate: dict[str, Any]) -> None:
    page = (DOCS / "trust.md").read_text()
    assert generate["trust_page"](page) == page, RENEW


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "reference.py"))


@pytest.mark.parametrize("name", ["keys", "built_in", "verbs", "networks"])
def test_the_pages_of_keys_verbs_and_networks_are_as_the_code_says(reference: dict[str, Any], name: str) -> None:
    page = (DOCS / f"{name.replace('_', '-')}.md").read_text()
    assert page == reference[f"{name}_page"](), RENEW


def test_the_catalogue_is_as_the_code_says(reference: dict[str, Any]) -> None:
    assert listing.CATALOGUE.read_text() == reference["catalogue"](), RENEW


def test_the_pictures_are_as_they_are_drawn() -> None:
    drawn = runpy.run_path(str(DOCS / "pictures.py"))["PICTURES"]
    assert {path.stem for path in (DOCS / "pictures").iterdir()} == set(drawn)
    for name, draw in drawn.items():
        drawing = draw()
        assert (DOCS / "pictures" / f"{name}.svg").read_text() == drawing, "run .venv/bin/python docs/pictures.py"
        assert "prefers-color-scheme: dark" in drawing and "http" not in drawing.replace(
            "http://www.w3.org/2000/svg", ""
        )


def test_the_page_of_python_has_every_public_name() -> None:
    page = (DOCS / "api.md").read_text()
    for place in ("", "architecture.", "method."):
        module = importlib.import_module(f"fleetfit.{place}".rstrip("."))
        names = [name for name in dir(module) if not name.startswith("_")]
        named = re.findall(rf"^::: fleetfit\.{re.escape(place)}(\w+)$", page, re.MULTILINE)
        elsewhere = {"CoverageMean"} if place == "method." else set()  # the default of a hook, on hooks.md
        assert sorted(named) == sorted({*names} - elsewhere), place


def test_a_key_that_is_not_explained_is_named(reference: dict[str, Any]) -> None:
    class Odd(Section):
        """`[odd]`: something.

        Attributes:
            size: A key.
        """

        size: int = 1
        unknown: int = 2

    with pytest.raises(ValueError, match="Odd .* unknown"):
        reference["keys_table"](Odd, reference["explained"](Odd.__doc__))


def test_keys_say_what_they_take(reference: dict[str, Any]) -> None:
    page = (DOCS / "keys.md").read_text()
    assert "| `rounds` | whole number from 1 | `30` |" in page
    assert '| `optimizer` | `"sgd"` or `"adam"` or `"adamw"` | `"sgd"` |' in page
    assert reference["type_in_words"](Fraction | None) == "number above 0, up to 1"
    assert reference["type_in_words"](list[int]).startswith("list of ")


def test_a_key_of_a_section_leads_to_its_keys() -> None:
    page = (DOCS / "keys.md").read_text()
    headings = {re.sub(r"\W", "", title) for title in re.findall(r"^## `(.+)`$", page, re.MULTILINE)}
    assert {re.sub(r"\W", "", link) for link in re.findall(r"\]\(#(\w+)\)", page)} == headings
    assert "see below" not in page


def test_every_hook_has_its_arguments_and_default() -> None:
    page = (DOCS / "hooks.md").read_text()
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert list(parts)[: len(HOOKS)] == list(HOOKS)
    for hook in HOOKS:
        default = getattr(FEDAVG, hook)
        assert f"`{hook}({', '.join(inspect.signature(default).parameters)})`" in parts[hook]
        assert f"**FedAvg**, `{default.__name__}`" in parts[hook]
        assert all(f"- **{word}**: " in parts[hook] for word in ("Where", "Before", "After", "Returns"))
    for value in ("Job", "Update", "Device", "Clients", "Server", "Federation"):
        assert parts[value].count("\n- `") >= 4


def test_a_docstring_that_leaves_something_out_is_named(
    generate: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    documented = inspect.cleandoc(hooks.annotate_nothing.__doc__ or "")
    monkeypatch.setattr(hooks.annotate_nothing, "__doc__", documented.replace("FedAvg: adds nothing.\n", ""))
    with pytest.raises(ValueError, match="annotate_nothing .* FedAvg"):
        generate["hooks_page"]()
    monkeypatch.setattr(hooks.annotate_nothing, "__doc__", re.sub(r"    update: .*\n.*\n", "", documented))
    with pytest.raises(ValueError, match=r"takes .*'update'.* and documents \['federation', 'server'\]"):
        generate["hooks_page"]()


def test_keys_are_written_as_in_a_run_file(generate: dict[str, Any]) -> None:
    def component(
        on: bool = True, kind: Literal["a", "b"] = "a", sizes: tuple[float, ...] = (0.5, 1), most: int | None = None
    ) -> None:
        """Make.

        Args:
            on: Whether.
            kind: How it is done,
                over two lines.
            sizes: Of it.
            most: At most; None: no limit.
        """

    assert generate["keys_of"](component) == [
        "- `on = true`: Whether.",
        '- `kind = "a"`: How it is done, over two lines ("a", "b").',
        "- `sizes = [0.5, 1]`: Of it.",
        "- `most`: At most; None: no limit.",
    ]

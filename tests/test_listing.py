"""`list` reads sources: it says what an import would, and imports nothing heavy."""

import subprocess
import sys

import pytest

from fleetfit import names
from fleetfit.cli import listing

KINDS = ("methods", "options", "models", "data", "selection", "peft", "attacks", "engines")
NAMES = [(kind, name) for kind in KINDS for name in names.list_names(kind)]
NUMBERS = ("train", "test", "classes", "resolution")


@pytest.mark.parametrize(("kind", "name"), NAMES)
def test_a_source_says_what_its_module_is(kind: str, name: str) -> None:
    read, imported = listing.parse_entry(kind, name), listing.import_entry(kind, name)
    assert read.summary == imported.summary and dict(read.keys) == dict(imported.keys)
    for key in read.keys:
        assert listing.find_meaning(read.doc, key) == listing.find_meaning(imported.doc, key), key
    if imported.facts is None:
        assert read.facts is None
    else:
        assert [getattr(read.facts, n) for n in NUMBERS] == [getattr(imported.facts, n) for n in NUMBERS]


def test_nothing_heavy_is_imported() -> None:
    """Of every kind, and of one of each; an import of torch would be an error here."""
    asked = [
        ("profiles",),
        *((kind,) for kind in KINDS),
        ("models", "resnet20"),
        ("methods", "scalefl"),
        ("data", "mnist"),
    ]
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = sys.modules['pydantic'] = None\n"
        "from fleetfit.cli.main import run_command\n"
        f"print([run_command(['list', *words]) for words in {asked}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([0] * len(asked)), done.stderr
    assert "head_layers" in done.stdout and "beta" in done.stdout and "60,000" in done.stdout

"""`list` reads its catalogue, which test_docs_generated.py compares with the code, and imports nothing heavy."""

import inspect
import subprocess
import sys

import pytest
from support import run_verb

from fleetfit.cli.listing import ListKind, format_key

KINDS = ("methods", "options", "models", "data", "selection", "peft", "attacks", "engines")


def test_nothing_heavy_is_imported() -> None:
    """By the package, its names, its help, and lists of every kind: an import of torch would be an error here."""
    arguments = [
        (),
        ("profiles",),
        *((kind,) for kind in KINDS),
        ("models", "resnet20"),
        ("methods", "scalefl"),
        ("data", "mnist"),
    ]
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'numpy', 'pydantic', 'PIL')))\n"
        "import fleetfit; assert 'typer' not in sys.modules\n"
        "from fleetfit import names; assert 'resnet20' in names.list_names('models')\n"
        "from fleetfit.cli.main import run_command\n"
        "assert run_command(['--help']) == 0\n"
        f"print([run_command(['list', *words]) for words in {arguments}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([0] * len(arguments)), done.stderr
    assert all(f" {verb} " in done.stdout for verb in ("run", "plan", "compare", "resume", "eval", "check-model"))
    assert "head_layers" in done.stdout and "beta" in done.stdout and "60,000" in done.stdout


def test_without_a_kind_the_names_of_all_are_printed() -> None:
    out = run_verb("list", code=0).out
    assert all(f" {kind} " in out for kind in ListKind) and "heterofl" in out and "jetson-nano" in out


@pytest.mark.parametrize(
    ("default", "meaning", "expected"),
    [
        (None, "Clients; 40 by default, fewer where data are small.", ("40, fewer where data are small", "Clients.")),
        (None, "Side; None: no resizing. More.", ("no resizing", "Side. More.")),
        (None, "By default the run's.", ("the run's", "")),
        (None, "A limit.", ("none", "A limit.")),
        (3, "Blocks; 3 by default.", ("3", "Blocks.")),
        (0.5, "Rate; with a rule by default.", ("0.5", "Rate; with a rule by default.")),
        (inspect.Parameter.empty, "A folder.", ("needed", "A folder.")),
    ],
)  # fmt: skip
def test_a_default_in_words_comes_from_its_clause(default: object, meaning: str, expected: tuple[str, str]) -> None:
    assert format_key(default, meaning) == expected

"""Habits of the repository that no other tool checks; each check is also tried on a sample that it must refuse."""

import ast
import builtins
import graphlib
import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fleetfit"
MODULES = sorted(PACKAGE.rglob("*.py"))
ADRS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))

BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc"}

PICKLERS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Functions that pickle, or read pickles.
PICKLING_CALLS = {"torch.load", "torch.save", "pandas.read_pickle"}

# The modules that seed torch's global generator: dropout and the like know no other.
SEEDS_GLOBALLY = {"fleetfit/seeds.py", "fleetfit/training/job.py", "fleetfit/training/local_model.py"}
TORCH_GLOBAL = re.compile(
    r"torch\.(random\.)?(manual_seed|seed|set_rng_state|fork_rng)"
    r"|torch\.cuda\.(random\.)?(manual_seed|manual_seed_all|seed|seed_all|set_rng_state|set_rng_state_all)"
)
NUMPY_OWN_STATE = {"default_rng", "Generator", "BitGenerator", "SeedSequence", "PCG64", "PCG64DXSM", "Philox", "SFC64"}
PYTHON_OWN_STATE = {"Random"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imported_modules(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of each module that is imported anywhere in the tree, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, full dotted name) of each use of an imported name, aliases undone: `np.random.seed` -> numpy..."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                aliases[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in ast.walk(tree):
        parts: list[str] = []
        part: ast.AST = node
        while isinstance(part, ast.Attribute):
            parts.append(part.attr)
            part = part.value
        if isinstance(part, ast.Name) and part.id in aliases and isinstance(node, ast.Attribute | ast.Name):
            yield node.lineno, ".".join([aliases[part.id], *reversed(parts)])


def pickling(source: str) -> list[str]:
    """List each import of a pickling module and each use of a function that pickles."""
    tree = ast.parse(source)
    pickles = [name for name in imported_modules(tree) if name.split(".")[0] in PICKLERS]
    pickles += [f"line {line}: {name}" for line, name in dotted_uses(tree) if name in PICKLING_CALLS]
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle" and getattr(node.value, "value", True):
            pickles.append(f"line {node.value.lineno}: allow_pickle")
    return pickles


def global_randomness(source: str) -> list[str]:
    """List each use of a random generator that the whole process shares."""
    uses = []
    for line, name in dotted_uses(ast.parse(source)):
        head, _, last = name.rpartition(".")
        if (
            TORCH_GLOBAL.fullmatch(name)
            or (head == "numpy.random" and last not in NUMPY_OWN_STATE)
            or (head == "random" and last not in PYTHON_OWN_STATE)
        ):
            uses.append(f"line {line}: {name}")
    return uses


def named_in_tree(markdown: str) -> list[str]:
    """Return the paths in the first column of the tables of modules and folders, relative to the repository.

    A path that begins with a slash is one of the repository, any other one of the package.
    """
    tables = re.findall(r"^\| (?:module|folder) \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", markdown, re.MULTILINE)
    paths = [path for table in tables for path in re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)]
    return [path[1:] if path.startswith("/") else f"{PACKAGE.name}/{path}" for path in paths]


def top_level(package: Path) -> set[str]:
    """Return the modules and packages right under a package, as a tree names them."""
    modules = {f"{package.name}/{path.name}" for path in package.glob("*.py") if not path.name.startswith("__")}
    return modules | {f"{package.name}/{path.parent.name}/" for path in package.glob("*/*.py")}


def pins(text: str) -> dict[str, str]:
    """Read `name==version` lines; names as package indexes normalize them."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), "not name==version"
    return {normal(line.split("==")[0]): line.split("==")[1] for line in lines}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_there_are_modules_to_check():
    assert len(MODULES) > 1


def test_no_module_is_a_drawer():
    banned = [relative(path) for path in MODULES if {*path.relative_to(PACKAGE).with_suffix("").parts} & BANNED_NAMES]
    assert not banned, f"name these after what they do: {banned}"


def circle(imports):
    """Return modules that import each other in a circle, the first one again at the end; none: an empty list."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_modules_import_each_other():
    graph = grimp.build_graph("fleetfit", exclude_type_checking_imports=False, cache_dir=None)
    graph.remove_import(importer="fleetfit.core.fleet", imported="fleetfit.hooks")  # the type of Federation.method
    assert circle({module: graph.find_modules_directly_imported_by(module) for module in graph.modules}) == []


def test_a_circle_of_imports_is_seen():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})
    assert circle({"a": {"b"}, "b": {"c"}, "d": {"a"}}) == []


def test_nothing_pickles():
    users = {relative(path): pickling(path.read_text()) for path in MODULES}
    assert not {path: lines for path, lines in users.items() if lines}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from pickle import loads",
        "import multiprocessing, cloudpickle as c",
        "import torch\ntorch.load('x')",
        "from torch import save as s\ns({}, 'x')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
    ],
)
def test_pickling_is_seen(source):
    assert pickling(source)


def test_other_reading_and_writing_is_not_pickling():
    assert not pickling("import numpy as np, json\nnp.load('x', allow_pickle=False)\njson.dumps({})\nmodule.save('x')")


def test_no_global_randomness():
    users = {relative(path): global_randomness(path.read_text()) for path in MODULES}
    assert {path for path, lines in users.items() if lines} <= SEEDS_GLOBALLY


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.manual_seed(0)",
        "import torch as t\nt.cuda.manual_seed_all(0)",
        "from torch import manual_seed\nmanual_seed(0)",
        "import numpy as np\nnp.random.seed(0)",
        "import numpy as np\nnp.random.shuffle([])",
        "from numpy.random import permutation\npermutation(3)",
        "import random\nrandom.choice([1])",
        "def f():\n    from random import shuffle\n    shuffle([])",
    ],
)
def test_global_randomness_is_seen(source):
    assert global_randomness(source)


def test_generators_of_their_own_are_not_global_randomness():
    source = """
import random, torch, numpy as np
def f(rng: np.random.Generator, random_state):
    torch.Generator().manual_seed(0)
    np.random.default_rng(0).shuffle([])
    random.Random(0).choice([1])
    rng.random()
    random_state.choice([1])
"""
    assert not global_randomness(source)


TREE = """
| module | what it is |
| --- | --- |
| `cli/` | the verbs |
| `data/sets/` | data sets; see `api/` |

| folder | what it is |
| --- | --- |
| `/tests/` | tests |

| word | what it means |
| --- | --- |
| `cohort` | the clients of a round |
"""


def test_a_tree_is_read():
    assert named_in_tree(TREE) == ["fleetfit/cli/", "fleetfit/data/sets/", "tests/"]


def test_the_tree_names_what_exists_and_all_of_it():
    named = named_in_tree((ROOT / "docs" / "architecture.md").read_text())
    assert named, "docs/architecture.md has no table of modules"
    assert not [path for path in named if not list(ROOT.glob(path.rstrip("/")))], "named, but not on disk"
    assert not top_level(PACKAGE) - set(named), "on disk, but not named"
    assert "(docs/architecture.md)" in (ROOT / "README.md").read_text()


def test_the_places_of_changes_exist():
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| to change |")[2].partition("\n\n")[0]
    places = re.findall(r"`([a-z_/]+(?:/|\.py))`", table)
    assert len(places) > 8
    assert not [place for place in places if not (PACKAGE / place).exists()]


def find_missing(markdown: str, makefile: str) -> list[str]:
    """Return links, paths and targets of make that a page of the root names and that do not exist."""
    code = " ".join(
        re.findall(r"`([^`\n]+)`", markdown) + re.findall(r"^```sh\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)
    )
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", markdown)
    folders = "|".join(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))
    paths = re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]*)(?![\w*])", code)
    missing = [path for path in [*links, *paths] if "NAME" not in path and not (ROOT / path).exists()]
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    return missing + [f"make {name}" for name in re.findall(r"\bmake ([a-z-]+)", code) if name not in targets]


@pytest.mark.parametrize("page", ["AGENTS.md", "CONTRIBUTING.md"])
def test_a_page_of_the_root_names_what_exists(page: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert find_missing((ROOT / page).read_text(encoding="utf-8"), makefile) == []


def test_what_a_page_names_in_vain_is_seen() -> None:
    page = "[a](docs/none.md#b) `fleetfit/none.py` `docs/` `make none` `make all` [words](#words)"
    assert find_missing(page, "all: a\n") == ["docs/none.md", "fleetfit/none.py", "make none"]


def test_agents_find_the_rooms() -> None:
    rooms = (ROOT / "AGENTS.md").read_text(encoding="utf-8").partition("| rooms |")[2].partition("\n\n")[0]
    named = re.findall(r"`([a-z_/]+(?:/|\.py))`", rooms)
    assert len(named) > 20
    assert not [name for name in named if not (PACKAGE / name).exists()]


def test_no_class_name_stands_twice():
    """A reader who meets a class knows which one it is."""
    by_name = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                by_name.setdefault(node.name, []).append(relative(path))
    assert len(by_name) > 200
    assert not {name: places for name, places in by_name.items() if len(places) > 1}


def test_every_decision_is_in_the_index():
    index = (ROOT / "docs" / "adr" / "README.md").read_text()
    linked = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", index)
    assert sorted(linked) == [path.name for path in ADRS]
    assert [int(path.name[:4]) for path in ADRS] == list(range(1, len(ADRS) + 1)), "numbers follow one another"


@pytest.mark.parametrize("path", ADRS, ids=relative)
def test_a_decision_has_all_its_parts(path):
    headings = re.findall(r"^## (.+)$", path.read_text(), re.MULTILINE)
    assert headings == ["Context", "Decision", "What was tried and failed", "Consequences"]


def test_every_requirement_is_pinned_and_within_its_range():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins((ROOT / "constraints.txt").read_text())
    requirements = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    for requirement in map(Requirement, requirements):
        assert pinned.get(normal(requirement.name), "missing") in requirement.specifier, (
            f"{requirement} in constraints.txt"
        )
    assert pinned["torch"] == "2.13.0"


@pytest.mark.parametrize(
    "line", ["torch>=2", "torch @ file:///tmp/torch.whl", "-e .", "--index-url x", "torch==2.13.0+cpu"]
)
def test_a_constraint_is_an_exact_version_from_anywhere(line):
    with pytest.raises(AssertionError, match="name==version"):
        pins(line)


def test_hooks_run_what_make_test_runs():
    makefile = (ROOT / "Makefile").read_text()
    recipes = "".join(re.findall(r"^(?:lint|test-quick):.*\n((?:\t.*\n)+)", makefile, re.MULTILINE))
    commands = [line.strip().replace("$(PYTEST_ARGS)", "").strip() for line in recipes.splitlines()]
    hooks = re.findall(r"^ +entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert sorted(command.replace("$(BIN)", ".venv/bin") for command in commands) == sorted(hooks)


def test_security_names_tests_that_exist() -> None:
    """Each promise that SECURITY.md makes in a table names its tests."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "SECURITY.md").read_text()))
    existing = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^\s*def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert named and not named - existing


@pytest.mark.parametrize(("title", "least"), [("## A verb:", 16), ("## A job", 12)])
def test_a_walk_names_functions_that_exist(title: str, least: int) -> None:
    walk = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition(title)[2].partition("\n## ")[0]
    names = set(re.findall(r"`((?:\w+\.)+\w+)`", walk)) - {"config.toml", "summary.json", "metrics.jsonl"}
    assert len(names) >= least
    for name in names:
        room, *parts = name.split(".")
        while parts and (ROOT / "fleetfit" / room.replace(".", "/") / parts[0]).with_suffix(".py").is_file():
            room = f"{room}.{parts.pop(0)}"
        room_module: object = importlib.import_module(f"fleetfit.{room}")
        for part in parts:
            room_module = getattr(room_module, part)
        assert callable(room_module), name


def test_docstrings_name_exceptions_that_exist() -> None:
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")}
    defined = {node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    unknown = []
    for path, tree in trees.items():
        uses = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and "Raises:\n" in (text := ast.get_docstring(node) or ""):
                names = re.findall(r"^    (\w+):", text.partition("Raises:\n")[2], re.MULTILINE)
                unknown += [f"{path}: {name}" for name in names if name not in defined | uses | set(dir(builtins))]
    assert not unknown


def test_a_table_is_read_without_an_extra() -> None:
    """The packages that the reader of tables imports are core dependencies."""
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    core = {re.split(r"[\[>=<; ]", line)[0] for line in dependencies}
    for module in ("table", "memory"):
        tree = ast.parse((ROOT / f"fleetfit/data/files/{module}.py").read_text(encoding="utf-8"))
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        modules |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        packages = {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"fleetfit"}
        assert packages <= core, module

"""What a name stands for, what is refused, and how a configuration's values meet a function's signature."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import Expected, raises

import fleetfit as ff
from fleetfit import names
from fleetfit.errors import ConfigError, RunError
from fleetfit.hooks import Method, build
from fleetfit.methods.fedrolex import fedrolex
from fleetfit.models.resnet import resnet20

KEYS = {"methods": "method.name", "models": "model.name", "options": "method.options", "engines": "engine.name",
        "data": "data.name"}  # fmt: skip
KINDS = ["methods", "options", "selection", "attacks", "models", "data", "engines"]


def test_a_built_in_name_is_its_path() -> None:
    assert names.resolve("methods", "fedrolex") is fedrolex
    assert names.resolve("models", "cnn").__module__ == "fleetfit.models.cnn"
    assert names.resolve("engines", "local").__module__ == "fleetfit.engines.local"


@pytest.mark.parametrize(
    ("kind", "wrong", "near"),
    [
        ("methods", "scalfl", "scalefl"),
        ("methods", "fedrollex", "fedrolex"),
        ("models", "rsnet110", "resnet110"),
        ("options", "fedprx", "fedprox"),
        ("engines", "process", "processes"),
        ("data", "digit", "digits"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(kind: str, wrong: str, near: str) -> None:
    with raises(ConfigError, wrong, f'"{near}"', key=KEYS[kind]):
        names.resolve(kind, wrong)


def test_a_name_near_nothing_gets_the_list_only() -> None:
    with pytest.raises(ConfigError) as caught:
        names.resolve("methods", "zzzzz")
    assert str(caught.value).count("scalefl") == 1, "in the list, and not as the nearest name"


@pytest.mark.parametrize("kind", KINDS)
def test_malformed_names_are_refused(kind: str) -> None:
    for name in ("", "scale fl", "scale:fl", "../scalefl", "fleetfit.methods.scalefl", "os.system", "__init__",
                 "_private", "1st", "a/b", "scalefl\n", "fedávg"):  # fmt: skip
        with pytest.raises(ConfigError):
            names.resolve(kind, name)


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("data", "ag-news", "ag_news"),
        ("data", "CIFAR-10", "cifar10"),
        ("data", "Fashion-MNIST", "fashion_mnist"),
        ("models", "ResNet-20", "resnet20"),
        ("models", "efficientnet-b0", "efficientnet_b0"),
        ("methods", "ScaleFL", "scalefl"),
        ("methods", "Fed-Avg", "fedavg"),
    ],
)
def test_hyphens_and_capital_letters_make_no_difference(kind: str, name: str, expected: str) -> None:
    assert names.match_name(kind, name) == expected
    assert names.resolve(kind, name) is names.resolve(kind, expected)


def test_no_two_names_differ_in_hyphens_only() -> None:
    for kind in KINDS:
        assert all(names.match_name(kind, name.replace("_", "-").upper()) == name for name in names.list_names(kind))


@pytest.mark.parametrize("name", [3, None, ["scalefl"], 1.5])
def test_a_name_must_be_text(name: Any) -> None:
    with raises(ConfigError, repr(name)):
        names.resolve("methods", name)


def test_helper_modules_are_not_names() -> None:
    for kind, name in (("engines", "memories"), ("models", "blocks"), ("data", "parquet"), ("data", "_cache")):
        assert name not in names.list_names(kind)
        with pytest.raises(ConfigError):
            names.resolve(kind, name)


@pytest.mark.parametrize("kind", KINDS)
def test_every_available_name_resolves(kind: str) -> None:
    """So a helper module in one of these packages must not look like a name."""
    assert names.list_names(kind) == sorted(set(names.list_names(kind)))
    for name in names.list_names(kind):
        factory = names.resolve(kind, name)
        assert callable(factory) and factory.__name__ == name, name


def find_entries(kind: str) -> dict[str, str]:
    """Import the modules of a kind; return the names of their entries: functions of a module's name, and of rows."""
    entries: dict[str, str] = {}
    for room in ("sets", "files") if kind == "data" else ("",):
        folder = names.PACKAGE_FOLDER / kind / room
        for file in (*folder.glob("*.py"), *folder.glob("*/__init__.py")):
            stem = file.parent.name if file.name == "__init__.py" else file.stem
            if stem.startswith("_") or file == folder / "__init__.py":
                continue
            place = ".".join(filter(None, ["fleetfit", kind, room, stem]))
            own = [stem] if re.search(rf"^(?:def|class) {stem}\b", file.read_text(), re.MULTILINE) else []
            module = importlib.import_module(place)
            rows = [name for name, value in vars(module).items() if hasattr(value, "preset") and callable(value)]
            entries |= {name: place for name in (*own, *rows) if vars(module)[name].__module__ == place}
    return entries


@pytest.mark.parametrize("kind", [*KINDS, "peft", "callbacks"])
def test_the_registry_has_every_entry_and_no_other(kind: str) -> None:
    assert find_entries(kind) == names.KINDS[kind].modules


# ---- rows of a table -------------------------------------------------------------------------------------------------


def test_a_row_is_a_function_of_its_module() -> None:
    assert names.resolve("models", "resnet20") is resnet20
    assert names.resolve("models", "fleetfit.models.resnet:resnet20") is resnet20
    assert resnet20(norm="group").blocks == 9


# ---- from outside the package -------------------------------------------------

PLUGIN = '''
from dataclasses import dataclass
from fleetfit.hooks import Method, weigh_equally

@dataclass  # a dataclass looks its module up
class Kept:
    pull: float

def quiet(pull: float = 0.1) -> Method:
    """Make the method."""
    return Method(weigh=weigh_equally)

def wrong() -> int:
    return 3

constant = 7
_private = 8
'''


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    path = tmp_path / "my_method.py"
    path.write_text(PLUGIN)
    return path


def test_a_function_of_a_file(plugin: Path) -> None:
    factory = names.resolve("methods", f"{plugin}:quiet")
    assert isinstance(factory(), Method)
    assert names.resolve("methods", f"{plugin}:quiet") is factory
    assert names.resolve("methods", f"{plugin.parent}/../{plugin.parent.name}/my_method.py:quiet") is factory
    assert build({"name": f"{plugin}:quiet", "pull": 0.5}).weigh is not Method().weigh


def test_two_files_of_one_name_are_two_modules(plugin: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "my_method.py"
    other.parent.mkdir()
    other.write_text("def quiet():\n    return 'other'\n")
    assert names.resolve("methods", f"{other}:quiet")() == "other"
    assert isinstance(names.resolve("methods", f"{plugin}:quiet")(), Method)


def test_a_file_is_relative_to_the_working_folder(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(plugin.parent)
    assert isinstance(names.resolve("methods", "my_method.py:quiet")(), Method)
    assert isinstance(names.resolve("methods", "./my_method.py:quiet")(), Method)


def test_a_function_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "outside_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(names.resolve("methods", "outside_package.inner:quiet")(), Method)


@pytest.mark.parametrize(
    ("attribute", "mention"),
    [("quite", 'Did you mean "quiet"'), ("constant", "int"), ("", '""'), ("_privat", '"_privat"')],
)
def test_a_file_lacks_the_function(plugin: Path, attribute: str, mention: str) -> None:
    with raises(ConfigError, plugin, mention, key="method.name"):
        names.resolve("methods", f"{plugin}:{attribute}")


@pytest.mark.parametrize(
    ("name", "path", "cause"),
    [
        ("no_such_package_at_all.inner:f", None, ModuleNotFoundError),
        ("there_is_no.py:f", "there_is_no.py", None),
        (":f", None, None),
        ("a b:f", None, None),
        ("..x:f", None, None),
        ("a-b.c:f", None, None),
        ("os:no_such_thing", None, None),
    ],
)
def test_a_module_is_missing(name: str, path: str | None, cause: type[Exception] | None) -> None:
    with raises(ConfigError, f'"{name}"', path=path) as caught:
        names.resolve("methods", name)
    assert type(caught.value.__cause__) is (cause or type(None))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_thing_anywhere", "ModuleNotFoundError"),
        ("def f(:\n", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise RuntimeError('on purpose')", "on purpose"),
        ("f = undefined_name", "NameError"),
    ],
)
def test_import_errors_of_plug_ins_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "failing.py"
    path.write_text(text)
    for _ in range(2):  # the second time too: a half-made module must not stay
        with raises(ConfigError, path, message, key="method.name"):
            names.resolve("methods", f"{path}:f")
    assert not [key for key in sys.modules if "failing" in key and "fleetfit_file" in key]


def test_a_mended_plug_in_is_imported_again(tmp_path: Path) -> None:
    path = tmp_path / "mended.py"
    path.write_text("1 / 0")
    with pytest.raises(ConfigError):
        names.resolve("methods", f"{path}:f")
    path.write_text("def f():\n    return 5\n")
    assert names.resolve("methods", f"{path}:f")() == 5


def test_errors_and_interrupts_of_plug_ins_pass(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from fleetfit.errors import RunError\nraise RunError('own words')")
    with raises(RunError, "own words"):
        names.resolve("methods", f"{path}:f")
    path.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        names.resolve("methods", f"{path}:f")


def test_anchored_names_are_seen_from_the_run_file(tmp_path: Path) -> None:
    assert names.make_absolute("mine.py:f", tmp_path) == f"{tmp_path / 'mine.py'}:f"
    assert names.make_absolute("../mine.py:f", tmp_path / "runs") == f"{tmp_path / 'mine.py'}:f"
    absolute = str(tmp_path / "there.py:f")
    assert names.make_absolute(absolute, tmp_path / "runs") == absolute
    for name in ("scalefl", "package.module:f"):
        assert names.make_absolute(name, tmp_path) == name


def test_a_file_of_code_has_the_same_name_everywhere() -> None:
    """In JSON, too; of a hostile server's text the time grows with its length only."""
    everywhere = ("net.py:Net", "own.module:f", "a/b")
    assert [names.drop_folders(name) for name in ("/srv/my nets/net.py:Net", "own.module:f", "a/b")] == [*everywhere]
    assert names.drop_folders(r"C:\nets\net.py:Net") == "net.py:Net"
    text = json.dumps({"name": "/srv/net.py:Net", "sizes": [*range(100_000)], "folder": "/srv/data"})
    assert names.drop_folders(text) == text.replace("/srv/net.py", "net.py")


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_has_a_summary_of_one_line(kind: str) -> None:
    for name in names.list_names(kind):
        line = names.describe_entry(kind, name)
        assert line and line[0].isupper() and len(line) < 140 and "\n" not in line, name


def test_files_import_their_neighbors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    (tmp_path / "neighbor_of_own.py").write_text("NUMBER = 3\n")
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('shadows the library')\n")
    source = "import colorsys\nfrom neighbor_of_own import NUMBER\n\n\ndef number():\n    return NUMBER\n"
    (tmp_path / "own.py").write_text(source)
    assert names.resolve("methods", f"{tmp_path / 'own.py'}:number")() == 3
    del sys.modules["neighbor_of_own"]


# ---- files that start runs -----------------------------------------------------------------------------------------

STARTS_A_RUN = """
import sys
from torch import nn
import fleetfit as ff

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))

    def forward(self, x):
        return self.body(x)

def start():
    return {start}

{guard}
"""
RUN = {"rounds": 1, "data": {"name": "digits"}, "local": {"epochs": 1, "max_steps": 1}, "evaluate": {"clients": 1}}


@pytest.mark.parametrize("start", ["ff.run({table})", "ff.compare({table})", "ff.resume('nowhere')"])
def test_runs_inside_an_import_are_refused(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its workers import it, too, and each would start a run with workers."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "net.py"
    file.write_text(STARTS_A_RUN.format(start=start.format(table=RUN), guard="start()"))
    with raises(ConfigError, Expected("net.py", "__main__"), path=str(file)):
        ff.run(RUN, model={"name": f"{file}:Net"}, out=tmp_path / "run", engine={"name": "processes", "workers": 2})
    assert not (tmp_path / "run").exists() and not Path("runs").exists()


@pytest.mark.parametrize("guarded", [True, False])
def test_guarded_scripts_run_on_workers(guarded: bool, tmp_path: Path) -> None:
    engine = {"name": "processes", "workers": 2}
    start = f"ff.run({RUN}, model={{'name': __file__ + ':Net'}}, engine={engine}, out='run')"
    guard = 'if __name__ == "__main__":\n    start()' if guarded else "start()"
    (tmp_path / "script.py").write_text(STARTS_A_RUN.format(start=start, guard=guard))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == guarded == (tmp_path / "run").exists(), done.stderr
    assert guarded or '__name__ == "__main__"' in done.stderr


def test_an_option_in_the_place_of_a_method_is_named() -> None:
    with raises(ConfigError, "method.options.fedprox", key="method.name"):
        names.resolve("methods", "fedprox")


# ---- edited files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["models", "callbacks", "hooks", "metrics"])
def test_an_edited_file_is_read_again(kind: str, tmp_path: Path) -> None:
    """Also within the second and with the size of the version before, for which Python keeps bytecode."""
    file = tmp_path / "mine.py"
    for value in (1, 2, 3):
        file.write_text(f"def make():\n    return {value}\n")
        first = names.resolve(kind, f"{file}:make")
        assert first() == value and names.resolve(kind, f"{file}:make") is first, "while it stays, it is the same"


@pytest.mark.parametrize(
    ("edited", "imported"),
    [
        ("size_beside.py", "size_beside"),
        ("parts_direct/sizes.py", "parts_direct.sizes"),
        ("parts_within/inner.py", "parts_within"),
    ],
)
def test_an_edited_file_beside_a_plug_in_is_read_again(edited: str, imported: str, tmp_path: Path) -> None:
    """Two plug-ins that import it have one version of it after the edit, too."""
    target = tmp_path / edited
    target.parent.mkdir(exist_ok=True)
    if imported == "parts_within":
        (target.parent / "__init__.py").write_text("from .inner import size\n")
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(f"from {imported} import size\ndef make():\n    return size\n")
    for value in (1, 2):
        target.write_text(f"class size:\n    value = {value}\n")
        one, two = (names.resolve("models", f"{tmp_path}/{name}.py:make")() for name in ("one", "two"))
        assert one.value == value and one is two


def test_edited_modules_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("edited_by_name", "edited_by_user"):
        (tmp_path / f"{module}.py").write_text("def make():\n    return 1\n")
    theirs = importlib.import_module("edited_by_user").make
    assert names.resolve("models", "edited_by_name:make")() == 1
    for module in ("edited_by_name", "edited_by_user"):
        (tmp_path / f"{module}.py").write_text("def make():\n    return 2\n")
    assert names.resolve("models", "edited_by_name:make")() == 2
    assert names.resolve("models", "edited_by_user:make") is theirs

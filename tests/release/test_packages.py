"""The packages in dist/: what is in them, and that a stranger can install, run, build and test from them.

`make test-package` builds them and runs this file. The environment that they are installed into starts empty; pip gets
PyTorch and the rest, in the versions of constraints.txt, from where it gets them for `make env`.
"""

import csv
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FLEETFIT"))}


def built(pattern: str) -> Path:
    files = list(DIST.glob(pattern))
    assert len(files) == 1, f"make package leaves one {pattern} in dist/, and there are {len(files)}"
    return files[0]


def called(*command: str | Path, at: Path, seconds: int = 900) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=at, env=CLEAN, capture_output=True, text=True, timeout=seconds, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def pip(python: Path, *words: str | Path, at: Path) -> None:
    called(python, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *words, at=at)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    place = tmp_path_factory.mktemp("sources")
    with tarfile.open(built("*.tar.gz")) as archive:
        archive.extractall(place, filter="data")
    (folder,) = place.iterdir()
    return folder


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has PyTorch and nothing else."""
    place = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", str(place / "venv")], check=True, env=CLEAN)
    python = place / "venv" / "bin" / "python"
    assert called(python, "-c", "import sys; print(*sys.path)", at=place).count("site-packages") == 1
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pip(python, next(line for line in pins if line.startswith("torch==")), at=place)  # alone, as `make env` does
    return python


def test_the_wheel_is_the_package() -> None:
    with zipfile.ZipFile(built("*.whl")) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    own = {name for name in names if name.startswith("fleetfit/")}
    tracked = called("git", "ls-files", "fleetfit", at=ROOT).split()
    assert own == set(tracked)
    assert {"fleetfit/py.typed", "fleetfit/cli/demo.toml", "fleetfit/cli/catalogue.json"} <= own
    others = {name.split("/", 1)[1] for name in names - own}
    assert others == {"METADATA", "WHEEL", "entry_points.txt", "RECORD", "licenses/LICENSE"}
    assert "License-Expression: Apache-2.0" in metadata and "Requires-Python: <3.15,>=3.11" in metadata
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {line.removeprefix("Provides-Extra: ") for line in metadata.splitlines() if "Provides-Extra" in line} == {
        *extras
    }


def test_the_sdist_has_what_git_has(sources: Path) -> None:
    there = {path.relative_to(sources).as_posix() for path in sources.rglob("*") if path.is_file()}
    tracked = {name for name in called("git", "ls-files", at=ROOT).splitlines() if not name.startswith(".ci/")}
    assert there - {"PKG-INFO"} == tracked


def columns(folder: Path) -> list[list[str]]:
    """Return the table of a comparison without times."""
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert rows
    return [[value for key, value in row.items() if "time" not in key and "seconds" not in key] for row in rows]


def test_wheel_and_sdist_install_and_run_the_demo(empty: Path, tmp_path: Path) -> None:
    fleetfit = empty.with_name("fleetfit")
    pip(empty, "-c", ROOT / "constraints.txt", built("*.whl"), at=tmp_path)
    called(empty, "-m", "pip", "check", at=tmp_path)
    there = called(empty, "-c", "import fleetfit; print(fleetfit.__file__)", at=tmp_path)
    assert str(empty.parents[1]) in there
    printed = called(fleetfit, "demo", "--set", "rounds=3", "--out", "demo", at=tmp_path)
    for row in ("FleetFit", "ScaleFL", "HeteroFL", "smallest model", "local accuracy"):
        assert row in printed
    called(fleetfit, "demo", "--write", "mine.toml", at=tmp_path)
    called(fleetfit, "plan", "mine.toml", at=tmp_path)
    called(empty, "-m", "pip", "uninstall", "-q", "-y", "fleetfit", at=tmp_path)
    pip(empty, "--no-deps", built("*.tar.gz"), at=tmp_path)
    called(fleetfit, "demo", "--set", "rounds=3", "--out", "again", "--quiet", at=tmp_path)
    assert columns(tmp_path / "demo") == columns(tmp_path / "again")


def test_tests_of_the_sdist_run_in_its_own_folder(sources: Path) -> None:
    """A few of them, on the package that is beside them; all find what they read."""
    files = ["tests/test_repository.py", "tests/test_surface.py", "tests/test_aggregate.py"]
    printed = called(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, at=sources)
    assert " passed" in printed and "failed" not in printed


def test_an_empty_environment_type_checks(empty: Path, tmp_path: Path) -> None:
    """py.typed is found where the wheel was installed: types of the package are seen by a user's mypy."""
    (tmp_path / "use.py").write_text("import fleetfit\n\nreveal_type(fleetfit.__version__)\n")
    printed = called(sys.executable, "-m", "mypy", "--python-executable", empty, "use.py", at=tmp_path)
    assert 'Revealed type is "builtins.str"' in printed or 'Revealed type is "str"' in printed

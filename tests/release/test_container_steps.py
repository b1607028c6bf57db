"""The steps of containers/Containerfile that install, run in an empty environment of this machine.

`make test-package` runs it, since it asks PyPI. PyTorch comes from PyPI here, by the build argument that is there for
that; useradd and mkdir are left to a container.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.network

ROOT = Path(__file__).parents[2]
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "FLEETFIT", "VIRTUAL"))}


def stages() -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of the Containerfile by stage."""
    lines = [x for x in (ROOT / "containers" / "Containerfile").read_text().splitlines() if x[:1] not in ("", "#")]
    lines_by_stage: dict[str, list[tuple[str, str]]] = {}
    for line in re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            steps = lines_by_stage.setdefault(rest.partition(" AS ")[2], [])
        else:
            steps.append((word, rest))
    return lines_by_stage


def test_the_build_installs_a_fleetfit_that_starts(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    variables = {**CLEAN, "TORCH_INDEX": "https://pypi.org/simple"}
    built = stages()
    for word, rest in built["build"]:
        if word == "ARG":
            name, _, value = rest.partition("=")
            variables.setdefault(name, value)
        elif word == "ENV":
            for pair in rest.split():
                if not pair.startswith("PIP_NO_CACHE_DIR"):  # what was fetched for `make env` serves here, too
                    variables.update([pair.split("=")])
        elif word == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
                copy(ROOT / source, tmp_path / "src" / (target if (ROOT / source).is_dir() else ""))
        elif word == "RUN":
            step = rest.replace("/opt/fleetfit", str(tmp_path / "opt"))
            done = subprocess.run(["/bin/sh", "-c", step], cwd=tmp_path / "src", env=variables, capture_output=True,
                                  text=True, check=False)  # fmt: skip
            assert done.returncode == 0, f"{rest}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        else:
            assert word == "WORKDIR", f"{word} is not tried"
    there = tmp_path / "opt" / "bin"
    assert built["base"][1] == ("COPY", "--from=build /opt/fleetfit /opt/fleetfit"), "the environment is taken whole"
    for command in (started(built["node"]), started(built["server"])):
        programs = re.findall(r"fleetfit|flower-superlink", command)
        assert programs and all((there / name).exists() for name in programs), command
    for words in (["fleetfit", "flower", "node", "--help"], ["flower-superlink", "--help"], ["flwr", "--version"]):
        subprocess.run([there / words[0], *words[1:]], check=True, env=CLEAN, cwd=tmp_path, capture_output=True)


def started(steps: list[tuple[str, str]]) -> str:
    return " ".join(json.loads([rest for word, rest in steps if word == "CMD"][-1]))

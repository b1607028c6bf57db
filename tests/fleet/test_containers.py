"""containers/: the compose file's commands as processes of this machine, and the Containerfile held to its rules.

No container engine is asked: each service's command runs as it stands, with the paths of its volumes, the SuperLink's
name and its port put in place of the containers' own, in the order that `depends_on` says.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployment import free_port

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "containers"
BIN = Path(sys.executable).parent


# ---- the compose file ----------------------------------------------------------------------------------------------


class Services:
    """The services of a compose file as processes.

    A service's volumes are folders of this machine, and its own folder stands for the rest of its container.
    """

    def __init__(self, compose: dict[str, Any], folder: Path) -> None:
        self.services: dict[str, Any] = compose["services"]
        self.folder, self.port = folder, free_port()
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def translated(self, name: str, text: str) -> str:
        """Return a text of a container as it has to be here."""
        own = self.folder / "containers" / name
        own.mkdir(parents=True, exist_ok=True)
        for volume in self.services[name]["volumes"]:
            source, target = volume.split(":")[:2]
            place = self.folder / "volumes" / source
            if source.startswith("."):  # a folder of the repository, read only: its scripts are translated, too
                place = own / Path(target).name
                if not place.exists():
                    place.mkdir()
                    for file in (CONTAINERS / source).iterdir():
                        (place / file.name).write_text(self.translated(name, file.read_text()))
            else:
                place.mkdir(parents=True, exist_ok=True)
                if not (own / Path(target).name).exists():
                    (own / Path(target).name).symlink_to(place)
        for old, new in (("/srv/fleet", str(own)), ("superlink:8000", f"localhost:{self.port}"),
                         ("localhost:8000", f"localhost:{self.port}"), ("--port=8000", f"--port={self.port}"),
                         ("0.0.0.0", "127.0.0.1")):  # noqa: S104 # fmt: skip
            text = text.replace(old, new)
        return text

    def start(self, name: str) -> None:
        """Start a service once what it depends on is as far as it has to be."""
        service = self.services[name]
        for other, needed in service.get("depends_on", {}).items():
            if other not in self.started:
                self.start(other)
            {"service_completed_successfully": self.completed, "service_healthy": self.healthy,
             "service_started": lambda _: None}[needed["condition"]](other)  # fmt: skip
        command = [self.translated(name, word) for word in service["command"]]
        own = self.folder / "containers" / name
        environment = {key: self.translated(name, value) for key, value in service.get("environment", {}).items()}
        with (self.folder / f"{name}.log").open("wb") as log:
            self.started[name] = subprocess.Popen(
                command, cwd=self.translated(name, service.get("working_dir", "/srv/fleet")), stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True, env=self.environment(own) | environment,
            )  # fmt: skip

    def environment(self, own: Path) -> dict[str, str]:
        """Return what the image sets, here."""
        return {**os.environ, "PATH": f"{BIN}:/usr/local/bin:/usr/bin:/bin", "FLWR_HOME": str(own / "home"),
                "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "PYTHONUNBUFFERED": "1",
                "HOME": str(own)}  # fmt: skip

    def completed(self, name: str) -> None:
        assert self.started[name].wait(300) == 0, self.log(name)

    def healthy(self, name: str) -> None:
        test = [self.translated(name, word) for word in self.services[name]["healthcheck"]["test"]]
        assert test.pop(0) == "CMD"
        for _ in range(200):
            if (
                subprocess.run(test, env=self.environment(self.folder), capture_output=True, check=False).returncode
                == 0
            ):
                return
            assert self.started[name].poll() is None, self.log(name)
            time.sleep(0.5)
        raise AssertionError(self.log(name))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def end(self) -> None:
        for process in reversed(self.started.values()):
            process.terminate()
        for process in self.started.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def up(folder: Path) -> Iterator[Services]:
    services = Services(yaml.safe_load((CONTAINERS / "compose.yaml").read_text()), folder)
    try:
        yield services
    finally:
        services.end()


@pytest.mark.fleet
def test_the_compose_file_starts_a_fleet_that_trains(tmp_path: Path) -> None:
    with up(tmp_path) as fleet:
        fleet.start("run")
        for name in fleet.services:
            assert name in fleet.started, f"the run does not wait for {name}"
        fleet.completed("run")
        summaries = list((tmp_path / "volumes" / "runs").glob("*/summary.json"))
        assert len(summaries) == 1, fleet.log("run") + fleet.log("apps")
        enrolled = json.loads((summaries[0].parent / "nodes.json").read_text())
        for name in ("phone", "pi", "jetson"):
            assert name in json.dumps(enrolled)
            assert fleet.started[name].poll() is None, fleet.log(name)
        keys = {place.read_bytes() for place in (tmp_path / "volumes").glob("*/key")}
        assert len(keys) == 3, "each device has a key of its own"
        others = [place for volume in ("public", "server", "state", "runs") for place in
                  (tmp_path / "volumes" / volume).rglob("*") if place.is_file()]  # fmt: skip
        assert not [place for place in others if place.read_bytes() in keys], "a private key left its device"
        assert not list((tmp_path / "volumes" / "server").glob("ca.key")), "the authority's key is not on the server"
        for again in ("authority", "register"):  # `up` a second time starts them again
            fleet.start(again)
            fleet.completed(again)


# ---- the Containerfile ---------------------------------------------------------------------------------------------


def instructions(text: str) -> list[tuple[str, str]]:
    """Return the instructions of a Containerfile and what they say, continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


def complaints(text: str) -> list[str]:
    """Return what is wrong with a Containerfile by the rules that can be held without a container engine."""
    steps = instructions(text)
    allowed = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}
    problems = [f"{word} is not expected" for word, _ in steps if word not in allowed]
    if not any(word == "HEALTHCHECK" for word, _ in steps):
        problems.append("there is no health check")
    if "HEALTHCHECK NONE" in text and sum(word == "HEALTHCHECK" for word, _ in steps) < 2:
        problems.append("only the node does without")
    for word, rest in steps:
        if word == "COPY" and "--from=" not in rest:
            sources = rest.split()[:-1]
            problems += [f"COPY {s}" for s in sources if s in (".", "*") or not (ROOT / s).exists()]
        if word == "RUN" and "pip install" in rest and "==" not in rest and "--constraint" not in rest:
            problems.append(f"unpinned: {rest}")
        if word in ("RUN", "ENV", "ARG") and re.search(r"(?i)password|secret\b|token|api_key", rest):
            problems.append(f"a secret? {rest}")
        if word in ("CMD", "HEALTHCHECK") and (start := rest.find("[")) >= 0:
            json.loads(rest[start:])
    return problems + [f"{stage}: {what}" for stage, what in stages_that_fail(steps)]


def stages_that_fail(steps: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the stages that are no slim Python in a fixed version, and those that are started and run as root."""
    users: dict[str, str] = {}
    stage = ""
    for word, rest in steps:
        if word == "FROM":
            image, _, stage = rest.partition(" AS ")
            if image not in users and not re.fullmatch(r"docker\.io/library/python:3\.1[123]-slim-\w+", image):
                yield stage, f"from {image}"
            users[stage] = users.get(image, "")
        if word == "USER":
            users[stage] = rest
        if word == "CMD" and not re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[stage]):
            yield stage, "runs as root"


def test_the_containerfile_keeps_the_rules() -> None:
    assert not complaints((CONTAINERS / "Containerfile").read_text())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("USER 10001:10001", "USER 0:0"),
        ("python:3.12-slim-bookworm AS base", "python:latest AS base"),
        ("COPY fleetfit fleetfit", "COPY . ."),
        ("--constraint constraints.txt", ""),
        ("PIP_NO_INPUT=1", "PIP_NO_INPUT=1 INDEX_PASSWORD=x"),
        ("HEALTHCHECK", "#"),
    ],
)
def test_a_containerfile_that_breaks_a_rule_is_seen(old: str, new: str) -> None:
    text = (CONTAINERS / "Containerfile").read_text()
    assert old in text
    assert complaints(text.replace(old, new))


def test_copied_files_are_not_ignored() -> None:
    lines = (ROOT / ".dockerignore").read_text().split("\n")
    admitted = {line[1:] for line in lines if line.startswith("!")}
    copied = {source for word, rest in instructions((CONTAINERS / "Containerfile").read_text())
              if word == "COPY" and "--from=" not in rest for source in rest.split()[:-1]}  # fmt: skip
    assert "*" in lines and admitted == copied


def test_server_and_compose_start_the_same_superlink() -> None:
    """The image's command is the compose file's, seen from the image's folder."""
    steps = instructions((CONTAINERS / "Containerfile").read_text())
    of_image = json.loads([rest for word, rest in steps if word == "CMD"][-1])
    of_compose = yaml.safe_load((CONTAINERS / "compose.yaml").read_text())["services"]["superlink"]["command"]
    split = [part for word in of_compose for part in word.replace("/srv/fleet/", "").split("=")]
    assert of_image == split


@pytest.mark.parametrize("script", sorted((CONTAINERS / "fleet").glob("*.sh")), ids=lambda path: path.name)
def test_a_script_is_understood_by_a_plain_shell(script: Path) -> None:
    subprocess.run(["/bin/sh", "-n", str(script)], check=True)


def test_every_run_step_is_understood_by_a_plain_shell() -> None:
    steps = [rest for word, rest in instructions((CONTAINERS / "Containerfile").read_text()) if word == "RUN"]
    assert len(steps) >= 4
    for step in steps:
        subprocess.run(["/bin/sh", "-n", "-c", step], check=True)
        assert shlex.split(step)

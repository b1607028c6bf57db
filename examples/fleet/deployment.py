"""A whole fleet on this machine: a SuperLink with TLS and registered keys, and nodes, each a process of its own.

What `make fleet-demo` and the tests start and stop. On real devices the same commands run on different machines; see
docs/fleet.md.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fleetfit.fleet.app_folder import write_app
from fleetfit.fleet.certificates import make_certificates, make_node_key
from fleetfit.fleet.failover import VARIABLE

BIN = Path(sys.executable).parent
# How often Flower's executors ask for work: each question costs a core some milliseconds, on both sides.
POLL = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.3"}

# Most of the time of a command is that of its imports.
REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[1:]:
    app(["supernode", "register", key, "lab"], standalone_mode=False)
"""


class Deployment:
    """A SuperLink and its nodes; use it with `with`, so that everything ends."""

    def __init__(
        self, folder: Path, nodes: Mapping[str, Mapping[str, Any]], own_process: bool = False, kept: bool = True,
        superlinks: Sequence[str] = ("superlink",),
    ) -> None:  # fmt: skip
        """Make keys, certificates and configurations.

        Args:
            folder: Where everything is written.
            nodes: By name, what a node's configuration says besides its name.
            own_process: Run the server app in a process that outlives the SuperLink.
            kept: Keep the SuperLink's state in a file, with which it can be started again: most of its time goes there.
            superlinks: Names of SuperLinks over this file; `flwr` speaks with the first one.
        """
        self.folder, self.own_process, self.kept = folder.resolve(), own_process, kept
        self.ports = {name: free_port() for name in superlinks}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        make_certificates(self.folder / "certificates", ["127.0.0.1", "localhost"])
        for name, settings in nodes.items():
            self.add_node(name, settings)
        home = self.folder / "home"
        home.mkdir()
        (home / "config.toml").write_text(tomli_w.dumps({"superlink": {
            "default": "lab", "lab": {"address": f"127.0.0.1:{self.port}", "root-certificates": str(self.ca)},
        }}))  # fmt: skip

    def add_node(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write a node's configuration and key; it is registered when it is started."""
        place = self.folder / name
        place.mkdir()
        (place / "node.toml").write_text(tomli_w.dumps({"name": name, **settings}))
        make_node_key(place / "key")

    @property
    def port(self) -> int:
        """Port of the first SuperLink."""
        return next(iter(self.ports.values()))

    @property
    def ca(self) -> Path:
        """The authority's certificate, which nodes and users need."""
        return self.folder / "certificates" / "ca.crt"

    def __enter__(self) -> "Deployment":
        """Start the SuperLinks, one after the other: the first one makes the database."""
        for name in self.ports:
            self.start_superlink(name)
        return self

    def __exit__(self, *error: object) -> None:
        """End everything."""
        for name in reversed(list(self.processes)):
            self.stop(name)

    # -- the server's side

    def start_superlink(self, name: str = "superlink") -> None:
        """Start a SuperLink, and wait until it answers."""
        certificates = self.folder / "certificates"
        tls = ["--ssl-ca-certfile", str(self.ca), "--ssl-certfile", str(certificates / "server.pem"),
               "--ssl-keyfile", str(certificates / "server.key")]  # fmt: skip
        apart = ["--isolation", "process"] if self.own_process else []
        database = ["--database", str(self.folder / "state.db")] if self.kept else []
        port = self.ports[name]
        self.start(name, [
            "flower-superlink", *tls, "--enable-supernode-auth", "--host", "127.0.0.1", "--port", str(port), *database,
            "--disable-runtime-dependency-installation", *apart,
        ], POLL)  # fmt: skip
        self._until_it_answers(name)
        if self.own_process and "superexec" not in self.processes:
            others = {VARIABLE: ",".join(self._addresses())}
            self.start("superexec", ["flower-superexec", "--runtime-api-address", f"127.0.0.1:{port}",
                                      "--root-certificates", str(self.ca)], POLL | others)  # fmt: skip

    def _addresses(self) -> list[str]:
        return [f"127.0.0.1:{port}" for port in self.ports.values()]

    def _until_it_answers(self, name: str) -> None:
        trusted = ssl.create_default_context(cafile=str(self.ca))
        for _ in range(2400):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(
                    f"https://127.0.0.1:{self.ports[name]}/health", context=trusted, timeout=2
                ).close()
                return
            if self.processes[name].poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"the SuperLink does not answer:\n{self.log(name)[-3000:]}")

    def register(self, *names: str) -> None:
        """Have the SuperLink admit nodes' keys, by `flwr supernode register`, all in one process."""
        keys = [str(self.folder / name / "key.pub") for name in names]
        self._printed([sys.executable, "-c", REGISTER, *keys])

    def flwr(self, *arguments: str) -> str:
        """Run a command of Flower's command line, and return what it printed.

        Raises:
            RuntimeError: It failed.
        """
        return self._printed([str(BIN / "flwr"), *arguments])

    def _printed(self, command: Sequence[str]) -> str:
        done = subprocess.run(
            command, env=self._environment(), cwd=self.folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def start_run(self, name: str, run: Mapping[str, Any], **config: str) -> subprocess.Popen[bytes]:
        """Write an app and start a run of it; its lines are in the log of `name`.

        Args:
            name: Of the app's folder and of the log.
            run: The run file.
            **config: Keys of the run config, such as `out`.
        """
        place = self.folder / name
        (self.folder / f"{name}.toml").write_text(tomli_w.dumps(run))
        write_app(place, self.folder / f"{name}.toml", config)
        return self.start(f"run-{name}", ["flwr", "run", str(place), "lab", "--stream"])

    def runs(self) -> list[dict[str, Any]]:
        """Return what Flower says of its runs, the newest first."""
        found: list[dict[str, Any]] = json.loads(self.flwr("list", "--format", "json"))["runs"]
        return found

    # -- nodes

    def start_node(
        self, name: str, plain: bool = False, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a node.

        Args:
            name: Its name.
            plain: By Flower's own command instead of `fleetfit flower node`.
            environment: Further variables.
        """
        place = self.folder / name
        if plain:
            command = [
                "flower-supernode", "--superlink", f"127.0.0.1:{self.port}", "--root-certificates", str(self.ca),
                "--auth-supernode-private-key", str(place / "key"), "--host", "127.0.0.1", "--port", str(free_port()),
                "--node-config", f'config="{place / "node.toml"}"',
            ]  # fmt: skip
        else:
            addresses = [part for address in self._addresses() for part in ("--superlink", address)]
            command = ["fleetfit", "flower", "node", str(place / "node.toml"), *addresses, "--ca", str(self.ca),
                       "--key", str(place / "key")]  # fmt: skip
        return self.start(name, command, {**(POLL if plain else {}), **(environment or {})})

    # -- processes

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a program of this environment; what it prints is in `name`.log."""
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [str(BIN / command[0]), *command[1:]], env={**self._environment(name), **(environment or {})},
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def _environment(self, name: str = "") -> dict[str, str]:
        home = self.folder / name / "home" if (self.folder / name / "node.toml").exists() else self.folder / "home"
        return {
            **os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip

    def stop(self, name: str, sudden: bool = False) -> None:
        """End a process and those that it started; `sudden`: by SIGKILL, as a loss of power would."""
        process = self.processes.pop(name, None)
        if process is None:
            return
        if not sudden and process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port

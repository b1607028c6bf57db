"""A SuperLink with TLS and node authentication on this machine, and a toy Flower app whose server measures."""

import contextlib
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import waiting
from deployment import REGISTER, free_port
from own_terms import add_terms

import fleetfit
from fleetfit.fleet.certificates import make_certificates, make_node_key

BIN = Path(sys.executable).parent
PACKAGE = Path(fleetfit.__file__).parents[1]

PYPROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "toy"
version = "{version}"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41"]

[tool.flwr.app]
publisher = "nobody"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "toy_server:app"
clientapp = "toy_client:app"

[tool.flwr.app.config]
out = ""
node = ""
kind = "hello"
"""

SERVER = """
import json
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

from fleetfit.fleet import transport
from fleetfit.fleet.protocol import pack_message

HELLO = json.loads('HELLO_HERE')
app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    node = int(config["node"])
    if config["kind"] == "hello":
        message = transport.make_request(node, "query", {"header": pack_message(HELLO)}, 1800.0, 0)
    else:
        message = Message(RecordDict({"job": ConfigRecord({"number": 1})}), node, "query")
    [name] = grid.push_messages([message])
    while not (replies := list(grid.pull_messages([name]))):
        time.sleep(0.1)
    [reply] = replies
    error = {"code": reply.error.code, "reason": reply.error.reason} if reply.has_error() else {}
    part = Path(config["out"] + ".part")
    part.write_text(json.dumps(error))
    part.rename(config["out"])
"""

CLIENT = """
from flwr.clientapp import ClientApp

app = ClientApp()
"""

DATA = """
import os
import time
from pathlib import Path

from fleetfit.data.sets.digits import digits


def load():
    if place := os.environ.get("SLEEPS"):
        Path(place).write_text(str(os.getpid()))
        time.sleep(600)
    return digits()
"""

NODE = """
import json
import sys
from pathlib import Path

from fleetfit.fleet import connection, launcher, logs
from fleetfit.errors import FleetFitError

logs.log_to_stderr()
given = json.loads(sys.argv[1])
launcher._RETRY_S = given.pop("retry_s", launcher._RETRY_S)
config = Path(given.pop("config"))
paths = {name: Path(given.pop(name)) for name in ("root_certificates", "key") if given.get(name)}
try:
    sys.exit(launcher.run_node(config, connection.Connection(**paths, **given)))
except FleetFitError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def wait_for(what, seconds: float, message: str):
    """Return the first true value of a function."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if value := what():
            return value
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {message}")


class Lab:
    """The SuperLink, and a folder for all that is needed to reach it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(PACKAGE),
            "FLEETFIT_LAB": str(folder),
        }
        (folder / "home").mkdir()
        (folder / "node.py").write_text(NODE)
        (folder / "data.py").write_text(DATA)
        for name in ("server", "stranger"):
            make_certificates(folder / name, ["127.0.0.1"])
        self._started: list[subprocess.Popen] = []
        self._keys: list[Path] = []
        self._numbers = itertools.count()
        self.port = free_port()
        self._superlink()

    def _superlink(self) -> None:
        home = f'[superlink]\ndefault = "lab"\n[superlink.lab]\naddress = "127.0.0.1:{self.port}"\n'
        (self.folder / "home" / "config.toml").write_text(home + f'root-certificates = "{self.folder}/server/ca.crt"\n')
        flags = ["--ssl-ca-certfile", "server/ca.crt", "--ssl-certfile", "server/server.pem"]
        flags += ["--ssl-keyfile", "server/server.key"]
        flags += ["--enable-supernode-auth", "--host", "127.0.0.1", "--port", str(self.port)]
        command = ["flower-superlink", *flags, "--disable-runtime-dependency-installation"]
        self._start("superlink", command, FLWR_SUPEREXEC_TASK_POLL_INTERVAL="0.3")
        wait_for(self._answers, 300, "the SuperLink listens")

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def _start(self, name: str, command: list[str], **more: str) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.environment, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=waiting.listening_to_ctrl_c,
            )
        self._started.append(process)
        return process

    def _done(self, command: list[str]) -> None:
        where = {"cwd": self.folder, "env": self.environment}
        done = subprocess.run(command, **where, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def key(self) -> Path:
        """Return the key of another node, which is registered."""
        if not self._keys:  # several at once: most of the time of a command is that of its imports
            self._keys = [self.new_key() for _ in range(6)]
            command = [sys.executable, "-c", REGISTER, *(str(key.with_suffix(".pub")) for key in self._keys)]
            self._done(command)
        return self._keys.pop()

    def new_key(self) -> Path:
        """Make a node's key."""
        path = self.folder / f"key-{next(self._numbers)}"
        make_node_key(path)
        return path

    def node(
        self, name: str, key: Path | None, environment: dict[str, str] | None = None, **options
    ) -> subprocess.Popen:
        """Start a node; its output goes to `NAME.log`."""
        config = self.folder / f"{name} node.toml"
        config.write_text(f'name = "{name.replace(" ", "-")}"\nbudget = 1.0\n[data]\nname = "data.py:load"\n')
        settings = {"superlink": f"127.0.0.1:{self.port}", "root_certificates": str(self.folder / "server" / "ca.crt")}
        settings |= {"config": str(config)} | ({"key": str(key)} if key else {}) | options
        return self._start(name, [sys.executable, "node.py", json.dumps(settings)], **(environment or {}))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def accepted(self, name: str, seconds: float = 300) -> None:
        wait_for(lambda: "SuperNode ID:" in self.log(name), seconds, f"{name} is accepted:\n{self.log(name)}")

    def submit(self, name: str, node: str, kind: str = "hello") -> Path:
        """Start a run that sends one node one message; return where its server will write the error, if any."""
        app = self.folder / f"app-{name}"
        app.mkdir()
        (app / "pyproject.toml").write_text(PYPROJECT.format(version=f"1.0.{len(self._started)}"))
        (app / "LICENSE").write_text("none\n")
        (app / "toy_server.py").write_text(
            SERVER.replace("HELLO_HERE", json.dumps(add_terms({"what": "hello", "transform": ""})))
        )
        (app / "toy_client.py").write_text(CLIENT)
        out = self.folder / f"{name}.json"
        numbers = re.findall(r"SuperNode ID: (\d+)", self.log(node))
        values = {"out": str(out), "node": numbers[-1], "kind": kind}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        self._done(["flwr", "run", str(app), "lab", "--run-config", text])
        return out

    def run_app(self, name: str, node: str, kind: str = "hello", seconds: float = 400) -> dict:
        """Send one node one message, and return the error in place of its answer, if any."""
        out = self.submit(name, node, kind)
        wait_for(out.exists, seconds, f"the run ends; the SuperLink says:\n{self.log('superlink')[-3000:]}")
        return json.loads(out.read_text())

    def close(self) -> None:
        """End what was started, and nothing else."""
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for each in psutil.process_iter():  # what a failed test left behind, or the SuperLink
            with contextlib.suppress(psutil.Error):
                if each.environ().get("FLEETFIT_LAB") == str(self.folder):
                    each.kill()
        for process in self._started:
            process.wait()


def descendants(process: subprocess.Popen) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def alive(processes: list[psutil.Process]) -> list[str]:
    """Return those that still run, not counting what only waits to be collected."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                lines.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
    return lines

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
clientapp = "{client}"

[tool.flwr.app.config]
out = ""
node = ""
messages = 1
kind = "evaluate"
"""

SERVER = """
import functools
import json
import time
from pathlib import Path

import flwr.superlink.grid.http_grid as grids
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

# A reply is there before its content, and Flower asks for that again after 1 s only.
grids.pull_objects = functools.partial(grids.pull_objects, initial_backoff=0.05)
app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    node = int(config["node"])
    found = []
    for number in range(config["messages"]):
        message = Message(RecordDict({"job": ConfigRecord({"number": number})}), node, config["kind"])
        began = time.monotonic()
        [name] = grid.push_messages([message])
        while not (replies := list(grid.pull_messages([name]))):
            time.sleep(1.0 if config["kind"] == "query" else 0.02)
        [reply] = replies
        row = {"wall_s": time.monotonic() - began}
        if reply.has_error():
            row.update(code=reply.error.code, reason=reply.error.reason)
        else:
            row.update(reply.content["said"])
        found.append(row)
    part = Path(config["out"] + ".part")
    part.write_text(json.dumps(found))
    part.rename(config["out"])
"""

CLIENT = """
import os
import time
from pathlib import Path

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
other = app


def answer(message, said):
    return Message(RecordDict({"said": ConfigRecord(said)}), reply_to=message)


def told(message, context):
    return {
        "number": message.content["job"]["number"],
        "config": str(context.node_config.get("config", "")),
        "zygote": "1" if b"warm.zygote" in (Path("/proc") / str(os.getppid()) / "cmdline").read_bytes() else "",
        "parent_threads": len(list((Path("/proc") / str(os.getppid()) / "task").iterdir())),
        "umask": os.umask(0o077),
        "home": Path(__file__).parent.name,
    }


@app.train()
def train(message, context):
    import numpy as np

    return answer(message, {**told(message, context), "sum": float(np.ones(3).sum())})


@app.evaluate()
def evaluate(message, context):
    return answer(message, told(message, context))


@app.query()
def query(message, context):
    Path(context.node_config["config"] + ".started").write_text(str(os.getpid()))
    time.sleep(600)
    return answer(message, told(message, context))
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
paths = {name: Path(given.pop(name)) for name in ("root_certificates", "key") if given.get(name)}
reached = connection.Connection(given.pop("superlink"), **paths)
try:
    sys.exit(launcher.run_node(Path(given.pop("config")), reached, **given))
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
            "PYTHONPATH": os.pathsep.join([str(folder / "lib"), str(PACKAGE)]),
            "FLEETFIT_LAB": str(folder),
        }
        (folder / "home").mkdir()
        (folder / "lib").mkdir()
        (folder / "lib" / "toy_client.py").write_text(CLIENT)
        (folder / "node.py").write_text(NODE)
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
        """Start the launcher; its output goes to `NAME.log`."""
        config = self.folder / f"{name} node.toml"
        config.write_text("")
        settings = {"superlink": f"127.0.0.1:{self.port}", "root_certificates": str(self.folder / "server" / "ca.crt")}
        settings |= {"config": str(config), "app": "toy_client:app"} | ({"key": str(key)} if key else {})
        settings |= {"preload": ["numpy", "flwr.supernode.runtime.run_clientapp"], **options}
        return self._start(name, [sys.executable, "node.py", json.dumps(settings)], **(environment or {}))

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def accepted(self, name: str, seconds: float = 300) -> None:
        wait_for(lambda: "SuperNode ID:" in self.log(name), seconds, f"{name} is accepted:\n{self.log(name)}")

    def submit(self, name: str, node: str, client: str = "toy_client:app", **config) -> Path:
        """Start a run of the toy app with one node; return where its server will write what it found."""
        app = self.folder / f"app-{name}"
        app.mkdir()
        (app / "pyproject.toml").write_text(PYPROJECT.format(client=client, version=f"1.0.{len(self._started)}"))
        (app / "LICENSE").write_text("none\n")
        (app / "toy_server.py").write_text(SERVER)
        (app / "toy_client.py").write_text(CLIENT)
        out = self.folder / f"{name}.json"
        numbers = re.findall(r"SuperNode ID: (\d+)", self.log(node))
        values = {"out": str(out), "node": numbers[-1], **config}
        text = " ".join(f"{key}={json.dumps(value)}" for key, value in values.items())
        self._done(["flwr", "run", str(app), "lab", "--run-config", text])
        return out

    def run_app(self, name: str, node: str, seconds: float = 400, **options) -> list[dict]:
        """Run the toy app with one node and return what its server found."""
        out = self.submit(name, node, **options)
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


def cpu_s(process: subprocess.Popen) -> float:
    """Return the CPU seconds of a process and all below it, those that have ended included."""
    total = 0.0
    for each in descendants(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(each.cpu_times()[:4])
    return total

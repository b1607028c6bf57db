"""What is used of Flower: its public API, and names inside it in one place; and the names by which it finds us."""

import ast
import importlib
import io
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fleetfit

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
FOLDER_OF_AN_APP = ("fleet/server_app.py", "flwr.common.config")  # nothing public says where it is
PACKAGE = Path(fleetfit.__file__).parent
OUTSIDE = sorted(set(PACKAGE.rglob("*.py")) - set((PACKAGE / "fleet/warm").rglob("*.py")))
QUIET = "fleetfit.fleet.logs", "fleetfit.fleet.client_app"


def flowers_modules(path: Path) -> Iterator[str]:
    """The modules of Flower that a file imports, or names in a text of its own, as for `import_module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.partition(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\Aflwr\.[\w.]+\Z", node.value)


def test_only_warm_uses_flowers_private_names() -> None:
    used = {(str(path.relative_to(PACKAGE)), name) for path in OUTSIDE for name in flowers_modules(path)}
    assert {name for _, name in used} >= PUBLIC, "this test does not see what is imported"
    assert {(path, name) for path, name in used if name not in PUBLIC} == {FOLDER_OF_AN_APP}


def test_apps_of_any_version_find_us_by_these_names() -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    assert isinstance(importlib.import_module("fleetfit.fleet.server_app").app, ServerApp)
    assert isinstance(importlib.import_module("fleetfit.fleet.client_app").app, ClientApp)


def test_the_process_of_a_message_does_without_torch() -> None:
    """It would take seconds, and a process that has torch answers by itself instead of asking the worker."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    import subprocess

    code = f"import importlib, sys; [importlib.import_module(name) for name in {QUIET}]; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", done.stderr


def test_a_warning_is_a_line_of_stderr(monkeypatch: pytest.MonkeyPatch) -> None:
    from fleetfit.fleet.logs import log_to_stderr

    logger, stderr = logging.getLogger("fleetfit"), io.StringIO()
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(sys, "stderr", stderr)
    log_to_stderr()
    log_to_stderr()
    logger.warning("error %d", 500)
    logger.info("nothing")
    assert stderr.getvalue() == "fleetfit: error 500\n"

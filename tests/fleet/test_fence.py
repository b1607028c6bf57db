"""What is used of Flower: its public API, and names inside it in few places; and the names by which it finds us."""

import ast
import importlib
import inspect
import io
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import fleetfit

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
PACKAGE = Path(fleetfit.__file__).parent
WITHOUT_TORCH = [f"fleetfit.fleet.{name}" for name in ("logs", "client_app", "node_loop", "worker")]

# The names inside Flower by the file that uses them, each with what it takes. None of them is replaced.
NAMES = {
    "fleet/superlink.py": {
        "flwr.common.constant:SYSTEM_TIME_TOLERANCE": "",
        "flwr.common.constant:TIMESTAMP_TOLERANCE": "",
        "flwr.common.serde:message_from_proto": "message_proto",
        "flwr.proto.fleet_pb2:ActivateNodeRequest": "public_key heartbeat_interval",
        "flwr.proto.fleet_pb2:DeactivateNodeRequest": "node_id",
        "flwr.proto.fleet_pb2:PullMessagesRequest": "node",
        "flwr.proto.fleet_pb2:PushMessagesRequest": ("node messages_list message_object_trees clientapp_runtime_list"),
        "flwr.proto.fleet_pb2:RegisterNodeFleetRequest": "public_key",
        "flwr.proto.fleet_pb2:UnregisterNodeFleetRequest": "node_id",
        "flwr.proto.heartbeat_pb2:SendNodeHeartbeatRequest": "node heartbeat_interval",
        "flwr.proto.message_pb2:PullObjectRequest": "node run_id object_id",
        "flwr.proto.message_pb2:PushObjectRequest": "node run_id session_id object_id object_content",
        "flwr.proto.node_pb2:Node": "node_id",
        "flwr.proto.run_pb2:GetRunRequest": "node run_id",
        "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": "component_name",
        "flwr.supercore.primitives.asymmetric:generate_key_pairs": "",
        "flwr.supercore.primitives.asymmetric:public_key_to_bytes": "public_key",
        "flwr.supernode.fleet_http_client:FleetHttpClient": "",
        "flwr.supernode.node_auth_http_interceptor:NodeAuthHttpInterceptor": "private_key public_key",
    },
    "fleet/server_app.py": {"flwr.common.config:get_project_dir": ""},  # nothing public says where an app is
    "fleet/server_watch.py": {
        "flwr.common.constant:SubStatus": "",
        "flwr.proto.runtime_pb2:PushTaskOutputRequest": "sub_status details",
        "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor": "token",
        "flwr.supercore.interceptors:RuntimeVersionHttpInterceptor": "component_name",
        "flwr.supercore.runtime:RuntimeHttpClient": "",
    },
    "fleet/transport.py": {
        "flwr.proto.message_pb2:ConfirmMessageReceivedRequest": "node run_id message_object_id",
        "flwr.proto.message_pb2:PullObjectRequest": "node run_id object_id",
        "flwr.proto.message_pb2:PushObjectRequest": "node run_id session_id object_id object_content",
        "flwr.proto.runtime_pb2:PullAppMessagesRequest": "message_ids",
        "flwr.proto.runtime_pb2:PushAppMessagesRequest": "messages_list message_object_trees",
        "flwr.app.message:remove_content_from_message": "message",
        "flwr.common.serde:message_to_proto": "message",
        "flwr.supercore.inflatable.inflatable_object:get_all_nested_objects": "obj",
        "flwr.supercore.inflatable.inflatable_object:get_object_tree": "obj",
        "flwr.supercore.inflatable.inflatable_object:no_object_id_recompute": "",
    },
}
# What else must be there: the requests and constructors of clients, and the fields of answers.
CLIENT = "flwr.supernode.fleet_http_client:FleetHttpClient"
CREATE = "server_address insecure root_certificates interceptors"
MORE = {
    **{f"{CLIENT}.{name}": "request" for name in (
        "ActivateNode", "DeactivateNode", "GetRun", "PullMessages", "PullObject",
        "PushMessages", "PushObject", "RegisterNode", "SendNodeHeartbeat", "UnregisterNode")},
    f"{CLIENT}.from_server_address": CREATE,
    "flwr.supercore.runtime:RuntimeHttpClient.from_server_address": CREATE,
    **{f"flwr.supercore.runtime:RuntimeHttpClient.{name}": "request" for name in (
        "ConfirmMessageReceived", "PullMessages", "PullObject", "PushMessages", "PushObject")},
    "flwr.superlink.grid.http_grid:HttpGrid._runtime_client": "",
    "flwr.proto.runtime_pb2:PullAppMessagesResponse": "messages_list message_object_trees",
    "flwr.proto.runtime_pb2:PushAppMessagesResponse": "message_ids objects_to_push session_id",
    "flwr.proto.fleet_pb2:ActivateNodeResponse": "node_id",
    "flwr.proto.fleet_pb2:PullMessagesResponse": "messages_list message_object_trees",
    "flwr.proto.fleet_pb2:PushMessagesResponse": "objects_to_push session_id",
    "flwr.proto.message_pb2:ObjectTree": "object_id children",
    "flwr.proto.message_pb2:PullObjectResponse": "object_found object_available object_content",
    "flwr.proto.message_pb2:PushObjectResponse": "stored",
}  # fmt: skip


def iter_names(path: Path) -> Iterator[tuple[str, str]]:
    """The modules and names of Flower that a file imports; a module in a text of its own, as for `import_module`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((each.name, "") for each in node.names if each.name.partition(".")[0] == "flwr")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "flwr":
            yield from ((node.module or "", each.name) for each in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((name, "") for name in re.findall(r"\Aflwr\.[\w.]+\Z", node.value))


def test_names_inside_flower_are_used_in_these_places_alone() -> None:
    used = {
        (str(path.relative_to(PACKAGE)), module, name)
        for path in PACKAGE.rglob("*.py")
        for module, name in iter_names(path)
    }
    assert {module for _, module, _ in used} >= PUBLIC, "this test does not see what is imported"
    listed = {(path, *name.split(":")) for path, names in NAMES.items() for name in names}
    assert {each for each in used if each[1] not in PUBLIC} == listed


def test_the_installed_flower_has_these_names() -> None:
    """It says which name has changed, at both ends of the range of versions."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    needed = {name: parameters for names in (*NAMES.values(), MORE) for name, parameters in names.items()}
    assert [change for name, parameters in needed.items() for change in iter_changes(name, parameters)] == []


def iter_changes(name: str, parameters: str) -> Iterator[str]:
    """Yield what is missing of a name inside Flower: itself, or a parameter; the fields of a message are parameters."""
    module, _, path = name.partition(":")
    try:
        value: Any = reduce(getattr, filter(None, path.split(".")), importlib.import_module(module))
    except (ImportError, AttributeError):
        yield name
        return
    if parameters:
        fields = getattr(value, "DESCRIPTOR", None)
        present = set(fields.fields_by_name) if fields is not None else set(inspect.signature(value).parameters)
        yield from (f"{name}({parameter}=)" for parameter in parameters.split() if parameter not in present)


def test_every_kind_of_change_in_flower_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip("flwr.supernode.fleet_http_client", reason="the extra flower is not installed")
    monkeypatch.setattr(module.FleetHttpClient, "GetRun", lambda self, query: None)
    assert list(iter_changes(f"{CLIENT}.GetRun", "request")) == [f"{CLIENT}.GetRun(request=)"]
    monkeypatch.delattr(module.FleetHttpClient, "GetRun")
    assert list(iter_changes(f"{CLIENT}.GetRun", "request")) == [f"{CLIENT}.GetRun"]
    assert list(iter_changes("flwr.no_such_module:", "")) == ["flwr.no_such_module:"]
    message = "flwr.proto.run_pb2:GetRunRequest"
    assert list(iter_changes(message, "node moon")) == [f"{message}(moon=)"]


def test_apps_of_any_version_find_us_by_these_names() -> None:
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    assert isinstance(importlib.import_module("fleetfit.fleet.server_app").app, ServerApp)
    assert isinstance(importlib.import_module("fleetfit.fleet.client_app").app, ClientApp)


def test_a_node_and_its_client_app_begin_without_torch() -> None:
    """The worker alone has it."""
    pytest.importorskip("flwr", reason="the extra flower is not installed")
    code = (
        "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, *WITHOUT_TORCH], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", done.stderr


def test_a_worker_begins_without_flower() -> None:
    code = "import fleetfit.fleet.node, fleetfit.fleet.worker, sys; print('flwr' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


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

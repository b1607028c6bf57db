"""The names inside Flower that FleetFit uses: checks of the installed Flower, and functions that replace them."""

import importlib
import inspect
from collections.abc import Iterator
from functools import partial, reduce
from typing import Any

SUPERNODE = "flwr.supernode.start_client_internal"
SUPEREXEC = "flwr.supercore.superexec.run_superexec"
CLIENT = "flwr.supernode.runtime.run_clientapp"
EXECUTOR = "flwr.supercore.superexec.executor"
CONNECTION = "flwr.supernode.fleet_http_connection"
INFLATABLE = "flwr.supercore.inflatable.inflatable_utils"
HEARTBEAT = "flwr.supercore.heartbeat"
GRID = "flwr.superlink.grid.http_grid"
STATE = "flwr.supernode.nodestate.in_memory_nodestate"
_JOB = ("runtime_api_address", "token", "parent_pid")
_BACKOFF = ("initial_backoff", "backoff_cap")

# Module, name in it, and its necessary parameters.
_NEEDED: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("flwr.supernode.cli", "flower_supernode", ()),
    (SUPERNODE, "time.sleep", ()),
    (SUPERNODE, "start_client_internal", ("isolation", "superexec_auth_secret")),
    (SUPERNODE, "_push_messages", ("state", "object_store")),
    (SUPERNODE, "_pull_and_store_message", ("state", "object_store", "receive", "get_run", "pull_object")),
    (SUPERNODE, "_insert_message", ("msg", "state", "store")),
    (INFLATABLE, "ObjectPullError", ("object_id", "reason")),
    (INFLATABLE, "ObjectUnavailableError", ("object_id",)),
    ("flwr.supercore.run", "RunNotRunningException", ()),
    ("flwr.common.constant", "ErrorCode.CLIENT_APP_CRASHED", ()),
    ("flwr.common.constant", "Status.FINISHED", ()),
    ("flwr.common.constant", "SubStatus.FAILED", ()),
    (CONNECTION, "HeartbeatSender", ("heartbeat_fn",)),
    (CONNECTION, "NodeAuthHttpInterceptor.intercept", ("context", "call_next")),
    ("flwr.common.constant", "TIMESTAMP_TOLERANCE", ()),
    ("flwr.common.constant", "SYSTEM_TIME_TOLERANCE", ()),
    (CONNECTION, "HEARTBEAT_DEFAULT_INTERVAL", ()),
    (HEARTBEAT, "HEARTBEAT_DEFAULT_INTERVAL", ()),
    (STATE, "InMemoryNodeState.create_task", ("task_type", "run_id")),
    (STATE, "InMemoryNodeState.get_tasks", ("task_ids",)),
    (STATE, "InMemoryNodeState.finish_task", ("task_id", "sub_status", "details")),
    (STATE, "InMemoryNodeState.delete_messages", ("message_ids",)),
    (STATE, "InMemoryNodeState.get_messages_legacy", ("is_reply",)),
    (SUPERNODE, "pull_objects", _BACKOFF),
    (SUPEREXEC, "run_superexec", ("runtime_api_address", "insecure", "superexec_auth_secret")),
    (SUPEREXEC, "get_executor", ("executor_type",)),
    (EXECUTOR, "ExecutionSpec", ("task_type", *_JOB)),
    (EXECUTOR, "LaunchResult.accepted", ()),
    (EXECUTOR, "LaunchResult.failed", ("message",)),
    ("flwr.supercore.constant", "TaskType.CLIENT_APP", ()),
    (CLIENT, "run_clientapp", (*_JOB, "insecure", "runtime_dependency_install")),
    (CLIENT, "install_from_fab", ("fab_file", "skip_prompt")),
    (CLIENT, "get_load_client_app_fn", ("default_app_ref", "app_path", "multi_app")),
    (CLIENT, "pull_and_inflate_object_from_tree", _BACKOFF),
)
# Module, function in it, and a global name that it must use: otherwise replacing that name has no effect.
_USED = (
    (SUPERNODE, "start_client_internal", "time"),
    (SUPERNODE, "start_client_internal", "_push_messages"),
    (SUPERNODE, "start_client_internal", "_pull_and_store_message"),
    (SUPERNODE, "_pull_and_store_message", "pull_objects"),
    (SUPERNODE, "_push_messages", "get_messages_legacy"),
    (CONNECTION, "http_request_response", "HeartbeatSender"),
    (CONNECTION, "http_request_response", "NodeAuthHttpInterceptor"),
    (CONNECTION, "http_request_response", "HEARTBEAT_DEFAULT_INTERVAL"),
    (HEARTBEAT, "HeartbeatSender._run", "HEARTBEAT_DEFAULT_INTERVAL"),
    (SUPEREXEC, "run_superexec", "get_executor"),
    (CLIENT, "run_clientapp", "install_from_fab"),
    (CLIENT, "run_clientapp", "get_load_client_app_fn"),
    (CLIENT, "run_clientapp", "pull_task_input"),
    (CLIENT, "pull_task_input", "pull_and_inflate_object_from_tree"),
)
# The methods of FleetFit's executor; a later Flower may need more.
_METHODS = {"get_eligible_capacity", "wait_for_capacity", "launch", "reconcile", "close"}


def find_missing_names() -> list[str]:
    """Return the names inside Flower that are missing or have changed."""
    missing = [text for module, name, parameters in _NEEDED for text in _iter_missing(module, name, parameters)]
    for module, function, name in _USED if not missing else ():
        value: Any = reduce(getattr, function.split("."), importlib.import_module(module))
        code = getattr(inspect.unwrap(value), "__code__", None)
        if name not in getattr(code, "co_names", ()):
            missing.append(f"{module}.{function} does not use {name}")
    if not missing:
        protocol = importlib.import_module(EXECUTOR).Executor
        methods = {name for name in vars(protocol) if not name.startswith("_")}
        missing += [f"{EXECUTOR}.Executor wants {name}" for name in sorted(methods - _METHODS)]
    return missing


def _iter_missing(module: str, name: str, parameters: tuple[str, ...]) -> Iterator[str]:
    try:
        value: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        yield f"{module}.{name}"
        return
    if parameters:
        try:
            present = set(inspect.signature(value).parameters)
        except (TypeError, ValueError):
            present = set()
        yield from (f"{module}.{name}({parameter}=)" for parameter in parameters if parameter not in present)


def poll_often(module: str, name: str) -> None:
    """Have a function of Flower poll often for a message's content, which comes after the message.

    Flower waits 1 s after the first failed poll, and longer each time.
    """
    home = importlib.import_module(module)
    setattr(home, name, partial(getattr(home, name), initial_backoff=0.05, backoff_cap=0.5))


def set_heartbeat(seconds: float) -> None:
    """Set the interval of this process's heartbeats, by default 30 s; Flower tolerates one that is late."""
    importlib.import_module(HEARTBEAT).HEARTBEAT_DEFAULT_INTERVAL = seconds  # type: ignore[attr-defined]


def report_failed_task(address: str, token: str, insecure: bool, certificates: str | None, details: str) -> None:
    """Report that a task has failed. The token of a task that has ended is not valid any more: nothing happens.

    Args:
        address: Of the task's Runtime API.
        token: Of the task.
        insecure: No TLS.
        certificates: The authority of the API's certificate, in PEM; None for those that the system trusts.
        details: The cause.

    Raises:
        httpx.HTTPError: The report did not arrive.
    """
    from flwr.common.constant import SubStatus
    from flwr.proto.runtime_pb2 import PushTaskOutputRequest
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient.from_server_address(
        server_address=address,
        insecure=insecure,
        root_certificates=None if certificates is None else certificates.encode(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="fleetfit"), RuntimeTokenHttpInterceptor(token)],
    )
    try:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=details))
    finally:
        client.close()

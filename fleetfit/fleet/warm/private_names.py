"""The names inside Flower that FleetFit uses: whether the installed Flower has them, and what is done with them."""

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

# Module, name in it, and the parameters that it must take.
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
# Module, function in it, and the global name that it must look up: replacing one that it does not use is in vain.
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
# What an executor of ours has; Flower may want more of it one day.
_METHODS = {"get_eligible_capacity", "wait_for_capacity", "launch", "reconcile", "close"}


def missing_names() -> list[str]:
    """Return which names inside Flower are not there, or not as they were; none, if all is well."""
    missing = [text for module, name, parameters in _NEEDED for text in _not_there(module, name, parameters)]
    for module, function, name in _USED if not missing else ():
        found: Any = reduce(getattr, function.split("."), importlib.import_module(module))
        code = getattr(inspect.unwrap(found), "__code__", None)
        if name not in getattr(code, "co_names", ()):
            missing.append(f"{module}.{function} does not use {name}")
    if not missing:
        protocol = importlib.import_module(EXECUTOR).Executor
        methods = {name for name in vars(protocol) if not name.startswith("_")}
        missing += [f"{EXECUTOR}.Executor wants {name}" for name in sorted(methods - _METHODS)]
    return missing


def _not_there(module: str, name: str, parameters: tuple[str, ...]) -> Iterator[str]:
    try:
        found: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        yield f"{module}.{name}"
        return
    if parameters:
        try:
            known = set(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            known = set()
        yield from (f"{module}.{name}({word}=)" for word in parameters if word not in known)


def often(module: str, name: str) -> None:
    """Have a function of Flower ask often for a message's content, which comes after the message.

    Flower waits 1 s after the first time in vain, and longer each time.
    """
    found = importlib.import_module(module)
    setattr(found, name, partial(getattr(found, name), initial_backoff=0.05, backoff_cap=0.5))


def beat_every(seconds: float) -> None:
    """Have the heartbeats of this process come within so many seconds, of which Flower allows for two; by itself 30."""
    importlib.import_module(HEARTBEAT).HEARTBEAT_DEFAULT_INTERVAL = seconds  # type: ignore[attr-defined]


def say_failed(address: str, token: str, insecure: bool, certificates: str | None, details: str) -> None:
    """Say that a task has failed. Nothing happens where it has ended otherwise: its token is not valid any more.

    Args:
        address: Of the Runtime API that the task came from.
        token: Of the task.
        insecure: No TLS.
        certificates: The authority of the API's certificate, in PEM; None for those that the system trusts.
        details: What happened.

    Raises:
        httpx.HTTPError: It was not heard.
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

"""The launcher of a node, with a SuperLink and nodes of real processes on this machine."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fleet.lab import Lab, alive, cpu_s, descendants, wait_for

pytestmark = pytest.mark.fleet

LIMIT_S = 300.0  # for what takes a second or a few; only a failure takes so long

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def warm_key(lab):
    return lab.key()


@pytest.fixture(scope="module")
def warm(lab, warm_key):
    """A node that forks; it has a Flower home of its own, so that what it installs can be told from the server's."""
    home = {"FLWR_HOME": str(lab.folder / "home-of-warm")}
    node = lab.node("warm", warm_key, home)
    lab.accepted("warm")
    yield node
    node.terminate()
    node.wait(LIMIT_S)


def measured(lab, node, name, messages=3):
    """Return what the server found, and the median seconds of the messages after the first."""
    before, began = cpu_s(node), time.monotonic()
    first, *rows = lab.run_app(name, name, messages=messages, kind="train")
    spent, took = cpu_s(node) - before, time.monotonic() - began
    wall = statistics.median(row["wall_s"] for row in rows)
    print(f"\n{name}: first {first['wall_s']:.2f} s, median of {messages - 1} further {wall:.2f} s (each: "
          f"{[round(row['wall_s'], 2) for row in rows]}), CPU {spent / messages:.2f} s per message, asking for "
          f"messages during {took:.0f} s included")  # fmt: skip
    return [first, *rows], wall


def test_other_client_apps_are_refused(lab, warm):
    [row] = lab.run_app("other", "warm", client="toy_client:other")
    assert row["code"] == 2
    assert '"toy_client:app"' in row["reason"] and '"toy_client:other"' in row["reason"]
    [row] = lab.run_app("same", "warm")
    assert row["home"] == "lib"
    assert not (lab.folder / "home-of-warm" / "apps").exists(), "what the server sent was unpacked"


def test_only_the_nodes_own_processes_get_its_messages(lab, warm, tmp_path):
    arguments = next(each.cmdline() for each in descendants(warm) if "--superexec-auth-secret-file" in each.cmdline())
    address = f"127.0.0.1:{arguments[arguments.index('--port') + 1]}"
    with (tmp_path / "log").open("w") as log:
        thief = subprocess.Popen(
            [Path(sys.executable).parent / "flower-superexec", "--insecure", "--runtime-api-address", address],
            env=lab.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)  # fmt: skip
        try:
            thief.wait(LIMIT_S)  # Flower's SuperExec ends when it is refused, and asks for ever when it is not
        finally:
            thief.kill()
            thief.wait()


def test_a_killed_process_is_replaced(lab, warm):
    """Flower would notice within a minute, and not know why."""
    out, started = lab.submit("deadly", "warm", kind="query"), lab.folder / "warm node.toml.started"
    wait_for(lambda: started.exists() and started.read_text(), LIMIT_S, "the job starts")
    os.kill(int(started.read_text()), signal.SIGKILL)
    wait_for(out.exists, LIMIT_S, f"an answer comes:\n{lab.log('warm')}")
    [row] = json.loads(out.read_text())
    assert "signal 9" in row["reason"]
    [row] = lab.run_app("next", "warm")
    assert row["zygote"] == "1"


def test_forks_answer_sooner_than_the_ordinary_way(lab, warm, warm_key):
    rows, soon = measured(lab, warm, "warm")
    for row in rows:
        assert row["sum"] == 3 and row["config"] == str(lab.folder / "warm node.toml")
        assert row["zygote"] == "1" and row["parent_threads"] == 1 and row["umask"] == 0o077
        assert row["home"] == "lib", "the app of the bundle ran, not the node's own"
    zygote = next(each for each in descendants(warm) if "warm.zygote" in " ".join(each.cmdline()))
    wait_for(lambda: not zygote.children(), LIMIT_S, "the zygote collects its children")
    warm.terminate()
    assert warm.wait(LIMIT_S) == 0

    ordinary = lab.node("ordinary", warm_key, warm=False)
    lab.accepted("ordinary")  # at once: the first node signed off
    assert "2004" not in lab.log("ordinary")
    rows, late = measured(lab, ordinary, "ordinary")
    assert all(row["sum"] == 3 and row["zygote"] == "" for row in rows)
    ordinary.terminate()
    assert ordinary.wait(LIMIT_S) == 0
    assert soon < late


@pytest.mark.parametrize(
    ("way", "number"),
    [("forking", signal.SIGTERM), ("forking", signal.SIGKILL), ("ordinary", signal.SIGINT)],
)
def test_no_process_stays_behind(lab, way, number):
    name = f"{way}-{number.name}"
    node = lab.node(name, lab.key(), warm=way == "forking")
    lab.accepted(name)
    lab.submit(name, name, kind="query")  # it sleeps for ten minutes
    wait_for((lab.folder / f"{name} node.toml.started").exists, LIMIT_S, "the job starts")
    processes = descendants(node)
    assert len(processes) >= 5  # launcher, keeper, SuperNode, SuperExec, client app
    node.send_signal(number)
    assert node.wait(LIMIT_S) == (-number if number == signal.SIGKILL else 0)
    wait_for(lambda: not alive(processes), LIMIT_S, f"all have ended, but for {alive(processes)}")
    assert ("terminated gracefully" in lab.log(name)) == (number != signal.SIGKILL)


def test_an_unregistered_key_is_not_tried_for_ever(lab):
    node = lab.node("unknown", lab.new_key(), warm=False, retry_s=8)
    assert node.wait(LIMIT_S) == 2
    assert "Next try" in lab.log("unknown") and "No further" in lab.log("unknown")


def test_a_wrong_authority_ends_the_node(lab):
    stranger = str(lab.folder / "stranger" / "ca.crt")
    wrong = lab.node("wrong", lab.new_key(), warm=False, root_certificates=stranger)
    keyless = lab.node("keyless", None, warm=False)
    assert wrong.wait(LIMIT_S) == 2 and keyless.wait(LIMIT_S) == 2
    assert stranger in lab.log("wrong")
    assert "Next try" not in lab.log("wrong") + lab.log("keyless")


MOVED = """
import sys

if "fleetfit.fleet.warm.zygote" in " ".join(sys.orig_argv):
    import flwr.supercore.superexec.run_superexec as module

    def get_executor(sort, **more):
        raise AssertionError("it was called")

    module.get_executor = get_executor
"""


def test_a_changed_flower_starts_ordinarily(lab):
    place = lab.folder / "moved"
    place.mkdir()
    (place / "sitecustomize.py").write_text(MOVED)
    path = os.pathsep.join([str(place), lab.environment["PYTHONPATH"]])
    node = lab.node("moved", lab.key(), {"PYTHONPATH": path})
    lab.accepted("moved")
    [line] = [each for each in lab.log("moved").splitlines() if each.startswith("fleetfit: ")]
    assert "lacks flwr.supercore.superexec.run_superexec.get_executor(executor_type=)" in line
    assert "ordinary way" in line
    [row] = lab.run_app("moved", "moved", kind="train")
    assert row["sum"] == 3 and row["zygote"] == ""
    node.terminate()
    assert node.wait(LIMIT_S) == 0


SHAPES = """
import flwr.supercore.superexec.executor as executor
import flwr.supernode.runtime.run_clientapp as client
import flwr.supernode.start_client_internal as node
from fleetfit.fleet.warm.private_names import find_missing_names

assert find_missing_names() == []

kept, client.install_from_fab = client.install_from_fab, None
assert find_missing_names() == ["flwr.supernode.runtime.run_clientapp.install_from_fab(fab_file=)",
                           "flwr.supernode.runtime.run_clientapp.install_from_fab(skip_prompt=)"]
del client.install_from_fab
assert find_missing_names() == ["flwr.supernode.runtime.run_clientapp.install_from_fab"]
client.install_from_fab = kept

def run_clientapp(runtime_api_address, token, insecure, parent_pid, runtime_dependency_install):
    install_from_fab(get_load_client_app_fn)

kept, client.run_clientapp = client.run_clientapp, run_clientapp
assert find_missing_names() == ["flwr.supernode.runtime.run_clientapp.run_clientapp does not use pull_task_input"]
client.run_clientapp = kept

executor.Executor.drain = lambda self: None
assert find_missing_names() == ["flwr.supercore.superexec.executor.Executor wants drain"]
del executor.Executor.drain

from time import sleep
del node.time
assert find_missing_names() == ["flwr.supernode.start_client_internal.time.sleep"]
print("as expected")
"""


def test_every_kind_of_change_in_flower_is_noticed():
    done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "as expected\n", done.stderr


def test_a_module_that_cannot_be_imported_is_an_error(lab):
    node = lab.node("broken", lab.new_key(), preload=["no_such_module"])
    assert node.wait(LIMIT_S) == 1
    assert "RunError: " in lab.log("broken") and "'no_such_module'" in lab.log("broken")


def test_modules_that_start_threads_are_not_forked(lab):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(99,), daemon=True).start()\n"
    (lab.folder / "lib" / "threaded.py").write_text(code)
    node = lab.node("threaded", lab.key(), preload=["threaded"])
    lab.accepted("threaded")
    assert "2 threads" in lab.log("threaded")
    node.terminate()
    assert node.wait(LIMIT_S) == 0


def test_a_node_ends_with_its_zygote(lab):
    node = lab.node("half", lab.key())
    lab.accepted("half")
    processes = descendants(node)
    next(each for each in processes if "warm.zygote" in " ".join(each.cmdline())).send_signal(signal.SIGKILL)
    assert node.wait(LIMIT_S) == 1
    assert "code -9" in lab.log("half")
    assert "terminated gracefully" in lab.log("half")
    assert not alive(processes)

"""A node's processes, with a SuperLink and nodes on this machine."""

import json
import os
import signal
import sys

import pytest
from fleet.lab import Lab, alive, descendants, wait_for

pytestmark = pytest.mark.fleet

LIMIT_S = 300.0  # for what takes a second or a few; only a failure takes so long

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("lab"))
    yield lab
    lab.close()


def test_a_killed_worker_is_replaced_and_a_foreign_app_is_refused(lab):
    """What the server sent is not even unpacked, whatever client app it names."""
    started = lab.folder / "killed.started"
    home = lab.folder / "home-of-killed"
    node = lab.node("killed", lab.key(), {"SLEEPS": str(started), "FLWR_HOME": str(home)})
    lab.accepted("killed")
    error = lab.run_app("foreign", "killed", kind="foreign")
    assert error["code"] == 2 and '"number"' in error["reason"]
    assert len(descendants(node)) == 1, "no worker was started for it"
    out = lab.submit("deadly", "killed")
    wait_for(lambda: started.exists() and started.read_text(), LIMIT_S, "the job starts")
    assert len(descendants(node)) == 2
    os.kill(int(started.read_text()), signal.SIGKILL)
    wait_for(out.exists, LIMIT_S, f"an answer comes:\n{lab.log('killed')}")
    assert "signal 9" in json.loads(out.read_text())["reason"]
    started.unlink()
    lab.submit("next", "killed")
    wait_for(started.exists, LIMIT_S, "another worker starts")
    assert not home.exists(), "what the server sent was unpacked"
    node.terminate()
    assert node.wait(LIMIT_S) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_no_process_stays_behind(lab, number):
    name, key = number.name, lab.key()
    started = lab.folder / f"{name}.started"
    node = lab.node(name, key, {"SLEEPS": str(started)})
    lab.accepted(name)
    lab.submit(name, name)  # its data take ten minutes
    wait_for(started.exists, LIMIT_S, "the job starts")
    processes = descendants(node)
    assert len(processes) == 2
    node.send_signal(number)
    assert node.wait(LIMIT_S) == (-number if number == signal.SIGKILL else 0)
    wait_for(lambda: not alive(processes), LIMIT_S, f"all have ended, but for {alive(processes)}")
    assert "fleetfit: " not in lab.log(name), "it leaves without a complaint"
    again = lab.node(f"{name} again", key)
    lab.accepted(f"{name} again")  # at once after a graceful end, and otherwise after half a minute
    assert ("Next try" in lab.log(f"{name} again")) == (number == signal.SIGKILL)
    assert lab.run_app(f"{name}-again", f"{name} again") == {}
    again.terminate()
    assert again.wait(LIMIT_S) == 0


def test_an_unregistered_key_is_not_tried_for_ever(lab):
    node = lab.node("unknown", lab.new_key(), retry_s=8)
    assert node.wait(LIMIT_S) == 2
    assert "Next try" in lab.log("unknown") and "No further" in lab.log("unknown")


def test_a_wrong_authority_ends_the_node(lab):
    stranger = str(lab.folder / "stranger" / "ca.crt")
    wrong = lab.node("wrong", lab.new_key(), root_certificates=stranger)
    keyless = lab.node("keyless", None)
    assert wrong.wait(LIMIT_S) == 2 and keyless.wait(LIMIT_S) == 2
    assert stranger in lab.log("wrong")
    assert "Next try" not in lab.log("wrong") + lab.log("keyless")

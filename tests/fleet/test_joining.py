"""Nodes that do not join, as real processes: clock, certificate and key end them, a server that is away does not."""

import os
import re
import subprocess
import sys

import pytest
from deployment import free_port
from fleet.lab import Lab, wait_for
from support import run_verb
from tls_servers import DAY, Authority, serving

pytestmark = pytest.mark.fleet

LIMIT_S = 300.0

if sys.platform != "linux":
    pytest.skip("reads /proc", allow_module_level=True)

# A device whose clock is off: what Flower signs and what Python reads is so many seconds from the truth.
CLOCK = """
import datetime, os, time
off, truth = float(os.environ.get("CLOCK_OFF", 0)), time.time
time.time = lambda: truth() + off
if "node.py" in __import__("sys").orig_argv:
    import flwr.supercore.date as dates
    now = dates.now
    dates.now = lambda: now() + datetime.timedelta(seconds=off)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("joining"))
    (lab.folder / "clock").mkdir()
    (lab.folder / "clock" / "sitecustomize.py").write_text(CLOCK)
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY"):
        lab.environment.pop(name, None)
    yield lab
    lab.close()


def clocked(lab, seconds):
    path = os.pathsep.join([str(lab.folder / "clock"), lab.environment["PYTHONPATH"]])
    return {"PYTHONPATH": path, "CLOCK_OFF": str(seconds)}


def own_lines(lab, name):
    """Return what the node has logged."""
    return [line for line in lab.log(name).splitlines() if line.startswith("fleetfit: ")]


def test_wrong_clocks_end_the_node(lab):
    """All amounts and directions are in test_connection.py; an hour and more is told in minutes."""
    nodes = {seconds: lab.node(f"clock{seconds}", lab.key(), clocked(lab, seconds))
             for seconds in (20, -86400)}  # fmt: skip
    for seconds, node in nodes.items():
        assert node.wait(LIMIT_S) == 2, lab.log(f"clock{seconds}")
    [late] = own_lines(lab, "clock-86400")
    assert "1440 min" in late
    [early] = own_lines(lab, "clock20")
    stated = re.search(r"\b(\d+) s\b", early)  # a busy machine's answer comes seconds late, and that counts
    assert stated and 19 <= int(stated[1]) <= 30, early


def test_a_clock_that_is_off_by_little_is_accepted(lab):
    node = lab.node("clock-200", lab.key(), clocked(lab, -200))
    lab.accepted("clock-200")
    node.terminate()
    assert node.wait(LIMIT_S) == 0 and not own_lines(lab, "clock-200")


def test_wrong_servers_end_the_node(lab):
    """One with an expired certificate, one without TLS; all faults of servers are in test_connection.py."""
    authority = Authority(lab.folder / "late")
    with serving(authority.server("127.0.0.1", until=-DAY / 24)) as late, serving() as bare:
        nodes = {
            "late": lab.node(
                "late", lab.new_key(), superlink=f"127.0.0.1:{late}", root_certificates=str(authority.file)
            ),
            "bare": lab.node("bare", lab.new_key(), superlink=f"127.0.0.1:{bare}"),
        }
        for name, node in nodes.items():
            assert node.wait(LIMIT_S) == 2, lab.log(name)
    assert f"127.0.0.1:{late}" in own_lines(lab, "late")[0] and f"127.0.0.1:{bare}" in own_lines(lab, "bare")[-1]


def test_a_proxy_that_refuses_is_tried_again(lab):
    with serving(status=403) as proxy:
        environment = {"https_proxy": f"http://127.0.0.1:{proxy}"}
        node = lab.node("forbidden", lab.new_key(), environment)
        wait_for(lambda: len(own_lines(lab, "forbidden")) > 1, LIMIT_S, f"it tries again:\n{lab.log('forbidden')}")
        assert node.poll() is None
        node.terminate()
        assert node.wait(LIMIT_S) == 0
    assert all("https_proxy" in line and "403" in line for line in own_lines(lab, "forbidden"))


def test_a_node_joins_when_its_server_comes(lab, tmp_path):
    """The SuperLink of the lab, by way of a port that opens late."""
    port, key = free_port(), lab.key()
    node = lab.node("early bird", key, superlink=f"127.0.0.1:{port}")
    wait_for(lambda: len(own_lines(lab, "early bird")) > 1, LIMIT_S, "it tells the cause, and again later")
    assert all(f"127.0.0.1:{port}" in line for line in own_lines(lab, "early bird"))
    code = (
        "import socket, sys, threading\n"
        "def pipe(a, b):\n"
        "    while data := a.recv(65536): b.sendall(data)\n"
        "with socket.create_server(('127.0.0.1', int(sys.argv[1]))) as s:\n"
        "    while True:\n"
        "        a = s.accept()[0]; b = socket.create_connection(('127.0.0.1', int(sys.argv[2])))\n"
        "        for pair in ((a, b), (b, a)): threading.Thread(target=pipe, args=pair, daemon=True).start()\n"
    )
    way = subprocess.Popen([sys.executable, "-c", code, str(port), str(lab.port)], stderr=subprocess.DEVNULL)
    try:
        lab.accepted("early bird")
        node.terminate()
        assert node.wait(LIMIT_S) == 0
    finally:
        way.kill()
        way.wait()


def test_a_key_that_the_superlink_forgets_ends_the_node(lab):
    """It is unregistered while the node is there."""
    key = lab.key()
    node = lab.node("forgotten", key, retry_s=8)
    lab.accepted("forgotten")
    number = lab.log("forgotten").split("SuperNode ID: ")[1].split()[0]
    lab._done([sys.executable, "-m", "fleetfit", "flower", "revoke", number, "lab"])
    assert node.wait(LIMIT_S) == 2, lab.log("forgotten")
    assert len(own_lines(lab, "forgotten")) >= 2, "one for each try, and one at the end"


def test_wrong_arguments_start_no_process(lab, tmp_path):
    config = tmp_path / "node.toml"
    config.write_text('name = "a"\n[data]\nname = "digits"\n')
    key, ca = lab.new_key(), lab.folder / "server" / "ca.crt"
    for words, mention in (
        (["--superlink", "::1:8000", "--ca", ca, "--key", key], '"[::1]:8000"'),
        (["--superlink", "127.0.0.1:1", "--ca", ca, "--key", key.with_suffix(".pub")], str(key.with_suffix(".pub"))),
        (["--superlink", "127.0.0.1:1", "--ca", key, "--key", key], str(key)),
        (["--superlink", "127.0.0.1:1", "--ca", ca, "--key", lab.folder / "server" / "server.key"], "OpenSSH"),
    ):
        assert mention in run_verb("flower", "node", config, *words, code=2).err

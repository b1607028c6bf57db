"""Nodes that do not join, as real processes: clock, certificate and key end them, a server that is away does not."""

import os
import re
import signal
import subprocess
import sys

import pytest
from fleet.lab import Lab, free_port, wait_for
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
if "fleetfit.fleet.warm.supernode" in __import__("sys").orig_argv:
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
    """Return what the launcher and its SuperNode said of their own."""
    return [line for line in lab.log(name).splitlines() if line.startswith("fleetfit: ")]


@pytest.mark.parametrize(
    ("seconds", "minutes", "direction", "warm"),
    [(20, 0, "ahead of", True), (3600, 60, "ahead of", True), (-3600, 60, "behind", True),
     (-86400, 1440, "behind", False)],
)  # fmt: skip
def test_wrong_clocks_end_the_node(lab, seconds, minutes, direction, warm):
    name = f"clock{seconds}"
    node = lab.node(name, lab.key(), clocked(lab, seconds), warm=warm)
    assert node.wait(LIMIT_S) == 2, lab.log(name)
    [line] = own_lines(lab, name)
    assert line.startswith("fleetfit: This device's clock is ") and "Set the clock" in line
    if minutes:
        assert f"{minutes} min {direction}" in line
    else:  # A busy machine's answer comes seconds late, and that counts.
        stated = re.search(rf"(\d+) s {direction}", line)
        assert stated and seconds - 1 <= int(stated[1]) <= seconds + 10, line


@pytest.mark.parametrize("seconds", [3, -200])
def test_a_clock_that_is_off_by_little_is_accepted(lab, seconds):
    name = f"clock{seconds}"
    node = lab.node(name, lab.key(), clocked(lab, seconds))
    lab.accepted(name)
    node.terminate()
    assert node.wait(LIMIT_S) == 0 and not own_lines(lab, name)


CERTIFICATES = {
    "host": (lambda a: a.server("fleet.example.org"), "is for fleet.example.org, not for 127.0.0.1"),
    "early": (lambda a: a.server("127.0.0.1", since=DAY, until=2 * DAY), "is not yet valid"),
    "late": (lambda a: a.server("127.0.0.1", until=-DAY / 24), "has expired"),
    "namesake": (lambda a: Authority(a.folder / "2").server("127.0.0.1"), "is not of an authority in"),
}


@pytest.mark.parametrize("kind", CERTIFICATES)
def test_wrong_certificates_end_the_node(lab, kind):
    make_server, words = CERTIFICATES[kind]
    authority = Authority(lab.folder / kind)
    with serving(make_server(authority)) as port:
        node = lab.node(kind, lab.new_key(), superlink=f"127.0.0.1:{port}", root_certificates=str(authority.file))
        assert node.wait(LIMIT_S) == 2, lab.log(kind)
    [line] = own_lines(lab, kind)
    assert words in line


def test_a_server_without_tls_ends_the_node(lab):
    with serving() as port:
        node = lab.node("open", lab.new_key(), superlink=f"127.0.0.1:{port}")
        assert node.wait(LIMIT_S) == 2
    assert "does not speak TLS" in own_lines(lab, "open")[-1]


AWAY = {
    "closed": ("127.0.0.1:{port}", {}, "no program listens on port {port}"),
    "nameless": ("no-such-host.invalid:{port}", {}, "no-such-host.invalid cannot be resolved"),
    "proxied": ("127.0.0.1:{port}", {"https_proxy": "http://127.0.0.1:{port}"}, "variable https_proxy refuses"),
    "bracketed": ("[::1]:{port}", {}, "[::1]:{port} "),
}


def test_a_node_waits_for_an_absent_server(lab):
    port = free_port()
    nodes = {}
    for name, (address, environment, _) in AWAY.items():
        variables = {key: value.format(port=port) for key, value in environment.items()}
        nodes[name] = lab.node(name, lab.new_key(), variables, superlink=address.format(port=port), warm=False)
    for name, (*_, words) in AWAY.items():
        wait_for(lambda name=name: own_lines(lab, name), LIMIT_S, f"{name} tells why:\n{lab.log(name)}")
        assert (
            words.format(port=port) in own_lines(lab, name)[0] and "The node keeps trying." in own_lines(lab, name)[0]
        )
    wait_for(lambda: len(own_lines(lab, "closed")) > 1, LIMIT_S, "the cause is told again")
    assert lab.log("closed").count("Connection attempt failed") > len(own_lines(lab, "closed"))
    for name, node in nodes.items():
        assert node.poll() is None, lab.log(name)
        node.send_signal(signal.SIGTERM)
        assert node.wait(LIMIT_S) == 0, lab.log(name)


def test_a_proxy_that_refuses_is_tried_again(lab):
    with serving(status=403) as proxy:
        environment = {"https_proxy": f"http://127.0.0.1:{proxy}"}
        node = lab.node("forbidden", lab.new_key(), environment, warm=False)
        wait_for(lambda: len(own_lines(lab, "forbidden")) > 1, LIMIT_S, f"it tries again:\n{lab.log('forbidden')}")
        assert node.poll() is None
        node.terminate()
        assert node.wait(LIMIT_S) == 0
    assert all("the proxy refuses (403 Forbidden)" in line for line in own_lines(lab, "forbidden"))


def test_a_node_joins_when_its_server_comes(lab, tmp_path):
    """The SuperLink of the lab, by way of a port that opens late."""
    port, key = free_port(), lab.key()
    node = lab.node("early bird", key, superlink=f"127.0.0.1:{port}")
    wait_for(lambda: own_lines(lab, "early bird"), LIMIT_S, "it tells why")
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
    node = lab.node("forgotten", key, retry_s=1)
    lab.accepted("forgotten")
    number = lab.log("forgotten").split("SuperNode ID: ")[1].split()[0]
    lab._done(["flwr", "supernode", "unregister", number, "lab"])
    assert node.wait(LIMIT_S) == 2, lab.log("forgotten")
    lines = own_lines(lab, "forgotten")
    assert "does not accept this node's signature" in lines[0] and "it is not registered" in lines[-1]


def test_wrong_arguments_start_no_process(lab, tmp_path):
    config = tmp_path / "node.toml"
    config.write_text('name = "a"\n[data]\nname = "digits"\n')
    key, ca = lab.new_key(), lab.folder / "server-ca.crt"
    for words, mention in (
        (["--superlink", "::1:8000", "--ca", ca, "--key", key], '"[::1]:8000", got "::1:8000"'),
        (["--superlink", "127.0.0.1:1", "--ca", ca, "--key", key.with_suffix(".pub")], "should be a node's, as"),
        (["--superlink", "127.0.0.1:1", "--ca", key, "--key", key], "should have certificates in PEM form"),
        (["--superlink", "127.0.0.1:1", "--ca", ca, "--key", lab.folder / "server.key"], "in OpenSSH form"),
    ):
        assert mention in run_verb("flower", "node", config, *words, code=2).err

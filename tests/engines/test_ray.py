"""Engine ray on real actors: the bits of `local`, also when an actor or a machine dies; what it shares and refuses."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from same_bits import SETTINGS, finished, fleets, same
from support import Expected, raises
from tiny import spec_of
from waiting import LIMIT_S, listening_to_ctrl_c, running, wait_until

from fleetfit import names
from fleetfit.core import Local
from fleetfit.engines import ray as engines_ray
from fleetfit.engines.local import local
from fleetfit.engines.processes import processes
from fleetfit.engines.ray import Actors, _import_ray, ray
from fleetfit.errors import ConfigError, MissingExtra, RunError
from fleetfit.hooks import FEDAVG, build
from fleetfit.messages import pack
from fleetfit.rounds import run, run_round, start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # Ray's own, about its future defaults
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # it leaves its processes to themselves
]
pytest.importorskip("ray", reason="the extra ray is not installed")

SPECS: list[Mapping[str, Any]] = [
    *(spec_of(name) for name in names.list_names("methods")),
    {"name": "plugin_method:counting", "pull": 0.1},
    {"name": "plugin_method:counting", "pull": 0.1, "hooks": {"step": "test_standing:in_the_second"}},  # undone
    {"name": "scalefl", "options": {"feddyn": {}}},
    {"name": "heterofl", "options": {"feddistill": {}}},
    {"name": "scalefl", "options": {"class_prior": {}}},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster with room for four actors: engines find it and leave it alone."""
    library = _import_ray()
    library.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield library
    library.shutdown()
    gc.collect()


@pytest.fixture(scope="module")
def two_actors(cluster: Any) -> Iterator[Actors]:
    """An engine for all methods that leave the model alone."""
    engine = ray(fleets({"name": "fedavg"})[1], workers=2)
    yield engine
    engine.close()
    assert cluster.is_initialized()


def ask(engine: Actors, worker: int, question: Any) -> Any:
    """Ask an actor's process something."""
    import ray as library

    return library.get(engine._workers[worker].actor.__ray_call__.remote(question))


# ---- the same bits -------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_same_bits_as_local(spec: Mapping[str, Any], two_actors: Actors) -> None:
    federation, simulation = fleets(spec)
    expected = finished(federation, local(simulation))
    assert not expected.report["failures"]
    if build(spec).adapt_model is FEDAVG.adapt_model:
        same(expected, finished(federation, two_actors))
        return
    engine = ray(simulation, workers=1)
    try:
        same(expected, finished(federation, engine))
    finally:
        engine.close()


def test_extra_tensors_go_down_and_up_with_the_same_bits(two_actors: Actors) -> None:
    """SCAFFOLD's control variates: in jobs, updates and the clients' memories. It takes plain SGD."""
    federation, simulation = fleets({"name": "heterofl", "options": {"scaffold": {}}})
    settings, here = replace(SETTINGS, local=Local(lr=0.1, epochs=2, batch_size=8)), local(simulation)
    expected, result = (finished(federation, engine, settings) for engine in (here, two_actors))
    same(expected, result)
    assert not expected.report["failures"] and any("control" in str(key) for key in expected.server.memory)
    assert pack(here.dump_memories()) == pack(two_actors.dump_memories())


def test_a_client_that_changes_its_state_harms_no_other(two_actors: Actors) -> None:
    federation, simulation = fleets({"name": "plugin_method:scribbling"})
    apart = processes(simulation, workers=1)
    try:
        same(finished(federation, apart), finished(federation, two_actors))
    finally:
        apart.close()


def test_tensors_enter_the_store_once(two_actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _ = fleets({"name": "depthfl"})
    federation = replace(federation, cohort=7)
    puts: list[int] = []
    put = two_actors._put
    monkeypatch.setattr(two_actors, "_put", lambda message: puts.append(len(message)) or put(message))
    two_actors.load_memories({})
    _, report = run_round(federation, two_actors, SETTINGS, start(federation))
    assert report["train"]["clients"] == 7
    assert len(puts) == len(set(puts)) == len({federation.level_of[c] for c in range(7)}) == 3


def test_short_jobs_wait_at_their_actor(two_actors: Actors, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[int] = []
    sent: list[tuple[int, int]] = []
    send = engines_ray._ActorWorker.send

    def send_and_count(worker: Any, job: Any, memory: Any) -> None:
        before = set(worker.state_numbers)
        send(worker, job, memory)
        waiting.append(len(worker.jobs))
        sent.extend((id(worker), number) for number in worker.state_numbers - before)

    monkeypatch.setattr(engines_ray._ActorWorker, "send", send_and_count)
    federation, simulation = fleets({"name": "scalefl"})
    same(finished(federation, local(simulation)), finished(federation, two_actors))
    assert 1 < max(waiting) <= 8
    assert len(sent) == len(set(sent)) < len(waiting)


def test_one_thread_means_one(two_actors: Actors) -> None:
    def read_threads(actor: Any) -> Any:
        import os

        import torch

        names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        return torch.get_num_threads(), torch.get_num_interop_threads(), *(os.environ[name] for name in names)

    assert ask(two_actors, 0, read_threads) == (1, 1, "1", "1", "1")
    assert ask(two_actors, 1, lambda actor: os.nice(0)) == os.nice(0)


# ---- deaths -------------------------------------------------


def test_an_actor_that_dies_in_a_job_loses_no_round(tmp_path: Path, two_actors: Actors) -> None:
    federation, simulation = fleets({"name": "plugin_method:killing", "folder": str(tmp_path)})
    (tmp_path / "died").touch()
    expected = finished(federation, local(simulation))
    (tmp_path / "died").unlink()
    result = finished(federation, two_actors)
    assert (tmp_path / "died").exists()
    same(expected, result)


def test_an_actor_killed_between_rounds_loses_no_round(two_actors: Actors) -> None:
    federation, simulation = fleets({"name": "scalefl"})
    expected = finished(federation, local(simulation))
    two_actors.load_memories({})
    rounds = run(federation, two_actors, SETTINGS, start(federation))
    next(rounds)
    pid = ask(two_actors, 0, lambda actor: os.getpid())
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=LIMIT_S)
    *_, last = rounds
    same(expected, last)


def test_a_job_that_kills_every_actor_fails(two_actors: Actors) -> None:
    federation, _ = fleets({"name": "plugin_method:always_killing"})
    two_actors.load_memories({})
    one = replace(SETTINGS, rounds=2, evaluate_every=0)
    reports = [r.report for r in run(federation, two_actors, one, start(federation))]
    reasons = [f["reason"] for report in reports for f in report["failures"] if f["client"] == 5]
    assert reasons and all("workers died" in reason for reason in reasons)


def test_a_model_that_cannot_be_rebuilt_ends_the_run(two_actors: Actors) -> None:
    federation, simulation = fleets({"name": "fedavg"})
    spec = {**dict(simulation.problem.spec or {}), "model": {"name": "no_such_module:tiny"}}
    engine = ray(replace(simulation, problem=replace(simulation.problem, spec=spec)), workers=1)
    try:
        with raises(RunError, "no_such_module"):
            finished(federation, engine)
    finally:
        engine.close()


# ---- what is refused -------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"workers": 0}, Expected(1, 0, key="engine.workers")),
        ({"threads": 0}, Expected(1, 0, key="engine.threads")),
        ({"device": "cuda:1"}, Expected('"cuda:1"', key="engine.device")),
        ({"cpus": 0.0}, Expected("engine.cpus", 0, key="engine.cpus")),
        ({"gpus": 1.0}, Expected("engine.gpus", 1, key="engine.cpus")),
        ({"device": "cuda", "gpus": 0.0}, Expected("engine.gpus", 0, key="engine.cpus")),
        ({"workers": 500}, Expected("1 CPUs", "0 GPUs", 500, key="engine.workers")),
        ({"cpus": 4000.0}, Expected("0 actors", key="engine.workers")),
    ],
)
def test_wrong_settings_are_refused(keys: dict[str, Any], expected: Expected, two_actors: Actors) -> None:
    _, simulation = fleets({"name": "fedavg"})
    with raises(ConfigError, expected):
        ray(simulation, **keys)


def test_objects_without_an_import_path_are_refused() -> None:
    _, simulation = fleets({"name": "fedavg"})
    with raises(ConfigError, 'engine.name = "local"', key="model"):
        ray(replace(simulation, problem=replace(simulation.problem, spec=None)))


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises(MissingExtra, extra="ray"):
        ray(fleets({"name": "fedavg"})[1])


# ---- clusters: each in a process of its own, so that this one's is left alone ----------

SCRIPT = """
import sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from same_bits import SETTINGS, finished, fleets, same, run, start
from fleetfit.engines.local import local
from fleetfit.engines.ray import ray
from fleetfit.errors import ConfigError
import ray as library
federation, simulation = fleets({{"name": "scalefl"}})
"""
PATHS = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]


def script(text: str) -> str:
    """Run a script; return what it printed."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(paths=PATHS) + text], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def test_a_machine_that_dies_loses_no_round() -> None:
    """A cluster of a head and two machines with one core each; one of them goes in the second round."""
    out = script("""
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
cluster.wait_for_nodes()
engine = ray(simulation, address=cluster.address)
assert engine._size == 2, engine._size
rounds = run(federation, engine, SETTINGS, start(federation))
next(rounds)
cluster.remove_node(nodes[1], allow_graceful=False)
*_, last = rounds
print("actors there:", sum(worker.most > 0 for worker in engine._workers))
engine.close()
cluster.shutdown()
same(finished(federation, local(simulation)), last)
print("same")
""")
    assert "actors there: 1" in out and "same" in out.split()


def test_a_cluster_of_its_own_ends_with_the_engine() -> None:
    out = script("""
import psutil
engine = ray(simulation, workers=1)
finished(federation, engine)
folder = engine._folder.name
print("while:", len(psutil.Process().children(recursive=True)) > 3)
engine.close()
gone, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=600)
import os
print("after:", len(alive), os.path.exists(folder), library.is_initialized())
""")
    assert "while: True" in out and "after: 0 False False" in out


def test_no_cluster_at_an_address() -> None:
    out = script("""
try:
    ray(simulation, address="127.0.0.1:9")
except ConfigError as error:
    print(error)
""")
    assert "127.0.0.1:9" in out and "ray start --head" in out


def test_ctrl_c_ends_a_run_and_its_cluster(tmp_path: Path) -> None:
    """From a terminal the signal goes to all processes of the group."""
    folder = tmp_path / "run"
    command = [sys.executable, "-c", "from fleetfit.cli import main; main()", "run", "--set", "rounds=500", "--set",
               "data.partition.clients=8", "--set", "engine.name=ray", "--set", "engine.workers=1", "--set",
               "evaluate.every=0", "--out", str(folder)]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with running(command, **pipes, preexec_fn=listening_to_ctrl_c) as process:
        wait_until(lambda: list((folder / "checkpoints").glob("*.safetensors")), process)
        own = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode in (130, -signal.SIGINT), "a shell shows 130 for both"
    assert err.strip().splitlines()[-1].strip() == f"fleetfit resume {folder}"
    assert not psutil.wait_procs(own, timeout=LIMIT_S)[1]

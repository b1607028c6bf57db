"""What a level costs on a machine: steps, memory, energy, and the process that is held to its time."""

import io
import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support import raises
from support.profiles import FACTS, TABLES, with_fleet
from tiny import plain, tiny_problem
from waiting import LIMIT_S, listening_to_ctrl_c, running, wait_until

from fleetfit.api.profiling import profile
from fleetfit.config import load_experiment
from fleetfit.config.assemble.levels import plan_levels
from fleetfit.core import Job
from fleetfit.cost import measure_latency, training_memory
from fleetfit.errors import RunError
from fleetfit.machine import free_memory
from fleetfit.seeds import make_torch_rng
from fleetfit.training import get_local_model
from fleetfit.training.profiling import ProfileRequest, find_energy_meter, process, profile_level, steps
from fleetfit.training.profiling.memory import ENVIRONMENT
from fleetfit.training.profiling.steps import make_random_data

CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc, which only Linux has")


def make_request(level: int = 0, model: str = "tiny:tiny", **more: Any) -> ProfileRequest:
    before = plan_levels(load_experiment({**TABLES, "model": {"name": model}}), FACTS)
    assert before.problem.spec is not None
    local = plain(lr=1e-6, batch_size=16, momentum=0.9)
    return ProfileRequest(before.problem.spec, before.method_spec, before.levels[level].submodel, level, 4,
                          local, 16, **more)  # fmt: skip


# ---- steps -----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def run_watch(clock: Clock, watch: steps.Stopwatch, took: list[float]) -> int:
    """Let steps take so long; return how many were done before there were enough."""
    for done, seconds in enumerate(took):
        try:
            watch()
        except steps.EnoughSteps:
            return done
        clock.now += seconds
    return len(took)


def test_a_stopwatch_warms_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(steps, "time", clock)
    watch = steps.Stopwatch(106.0, None)
    assert run_watch(clock, watch, [5.0, 3.0, 1.0, 1.5, 1.0, 9.0, 9.0]) == 5
    assert watch.seconds == [1.0, 1.5, 1.0] and watch.energy_j is None, "at least three, though the time is over"
    clock.now = 0.0
    watch = steps.Stopwatch(1e9, None, most=4, warm_up=0)
    assert run_watch(clock, watch, [1.0] * 9) == 4 and watch.seconds == [1.0] * 4


def test_energy_covers_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looked = Clock(), []
    monkeypatch.setattr(steps, "time", clock)

    def joules() -> float:
        looked.append(clock.now)
        return 7.0 + 2.0 * clock.now

    watch = steps.Stopwatch(0.0, joules, fewest=4, warm_up=1)
    run_watch(clock, watch, [50.0, 0.04, 0.04, 0.04, 0.5, 1.0])
    assert watch.energy_j == pytest.approx(2.0 * (3 * 0.04 + 0.5)) and looked[0] == 150.0
    assert len(looked) == 3, "at the beginning, at most ten times a second, and at the end"


def test_profile_times_the_methods_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of the method and the optimizer of the run move the weights as a client's job does."""
    problem = tiny_problem()
    piece, data = problem.submodel(0.5, (1, 2)), make_random_data(problem, 4, 16, make_torch_rng("x"))
    state = steps.draw_state(problem, piece)
    assert {name: tuple(t.shape) for name, t in state.items()} == problem.layout.shapes(piece.sizes, piece.exits)
    job = Job("train", 0, 1, 0, 0, piece, state, {"name": "scalefl"}, seed=0, local=plain(lr=0.1, batch_size=16))
    whole, _ = steps.run_job(Job(**{**vars(job), "local": plain(lr=0.1, batch_size=16, epochs=3)}),
                             steps.Device(problem, data))  # fmt: skip
    model = get_local_model(problem, piece, CPU)
    steps.train_until(job, problem, data, CPU, steps.stop_after(3))
    after = model.read()
    assert all(torch.equal(after[name], whole.state[name]) for name in state)
    with raises(RunError, '"nothing"'):
        steps.train_until(Job(**{**vars(job), "method": {"name": "nothing"}}), problem, data, CPU, steps.stop_after(1))


def test_inference_of_one_sample_needs_no_batch() -> None:
    """Batch norm has static statistics there: a batch of one has none of its own."""
    problem = tiny_problem()
    latency = measure_latency(problem.architecture, problem.layout.full_sizes, (1, 2, 3), (1, 4, 4), patience_s=0.0)
    assert latency.median_s > 0 and latency.count == 9


# ---- energy ----------------------------------------------------------------------------------------------------------


def put(root: Path, files: dict[str, object]) -> None:
    for name, value in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")


RAPL = "class/powercap/intel-rapl:"


def test_counters_wrap_around(tmp_path: Path) -> None:
    """Packages and their memory count; cores are part of a package, psys contains it, and mmio is the same again."""
    put(tmp_path, {
        f"{RAPL}0/name": "package-0", f"{RAPL}0/energy_uj": 9_000_000, f"{RAPL}0/max_energy_range_uj": 10_000_000,
        f"{RAPL}0:0/name": "core", f"{RAPL}0:0/energy_uj": 1,
        f"{RAPL}0:1/name": "dram", f"{RAPL}0:1/energy_uj": 500_000, f"{RAPL}0:1/max_energy_range_uj": 10_000_000,
        f"{RAPL}1/name": "psys", f"{RAPL}1/energy_uj": 5,
        "class/powercap/intel-rapl-mmio:0/name": "package-0", "class/powercap/intel-rapl-mmio:0/energy_uj": 5,
    })  # fmt: skip
    meter = find_energy_meter(tmp_path)
    assert meter.source == "processor (package-0, dram)" and meter.read is not None
    assert meter.read() == 0.0
    put(tmp_path, {f"{RAPL}0/energy_uj": 9_500_000, f"{RAPL}0:1/energy_uj": 700_000, f"{RAPL}1/energy_uj": 10**9})
    assert meter.read() == pytest.approx(0.7)
    put(tmp_path, {f"{RAPL}0/energy_uj": 500_000})
    assert meter.read() == pytest.approx(1.7), "9.5 to 10, and 0 to 0.5"
    (tmp_path / f"{RAPL}0/energy_uj").unlink()
    assert meter.read() == pytest.approx(1.7), "what cannot be read has not moved"


def test_counter_for_root_only(tmp_path: Path) -> None:
    put(tmp_path, {f"{RAPL}0/name": "package-0"})
    meter = find_energy_meter(tmp_path)
    assert meter.read is None and "root" in meter.source
    missing = find_energy_meter(tmp_path / "nothing")
    assert missing.read is None and missing.source and "root" not in missing.source


def test_rails_are_integrated_over_time(tmp_path: Path) -> None:
    """The rail of the whole board alone where there is one; mV times mA; trapezoids."""
    chip = "class/hwmon/hwmon3"
    put(tmp_path, {
        "class/hwmon/hwmon1/name": "cpu_thermal", f"{chip}/name": "ina3221",
        f"{chip}/in1_label": "VDD_IN", f"{chip}/in1_input": 5000, f"{chip}/curr1_input": 1000,
        f"{chip}/in2_label": "VDD_CPU", f"{chip}/in2_input": 5000, f"{chip}/curr2_input": 400,
        f"{chip}/in7_label": "sum of shunt voltages", f"{chip}/in7_input": 80,
    })  # fmt: skip
    now = [10.0]
    meter = find_energy_meter(tmp_path, lambda: now[0])
    assert meter.source == "board (VDD_IN)" and meter.read is not None
    assert meter.read() == 0.0
    now[0] = 12.0
    put(tmp_path, {f"{chip}/curr1_input": 3000})
    assert meter.read() == pytest.approx(20.0), "from 5 W to 15 W in 2 s"
    (tmp_path / f"{chip}/in1_input").write_text("")
    now[0] = 13.0
    assert meter.read() == pytest.approx(20.0), "asked again the next time"
    put(tmp_path, {f"{chip}/in1_input": 5000})
    assert meter.read() == pytest.approx(35.0)


def test_all_rails_without_board_rail(tmp_path: Path) -> None:
    rails = "bus/i2c/drivers/ina3221x/1-0040/iio:device0"
    put(tmp_path, {f"{rails}/rail_name_0": "VDD_GPU_SOC", f"{rails}/in_power0_input": 1500,
                   f"{rails}/rail_name_1": "VDD_CPU_CV", f"{rails}/in_power1_input": 500,
                   f"{rails}/rail_name_2": "NC", f"{rails}/in_power2_input": 9999})  # fmt: skip
    now = [0.0]
    meter = find_energy_meter(tmp_path, lambda: now[0])
    assert meter.source == "board (VDD_GPU_SOC, VDD_CPU_CV)" and meter.read is not None and meter.read() == 0.0
    now[0] = 3.0
    assert meter.read() == pytest.approx(6.0)


# ---- memory ----------------------------------------------------------------------------------------------------------


def test_free_memory_respects_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=2000))
    assert free_memory(CPU, tmp_path) == 2000
    put(tmp_path, {"memory.max": "max", "memory.current": 5})
    assert free_memory(CPU, tmp_path) == 2000
    put(tmp_path, {"memory.max": 700, "memory.current": 300, "memory.stat": "anon 100\ninactive_file 50\n"})
    assert free_memory(CPU, tmp_path) == 450, "the kernel takes cached files back"
    put(tmp_path, {"memory/memory.limit_in_bytes": 90, "memory/memory.usage_in_bytes": 100,
                   "memory/memory.stat": "inactive_file 9\ntotal_inactive_file 3\n"})  # fmt: skip
    assert free_memory(CPU, tmp_path) == 0
    put(tmp_path, {"memory/memory.usage_in_bytes": 80})
    assert free_memory(CPU, tmp_path) == 13


PEAKS = """
import torch
from fleetfit.training.profiling.memory import measure_peak
cpu = torch.device("cpu")
first, second = measure_peak(lambda: torch.ones(16 * 2**20), cpu), measure_peak(lambda: None, cpu)  # 64 MiB
print(first["memory_bytes"], first["process_bytes"], second["memory_bytes"])
"""


@LINUX
def test_past_peak_is_measured() -> None:
    """In a process of its own, as profiles are: one that keeps freed memory would fill the tensor from that."""
    command, surroundings = [sys.executable, "-c", PEAKS], {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    taken, whole, again = map(int, done.stdout.split())
    assert 60 * 2**20 < taken < 90 * 2**20 and whole > taken
    assert again < 20 * 2**20, "the peak before does not count"


# ---- in the process --------------------------------------------------------------------------------------------------


def request_text(request: ProfileRequest, **more: Any) -> str:
    return json.dumps({**json.loads(request.to_json(0.0, 60.0)), **more})


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process's own work run here, without its limits."""
    monkeypatch.setattr(process, "limit_memory", lambda _: None)
    monkeypatch.setattr(process, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(process.signal, "setitimer", lambda *_: None)


def test_each_result_is_a_line(inside: None) -> None:
    stream = io.StringIO()
    process.main(io.StringIO(request_text(make_request(1))), stream)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    keys = [key for line in lines for key in line if key != "energy_j"]
    assert [key for key in keys if "bytes" not in key] == ["step", "latency", "done"], lines
    step = next(line["step"] for line in lines if "step" in line)
    assert step["count"] == 3 and step["median_s"] > 0


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MemoryError(), "no memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"), "no memory"),
        (torch.OutOfMemoryError("CUDA out of memory"), "no memory"),
        (RunError("it does not fit"), "it does not fit"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
def test_reasons_of_errors(error: BaseException, reason: str) -> None:
    assert process.describe_error(error).startswith(reason)


def test_untrainable_level_has_reason(inside: None) -> None:
    stream = io.StringIO()
    process.main(io.StringIO(request_text(make_request(), method={"name": "fedavgg"})), stream)
    assert '"fedavg"' in json.loads(stream.getvalue())["failed"]


def test_a_plain_module_is_measured_without_its_numbers(inside: None) -> None:
    request, stream = make_request(model="plain_models:Residual"), io.StringIO()
    frozen = {**request.problem, "peft": {"name": "frozen"}}
    process.main(io.StringIO(request_text(request, problem=frozen)), stream)
    assert json.loads(stream.getvalue().splitlines()[-1]) == {"done": True}


# ---- a process of its own --------------------------------------------------------------------------------------------


@pytest.mark.slow
@LINUX
def test_level_is_measured_in_own_process() -> None:
    measurement = profile_level(make_request(2, threads=1), 8.0, 120.0)
    assert not measurement.failed and measurement.step is not None and measurement.latency is not None
    assert measurement.step.count > 3 and measurement.memory_bytes is not None and measurement.process_bytes
    assert measurement.latency.median_s < measurement.step.median_s and measurement.process_bytes > 2**20 * 50


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(("batch", "width"), [(128, 1.0), (128, 0.5)])
def test_memory_is_close_to_prediction(batch: int, width: float) -> None:
    """Of a model whose activations are most of it; kernels take the rest, and so does the state as received."""
    tables = {"model": {"name": "resnet20"}, "fleet": {"levels": [0.25, 1.0]}, "local": {"batch_size": batch}}
    facts = type(FACTS)("", "classification", (3, 32, 32), 10)
    before = plan_levels(load_experiment(tables), facts)
    problem, level = before.problem, before.levels[-1 if width == 1 else 0]
    assert problem.spec is not None
    local = plain(lr=1e-6, batch_size=batch, momentum=0.9)
    measurement = profile_level(
        ProfileRequest(problem.spec, before.method_spec, level.submodel, 0, 10, local, batch), 1.0, 300.0
    )
    predicted = training_memory(problem.architecture, {**problem.layout.full_sizes, **level.submodel.sizes},
                                level.submodel.exits, (3, 32, 32), batch)  # fmt: skip
    assert measurement.memory_bytes is not None and 0.9 < measurement.memory_bytes / predicted < 1.4, measurement


@pytest.mark.slow
@LINUX
@pytest.mark.parametrize(
    ("model", "cause"),
    [
        ("hungry:killed", "killed"),
        ("hungry:full", "no memory"),
        ("hungry:endless", "time"),
    ],
)
def test_profile_survives_failed_levels(model: str, cause: str, tmp_path: Path) -> None:
    """The first level is measured, and the budget says so; the second fails; the third is not tried."""
    tables = {**with_fleet(), "model": {"name": model}}
    result = profile(tables, facts=FACTS, limit_s=60.0 if "endless" in model else LIMIT_S)
    assert [len(level.reasons) for level in result.levels] == [0, 1, 1] and result.affords.level == 0
    assert cause in result.levels[1].reasons[0] and "not tried" in result.levels[2].reasons[0]


@pytest.mark.slow
@LINUX
def test_ctrl_c_ends_the_process(tmp_path: Path) -> None:
    code = "from fleetfit.cli import main; main()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    options = ["profile", "--model", "hungry:endless", "--input-shape", "1,4,4", "--classes", "4", "--budgets", "1",
               "--limit-s", "300"]  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with running([sys.executable, "-c", code, *options], cwd=tmp_path, env=environment, **pipes,
                 preexec_fn=listening_to_ctrl_c) as started:  # fmt: skip
        assert started.stdout is not None
        assert "measuring" in started.stdout.readline()
        children = wait_until(lambda: _children(started.pid), started)
        started.send_signal(signal.SIGINT)
        _, output = started.communicate(timeout=LIMIT_S)
    assert started.returncode in (130, -signal.SIGINT) and output.count("\n") == 1
    assert children and not any(tmp_path.iterdir())
    for child in children:
        assert not _alive(child), "the process that measures goes with the one that started it"


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except OSError:
        return False

"""A run file, however broken, ends in an experiment or in a sentence that names the file or a key; it never hangs.

Real run files (of experiments, examples and the documentation) are mutated: values of other types, made-up keys, tables
in each other, numbers beyond all bounds, text that is no TOML. Each goes as far as it can without training: it is read,
and then assembled as `run` and `plan` would, or rehearsed as `compare` would. `tests/corpus/run_files` holds
what once failed.
"""

import datetime
import gc
import math
import re
import resource
import signal
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from fleetfit.api.comparison import check_rows, plan_comparison
from fleetfit.config import Experiment, load_experiment, to_toml
from fleetfit.config.assemble.run import assemble
from fleetfit.errors import FleetFitError

ROOT = Path(__file__).parents[2]
CORPUS = sorted((ROOT / "tests" / "corpus" / "run_files").glob("*.toml"))
LONGEST_S = 60
"""For one file, on a crowded machine."""
MAX_BYTES = 6 << 30
"""Of address space, beyond what this process has when a file begins."""
SMALL = """
rounds = 2
data = { name = "tiny:tiny_data", partition = { kind = "iid", clients = 6 } }
model = { name = "tiny:tiny" }
fleet = { groups = [{ budget = 0.4 }, { budget = 1.0 }], tolerance = 0.5 }
method = { name = "scalefl", beta = 0.1, options = { fedprox = { mu = 0.1 } }, hooks = { choose_channels = "rolling" } }
local = { epochs = 1, batch_size = 8, lr = 0.1, schedule = { kind = "step", at = [1], factor = 0.5 } }
cohort = { count = 2, selection = { name = "loss", candidates = 3 } }
engine = { name = "local", device = "cpu", threads = 1 }
evaluate = { every = 1, batch_norm = ["static", "batch"], statistics_samples = 10 }
checkpoint = { every = 1, keep = 2 }
"""
COMPARING = (
    SMALL
    + """
[[compare.row]]
label = "a"
method.name = "fedavg"
[[compare.row]]
label = "b"
local.lr = 0.2
[[compare.setting]]
label = "c"
cohort.count = 3
[compare]
columns = ["local", "rounds"]
target = 0.5
grid = { seed = [0, 1] }
tune = { local.weight_decay = [0.0, 0.1] }
"""
)


def written() -> list[str]:
    """Return the texts of real run files."""
    files = [*(ROOT / "experiments").rglob("*.toml"), *(ROOT / "examples").rglob("*.toml")]
    blocks = [text for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
              for text in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)]  # fmt: skip
    real = [file.read_text(encoding="utf-8") for file in sorted(files)] + blocks
    return [SMALL, COMPARING] * (len(real) // 2) + [text for text in real if parsed(text)]


def parsed(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


TEXTS = written()
STRANGE: list[str] = [
    "5", "-1", "0", "1.5", "nan", "inf", "-inf", "true", '""', '"x"', '" "', "[]", "{}", "[[]]", "[{}]", "[1, 'a']",
    "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "9" * 18, "9" * 30, "9" * 10_000, "0x" + "f" * 15, "1e308",
    "1e-320", '"\\u0000"', '"\\u001b[31m"', '"a\\nb"', "'" + "y" * 100_000 + "'", "[" * 40 + "]" * 40,
    "[" * 5000 + "]" * 5000, "{a = " * 40 + "1" + "}" * 40, '"~nobody/x.toml"', '"/dev/zero"', '"../x.toml"',
    '"nowhere.py:f"', '"os:system"', '"fleetfit.hooks:build"', '"a:b:c"', '"' + "z" * 300 + '.toml"', '"run.toml"',
    "{ name = 1 }", '{ name = "x" }', "{ kind = 3 }", '{ zzyzx = 1 }', '"١٢"', "+5", "1_000", '["static", "static"]',
]  # fmt: skip
PLAUSIBLE: list[Any] = [
    0.5, 1.0, 0.01, 1e-9, 3.0, 0, 1, 2, 3, 7, 64, True, False, "cpu", "fedavg", "adaptivefl", "feddf", "depthfl",
    "fedsgd", "shards", "natural", "iid", "multiply_adds", "memory_bytes", "halving", "all", "drop", "int8",
    "cosine", "rolling", "by_samples", "lora", "frozen", "cnn", "digits", "size", "diversity", "group", "tiny:tiny",
    "tiny:tiny_data", [0.5, 1.0], [1.0], [{"budget": 0.3}, {"budget": 1.0}], [{"budget": "20 K"}], [1, 2],
    [{"budget": 1.0, "profile": "phone"}], {"sd": 0.5}, {"fraction": 0.5}, {"name": "loss"}, {"fedprox": {}}, {},
]  # fmt: skip
KEYS = ["zzyzx", "name", "kind", "seed", "rounds", '"a.b"', '""', "model", "data", "compare", "levels", "groups",
        "options", "hooks", "partition", '"\\u0000"', "a" * 5000, "settings", "model_fields", "__class__"]  # fmt: skip


def places(table: Mapping[str, Any], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in table.items():
        yield (*place, key)
        if isinstance(value, Mapping):
            yield from places(value, (*place, key))


def quoted(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def toml(value: Any) -> str:
    """Write a value as TOML on one line; what stands for TOML already is taken as it is."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Mapping):
        return (
            "{ "
            + ", ".join(f"{k.text if isinstance(k, Raw) else quoted(k)} = {toml(v)}" for k, v in value.items())
            + " }"
        )
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\u{ord(c):04x}" for c in value) + '"'
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else str(value)


class Raw:
    """A text that stands in a file as it is."""

    def __init__(self, text: str) -> None:
        self.text = text


def at(table: Any, place: tuple[str, ...]) -> Any:
    for part in place:
        table = table.get(part) if isinstance(table, Mapping) else None
    return table


def put(table: Any, place: tuple[str, ...], value: Any) -> Any:
    if not place:
        return value
    return {**table, place[0]: put(table.get(place[0], {}), place[1:], value)}


@st.composite
def tables(draw: st.DrawFn) -> str:
    """A file with one to three values or keys that do not belong there."""
    table = parsed(draw(st.sampled_from(TEXTS)))
    mild = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        known_places = [place for place in places(table) if not any(isinstance(part, Raw) for part in place)]
        place = draw(st.sampled_from(known_places)) if known_places else ("local",)
        like = [value for value in PLAUSIBLE if type(value) is type(at(table, place))] or PLAUSIBLE
        value = draw(st.sampled_from(like)) if mild else Raw(draw(st.sampled_from(STRANGE)))
        if mild or draw(st.booleans()):
            table = put(table, place, value)
        else:
            inside = at(table, place[:-1])
            key: Any = Raw(draw(st.sampled_from(KEYS)))
            table = put(table, place[:-1], {**inside, key: value})
    return "".join(f"{k.text if isinstance(k, Raw) else quoted(k)} = {toml(v)}\n" for k, v in table.items())


@st.composite
def texts(draw: st.DrawFn) -> bytes:
    """A file with a piece of text or bytes at some place, or cut off, or twice."""
    data = draw(st.sampled_from(TEXTS)).encode()
    pieces = [b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"[", b"]", b"=", b"\n", b"\n[data]\n", b"\r\n",
              b"\n[[compare.row]]\n", b"\n[compare]\n", b"\na.b.c = 1\n", b"\n" + b".".join([b"a"] * 3000) + b" = 1\n",
              b"\n[" + b".".join([b"a"] * 3000) + b"]\nx = 1\n", b'"""', b"'''", b"\nrounds = 1\n", b"9" * 5000,
              b"\nx = " + b"[" * 20_000, b"#" + b"x" * 200_000, "é".encode("latin-1")]  # fmt: skip
    where = draw(st.integers(0, len(data)))
    kind = draw(st.sampled_from(["insert", "cut", "twice", "swap", "front"]))
    if kind == "insert":
        return data[:where] + draw(st.sampled_from(pieces)) + data[where:]
    if kind == "front":
        return draw(st.sampled_from(pieces)) + data
    if kind == "cut":
        return data[:where]
    if kind == "twice":
        return data + data[where:]
    other = draw(st.sampled_from(TEXTS)).encode()
    return data[:where] + other[draw(st.integers(0, len(other))) :]


FILES = st.one_of(tables().map(str.encode), tables().map(str.encode), texts())


@contextmanager
def bounded() -> Iterator[None]:
    """Fail what takes too long, and what takes more address space than a run file may."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"a run file took more than {LONGEST_S} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


def outcome(path: Path, data: bytes) -> str:
    """Take a file as far as it goes without training, and return how it ended."""
    path.write_bytes(data)
    with bounded():
        try:
            experiment = load_experiment(path)
            if experiment.compare.is_set:
                plan = plan_comparison(path)
                if len(plan.runs) <= 8 and all(is_small(entry.experiment) for entry in plan.runs):
                    check_rows(plan)
                return "a comparison"
            assert to_toml(assemble(load_experiment(path)).experiment if is_small(experiment) else experiment)
            return "a run"
        except FleetFitError as error:
            check_sentence(str(error), path, data)
            return type(error).__name__


def is_small(experiment: Experiment) -> bool:
    """Tell whether a run is assembled within a second: a small model, or data that are not here."""
    small = experiment.model.name in ("cnn", "mlp_2nn", "tiny:tiny") or experiment.data.name not in (
        "digits",
        "tiny:tiny_data",
    )
    return small and experiment.engine.name in ("local", "processes")


def check_sentence(message: str, path: Path, data: bytes) -> None:
    """A message is a sentence of bearable length, and speaks of the file or of something that stands in it."""
    assert 0 < len(message) < 3000, message[:300]
    assert not any(not c.isprintable() and c != "\n" for c in message), repr(message[:300])
    assert "Traceback" not in message and "pydantic" not in message
    words = set(re.findall(r"\w{3,}", data.decode("utf-8", "replace").lower()))
    mentioned = set(re.findall(r"\w{3,}", message.lower()))
    assert path.name in message or mentioned & (words | {"data", "model", "fleet", "local", "methods"}), message


@pytest.fixture(autouse=True)
def without_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No data set on this machine, and a working folder of its own."""
    monkeypatch.delenv("FLEETFIT_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)


FUZZ = settings(deadline=None, derandomize=True, database=None,
                suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow,
                                       HealthCheck.data_too_large, HealthCheck.large_base_example])  # fmt: skip


@settings(FUZZ, max_examples=40)
@given(data=FILES)
def test_a_broken_run_file_is_a_sentence(tmp_path: Path, data: bytes) -> None:
    outcome(tmp_path / "run.toml", data)


@pytest.mark.slow
def test_a_thousand_broken_run_files_are_sentences(tmp_path: Path) -> None:
    outcomes: Counter[str] = Counter()

    @settings(FUZZ, max_examples=1000)
    @given(data=FILES)
    def run(data: bytes) -> None:
        outcomes[outcome(tmp_path / "run.toml", data)] += 1

    run()
    gc.collect()
    assert sum(outcomes.values()) >= 1000
    assert len(outcomes) >= 4 and math.prod(outcomes.values()) > 0, outcomes
    print("run files:", dict(outcomes))


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_stored_failures(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    assert outcome(tmp_path / "run.toml", data).endswith("Error"), "each of them is wrong in some way"

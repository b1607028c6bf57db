"""What is wrong in a run file, said so that it helps: the place, what was got, what was expected, and no traceback."""

import os
from pathlib import Path
from typing import Any

import pytest
from support import Expected, check_error, raises

import fleetfit as ff
from fleetfit.api.run import prepare
from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.config.toml import DEEPEST, read_toml
from fleetfit.errors import ConfigError, FleetFitError, RunError

SMALL = ["data.name=tiny:tiny_data", "model.name=tiny:tiny", "data.partition.clients=6", "rounds=1",
         "fleet.groups=[{budget=1.0}]"]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("engine.name = 1", Expected("[engine] name", '"local"', 1, key="engine.name")),
        ("engine = 1", Expected("[engine] name", '"local"', 1, key="engine.name")),
        ("method = 5", Expected("[method] name", '"scalefl"', 5, key="method.name")),
        ("model = 5", Expected("[model] name", '"cnn"', 5, key="model.name")),
        ("model = true", Expected("[model] name", '"cnn"', "True", key="model.name")),
        ("peft.name = ['a']", Expected("[peft] name", '"lora"', "['a']", key="peft.name")),
        ("data.name = 1979-05-27", Expected("[data] name", '"digits"', "datetime.date(1979", key="data.name")),
        ("attack.kind = 7", Expected("[attack] kind", '"sign_flip"', 7, key="attack.kind")),
        ("attack.kind = { name = 'noise' }", Expected("[attack] kind", "{'name': 'noise'}", key="attack.kind")),
        ("attack.kind = ['noise']", Expected("[attack] kind", "['noise']", key="attack.kind")),
        ("data.server.name = 3", Expected("[data] server.name", '"digits"', 3, key="data.server.name")),
        ("method.name = ''", Expected("[method] name", '"scalefl"', "''", key="method.name")),
        (
            "data.partition.cliens = 3",
            Expected('"cliens"', "kind, clients, seed, alpha, min_samples", '"clients"?', key="data.partition.cliens"),
        ),
        ("partition.cliens = 3", Expected("[data] partition", key="partition")),
        ("engine.device = ''", Expected('"cpu", "cuda" or "cuda:N"', '""', key="engine.device")),
        ("data.folder = ''", Expected("[data] folder", key="data.folder")),
        ("model.checkpoint = ''", Expected("[model] checkpoint", key="model.checkpoint")),
        ("fleet.levels = []", Expected('"cluster", "halving"', "[]", key="fleet.levels")),
        (
            "fleet.groups = [{ budget = 1.0, fraction = nan }]",
            Expected("[fleet] groups #1.fraction", "nan", key="fleet.groups.0.fraction"),
        ),
        ("fleet.availability.leave = nan", Expected("[fleet] availability.leave", key="fleet.availability.leave")),
        ("method = { name = 'depthfl', weight = nan }", Expected("[method] weight", "nan", key="method.weight")),
        ("method.temperature = inf", Expected("[method] temperature", "inf", key="method.temperature")),
        ("method.options.fedprox.mu = nan", Expected("[method] options.fedprox.mu", key="method.options.fedprox.mu")),
        (
            "cohort.selection = { name = 'loss', candidates = nan }",
            Expected("[cohort] selection.candidates", key="cohort.selection.candidates"),
        ),
        ("recorded.latencies = { zzyzx = [1.0] }", Expected("zzyzx", key="recorded.latencies.zzyzx")),
        ('name = "a\\u0000b"', Expected("name", 200, key="name")),
        ('init_from = "a\\u0000b"', Expected("init_from", "NUL", key="init_from")),
        ('fleet.levels = "a\\u0000b.toml"', Expected("[fleet] levels", "NUL", key="fleet.levels")),
        (f"init_from = '{'x' * 5000}'", Expected("xxxx", kind=RunError)),
        (
            "method.hooks.choose_channels = [1]",
            Expected("prefix, window, rolling, random", key="method.hooks.choose_channels"),
        ),
        ("local.lr = '" + "x" * 100_000 + "'", Expected("[local] lr", "'xxxxxxxx", key="local.lr")),
        ("x" * 5000 + " = 1", Expected("xxxx", "rounds", key="x" * 5000)),
        ('"" = 1', Expected("rounds", key="")),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_mistake_is_said_with_its_place(tmp_path: Path, text: str, expected: Expected) -> None:
    (tmp_path / "run.toml").write_text(text + "\n")
    file, keys = tmp_path / "run.toml", text.partition(" ")[0].partition(".")[0]
    small = [key for key in SMALL if not key.startswith(keys)]
    with raises(expected.kind or ConfigError, expected) as error:
        prepare(load_experiment(file, small), tmp_path / "out")
    assert len(str(error.value)) < (700 if expected.kind is None else 6000)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "mention"),
    [
        (b"a = " + b"[" * 5000, f"than {DEEPEST}"),
        (b"a = " + b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), f"than {DEEPEST}"),
        (b"a" + b".a" * 5000 + b" = 1", f"than {DEEPEST}"),
        (b"[a" + b".a" * 500 + b"]\nb = 1", f"than {DEEPEST}"),
        (b"seed = " + b"9" * 10_000, "64 bits"),
        (b"seed = " + b"9" * 30, "64 bits"),
        (b"local.max_steps = 0x" + b"f" * 17, "max_steps"),
        (b"rounds = 1\n\x00", "valid TOML"),
        (b"\xff\xfer\x00", "UTF-8"),
        (b"name = '\xed\xa0\x80'", "UTF-8"),
    ],
    ids=lambda v: v if isinstance(v, str) else v[:12].decode("latin-1"),
)
def test_a_file_that_no_settings_are_in_is_named(tmp_path: Path, data: bytes, mention: str) -> None:
    """As a run file, a budget file and a plan; and as a comparison."""
    bad = tmp_path / "bad.toml"
    bad.write_bytes(data)
    group = f"fleet.groups=[{{budget='{bad}'}}]"
    for make in (
        lambda: load_experiment(bad),
        lambda: ff.compare(bad, out=tmp_path / "out"),
        lambda: load_experiment({}, [group]),
        lambda: assemble(load_experiment({}, [*SMALL, f"fleet.levels={bad}"])),
    ):
        with raises(ConfigError, mention, "bad.toml", path=bad):
            make()


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfrounds = 3\n")
    assert load_experiment(tmp_path / "run.toml").rounds == 3


def test_pipes_folders_and_strange_paths_are_refused_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, mention in ((tmp_path / "pipe.toml", "named pipe"), (Path("/dev/zero"), "device"), (tmp_path, "folder")):
        with raises(ConfigError, path, mention, path=path):
            read_toml(path)
    for strange in (tmp_path / "loop", "~nobody-is-called-so/x.toml", "a\0b.toml", "x" * 5000):
        with pytest.raises(FleetFitError) as error:
            load_experiment(strange)
        check_error(error.value, repr(str(strange)[:20])[1:-1])


def test_tables_from_python_have_the_same_bounds() -> None:
    deep: dict[str, Any] = {}
    deep["a"] = deep
    with raises(ConfigError, DEEPEST):
        load_experiment({"data": deep})
    with raises(ConfigError, "seed", 64, key="seed"):
        load_experiment({"seed": 10**5000})
    for digits in (30, 9000):
        with raises(ConfigError, 64):
            load_experiment({}, ["seed=" + "9" * digits])


@pytest.mark.parametrize("text", ["rounds=1\nseed=3", "rounds=1\n[data]\nname='x'"])
def test_an_override_is_one_key(text: str) -> None:
    """What stands on further lines was dropped without a word."""
    with raises(ConfigError, "rounds", key="rounds"):
        load_experiment({}, [text])


def test_an_override_takes_quoted_keys_and_section_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own.py").write_text("from fleetfit.method import Method\ndef option(x=1):\n    return Method()\n")
    monkeypatch.chdir(tmp_path)
    experiment = load_experiment({}, ['method.options."own.py:option".x=3', "model=resnet20"])
    assert experiment.method.options == {f"{Path.cwd() / 'own.py'}:option": {"x": 3}}
    assert experiment.model.name == "resnet20"


@pytest.mark.parametrize("where", ["at import", "when it is called"])
def test_a_plug_in_that_exits_is_a_sentence(tmp_path: Path, where: str) -> None:
    """It used to end the command with code 0."""
    body = "sys.exit(0)\n" if where == "at import" else ""
    call = "" if where == "at import" else "    sys.exit(0)\n"
    (tmp_path / "own.py").write_text(f"import sys\n{body}def method():\n{call}    return None\n")
    with raises(ConfigError, "sys.exit(0)", "own.py:method"):
        assemble(load_experiment({}, [*SMALL, f"method.name={tmp_path / 'own.py'}:method"]))


def test_a_mistake_in_a_budget_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "pi.toml").write_text("budgt = 1.0\n")
    with raises(ConfigError, "pi.toml", "budgt", '"budget"', key="budgt", path=tmp_path / "pi.toml"):
        load_experiment({}, [f"fleet.groups=[{{budget='{tmp_path / 'pi.toml'}'}}]"])

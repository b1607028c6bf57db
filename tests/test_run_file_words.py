"""What is wrong in a run file, said so that it helps: the place, what was got, what was expected, and no traceback."""

import os
from pathlib import Path
from typing import Any

import pytest
from support import raises

import fleetfit as ff
from fleetfit.api.run import prepare
from fleetfit.config import assemble, load_experiment
from fleetfit.config.toml import DEEPEST, read_toml
from fleetfit.errors import ConfigError, FleetFitError

SMALL = ["data.name=tiny:tiny_data", "model.name=tiny:tiny", "data.partition.clients=6", "rounds=1",
         "fleet.groups=[{budget=1.0}]"]  # fmt: skip


def said(make: Any) -> str:
    with pytest.raises(FleetFitError) as caught:
        make()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.name = 1", '[engine] name: should be a name in quotes, such as "local", got 1.'),
        ("engine = 1", '[engine] name: should be a name in quotes, such as "local", got 1.'),
        ("method = 5", '[method] name: should be a name in quotes, such as "scalefl", got 5.'),
        ("model = 5", '[model] name: should be a name in quotes, such as "cnn", got 5.'),
        ("model = true", '[model] name: should be a name in quotes, such as "cnn", got True.'),
        ("peft.name = ['a']", "[peft] name: should be a name in quotes, such as \"lora\", got ['a']."),
        ("data.name = 1979-05-27", '[data] name: should be a name in quotes, such as "digits", got datetime.date(1979'),
        ("data.server.name = 3", '[data] server.name: should be a name in quotes, such as "cifar100", got 3.'),
        ("method.name = ''", "[method] name: should be a name in quotes, such as \"scalefl\", got ''."),
        ("data.partition.cliens = 3", 'has no "cliens"; it takes kind, clients, seed, alpha, minimum'),
        ("data.partition.cliens = 3", 'Did you mean "clients"?'),
        ("partition.cliens = 3", "partition: unknown key. Did you mean [data] partition?"),
        ("engine.device = ''", 'engine.device must be "cpu", "cuda" or "cuda:N", got "".'),
        ("data.folder = ''", "[data] folder: is empty; name a place, or leave it out."),
        ("model.checkpoint = ''", "[model] checkpoint: is empty; name a place, or leave it out."),
        ("fleet.levels = []", '[fleet] levels: should be "cluster", "halving", a list of at least one'),
        ("fleet.groups = [{ budget = 1.0, share = nan }]", "[fleet] groups #1.share: should be a finite number"),
        ("fleet.availability.leave = nan", "[fleet] availability.leave: should be"),
        ("method = { name = 'depthfl', share = nan }", "[method] share: should be a finite number, got nan."),
        ("method.temperature = inf", "[method] temperature: should be a finite number, got inf."),
        ("method.plus.fedprox.mu = nan", "[method] plus.fedprox.mu: should be a finite number, got nan."),
        ("cohort.choose = { name = 'loss', candidates = nan }", "[cohort] choose.candidates: should be a finite"),
        ("fleet.measured = { zzyzx = [1.0] }", "[fleet] measured zzyzx: unknown key;"),
        ("name = \"a\\u0000b\"", "name: at most 200 characters that can be printed"),
        ("start = \"a\\u0000b\"", "start: a path holds no NUL character"),
        ("fleet.levels = \"a\\u0000b.toml\"", "[fleet] levels: a path holds no NUL character"),
        (f"start = '{'x' * 5000}'", "is no run folder that can be read: the path is too long"),
        ("method.hooks.channels = [1]", "method.hooks.channels must be one of prefix, window, rolling, random, or"),
        ("local.lr = '" + "x" * 100_000 + "'", "[local] lr: should be a valid number, got 'xxxxxxxx"),
        ("x" * 5000 + " = 1", "unknown key."),
        ("\"\" = 1", "unknown key."),
    ],
)  # fmt: skip
def test_a_mistake_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text + "\n")
    file, keys = tmp_path / "run.toml", text.partition(" ")[0].partition(".")[0]
    small = [key for key in SMALL if not key.startswith(keys)]

    def wrong() -> None:
        prepare(load_experiment(file, small), tmp_path / "out")

    found = said(wrong)
    assert message in found
    assert len(found) < 700 or "path is too long" in found
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
        (b"local.max_steps = 0x" + b"f" * 17, "local.max_steps"),
        (b"rounds = 1\n\x00", "valid TOML"),
        (b"\xff\xfer\x00", "UTF-8"),
        (b"name = '\xed\xa0\x80'", "UTF-8"),
        (b"#" * ((4 << 20) + 1), "4 MB"),
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
    assert "pipe.toml cannot be read: it is a named pipe, not a file" in said(lambda: read_toml(tmp_path / "pipe.toml"))
    assert "/dev/zero cannot be read: it is a device, not a file" in said(lambda: read_toml("/dev/zero"))
    assert "is a folder" in said(lambda: read_toml(tmp_path))
    for strange in (tmp_path / "loop", "~nobody-is-called-so/x.toml", "a\0b.toml", "x" * 5000):
        assert repr(str(strange)[:20])[1:-1] in said(lambda strange=strange: load_experiment(strange))  # type: ignore[misc]


def test_tables_from_python_have_the_same_bounds() -> None:
    deep: dict[str, Any] = {}
    deep["a"] = deep
    assert "nested deeper than" in said(lambda: load_experiment({"data": deep}))
    assert "seed: a whole number has at most 64 bits." in said(lambda: load_experiment({"seed": 10**5000}))
    assert "at most 64 bits" in said(lambda: load_experiment({}, ["seed=" + "9" * 30]))
    assert "thousands of digits" in said(lambda: load_experiment({}, ["seed=" + "9" * 9000]))


@pytest.mark.parametrize("text", ["rounds=1\nseed=3", "rounds=1\n[data]\nname='x'"])
def test_an_override_is_one_key(text: str) -> None:
    """What stands on further lines was dropped without a word."""
    assert "rounds: should be a valid integer, got" in said(lambda: load_experiment({}, [text]))


def test_an_override_may_name_a_quoted_key_and_a_section_by_its_name() -> None:
    found = load_experiment({}, ['method.plus."own.py:option".x=3', "model=resnet20"])
    assert found.method.plus == {f"{Path.cwd() / 'own.py'}:option": {"x": 3}}
    assert found.model.name == "resnet20"


@pytest.mark.parametrize("where", ["at import", "when it is called"])
def test_a_plug_in_that_exits_is_a_sentence(tmp_path: Path, where: str) -> None:
    """It used to end the command with code 0."""
    body = "sys.exit(0)\n" if where == "at import" else ""
    call = "" if where == "at import" else "    sys.exit(0)\n"
    (tmp_path / "own.py").write_text(f"import sys\n{body}def method():\n{call}    return None\n")
    found = said(lambda: assemble(load_experiment({}, [*SMALL, f"method.name={tmp_path / 'own.py'}:method"])))
    assert "sys.exit(0)" in found and "own.py:method" in found


def test_a_mistake_in_a_budget_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "pi.toml").write_text("budgt = 1.0\n")
    with raises(ConfigError, "pi.toml", "budgt", '"budget"', key="budgt", path=tmp_path / "pi.toml"):
        load_experiment({}, [f"fleet.groups=[{{budget='{tmp_path / 'pi.toml'}'}}]"])

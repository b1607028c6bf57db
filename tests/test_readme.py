"""What README.md and docs/ show is run; what they list is compared with the code, so that neither can go stale."""

import importlib
import inspect
import json
import math
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from run_folders import settings
from support.engines import RecordingEngine
from support.pages import (
    GUIDE_PAGES,
    commands,
    exit_code,
    fenced,
    file_name,
    shell_lines,
    write_cameras,
    write_files,
    write_iris,
    write_photos,
)
from tiny import plain, tiny_federation, tiny_problem

import fleetfit as ff
from fleetfit import errors, names
from fleetfit.cli.main import make_app
from fleetfit.config import load_experiment
from fleetfit.config.dump import to_table
from fleetfit.config.schema import Experiment, GroupSection
from fleetfit.core import Federation, Simulation
from fleetfit.core.local import OPTIMIZERS, Constant, Cosine, Exponential, Step
from fleetfit.core.section import Section
from fleetfit.data.sets.digits import digits
from fleetfit.data.transform import Transform
from fleetfit.engines.local import local as local_engine
from fleetfit.hooks import HOOKS, build
from fleetfit.method import Update
from fleetfit.planner import Targets
from fleetfit.rounds import Round, Settings, run, run_round, start

ROOT = Path(__file__).parents[1]
README, START, PLUG_INS, WHICH, OWN_DEVICES = (
    (ROOT / name).read_text()
    for name in ("README.md", "docs/start.md", "docs/plug-ins.md", "docs/which-method.md", "docs/own-devices.md")
)
GUIDE = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in [*GUIDE_PAGES, "plug-ins"])
METHODS, ERRORS, OWN_MODEL, OWN_ARCHITECTURE, ADD_A_METHOD, SHIP = (
    (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("methods", "errors", "own-model", "own-architecture", "add-a-method", "ship")
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = ["--set", "rounds=1", "--set", "local.epochs=1", "--quiet"]
COMMENTED = re.compile(r"^# ([a-z_.]+) = (.+?)(?:\s+#.*)?$")


def example(name: str, markdown: str = GUIDE) -> str:
    return next(block for block in fenced(markdown, "toml") if file_name(block) == name)


def tables_of_markdown(markdown: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table whose first heading is this."""
    block = re.search(rf"^\| {re.escape(heading)} \|.*\n\|[-| ]+\|\n((?:\|.*\n)+)", markdown, re.MULTILINE)
    assert block, f"there is no table that begins with {heading}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block[1].splitlines()]


def code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Path:
    """A folder in which the files of the first page lie and its first run has been made."""
    folder = tmp_path_factory.mktemp("readme")
    write_files(START, folder)
    write_photos(folder)
    ff.run(load_experiment(folder / "first.toml", ["local.epochs=1"]), out=folder / "runs" / "first")
    return folder


# ---- what is shown works -------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "verbs"),
    [
        (START, {"plan", "run", "eval", "predict", "compare", "list", "calibrate", "export"}),
        (PLUG_INS, {"run", "check-model"}),
        (WHICH, {"compare"}),
        (OWN_DEVICES, {"run", "predict", "eval", "compare", "export"}),
    ],
    ids=["start", "plug-ins", "which-method", "own-devices"],
)
def test_the_commands_of_the_first_pages_work(tmp_path, monkeypatch, capsys, page, verbs):
    write_files(page, tmp_path)
    if page is START:
        write_photos(tmp_path)
    if page is OWN_DEVICES:
        write_cameras(tmp_path)
    monkeypatch.chdir(tmp_path)
    calls = commands(page)
    assert verbs <= {arguments[0] for arguments in calls}
    for arguments in calls:
        extra = SHORT if arguments[0] in ("run", "compare") else []
        extra = [*extra, "--set", "compare.grid.seed=[0]"] if arguments[0] == "compare" else extra
        assert exit_code([*arguments, *extra]) == 0, f"{' '.join(arguments)}: {capsys.readouterr().err}"
    if page is START:
        resumed = re.search(r"fleetfit (resume) (runs/first)", START)
        assert resumed and exit_code(list(resumed.groups())) == 0


def test_the_python_of_the_first_page_works(shown, monkeypatch, capsys):
    monkeypatch.chdir(shown)
    blocks = [block for block in fenced(START, "python") if not file_name(block)]
    assert blocks, "there is no Python to run"
    variables: dict = {}
    for block in blocks:
        exec(compile(block.replace("rounds=20", "rounds=1"), "start.md", "exec"), variables)
    assert set(variables["table"]["prediction"]) <= {0, 1} and len(variables["table"]) == 69
    assert (Path("curves.png").stat().st_size, Path("table-device/model.onnx").stat().st_size) > (0, 0)
    assert variables["logits"].shape == (1, 10)
    assert variables["again"].summary == variables["run"].summary
    assert variables["photos"].finished
    lines = capsys.readouterr().out.splitlines()
    name, label, probability = lines[-1].split()
    assert len(lines) == 6 and name.endswith(".jpg") and label in ("cat", "dog") and 0.5 <= float(probability) <= 1


def test_the_plan_on_the_first_page_is_what_plan_prints(shown, monkeypatch, capsys):
    monkeypatch.chdir(shown)
    monkeypatch.setenv("COLUMNS", "160")
    assert exit_code(["plan", "first.toml"]) == 0
    printed = [set(re.split(r"\s*[│┃]\s*", line)) for line in capsys.readouterr().out.splitlines()]
    for row in tables_of_markdown(START, "level"):
        assert any(set(row) <= line for line in printed), row


@pytest.mark.parametrize("page", [README, START], ids=["README", "start"])
def test_the_first_pages_define_local_and_global(page):
    text = " ".join(page.split())
    assert re.search(r"`local`(\*\*)?(:| is)", text) and re.search(r"`global`(\*\*)?(:| is)", text)


def test_the_readme_is_short_and_its_python_works(tmp_path, monkeypatch, capsys):
    """What it is, three steps, a picture, a sentence on the evidence, and where to go on."""
    monkeypatch.chdir(tmp_path)
    assert len(README.splitlines()) < 80
    first, second = fenced(README, "sh")
    assert first.split()[:2] == ["git", "clone"] and first.splitlines()[-1] == "make demo"
    write_photos(tmp_path)
    [own_images] = commands(f"```sh\n{second}```\n")
    assert exit_code([*own_images, *SHORT]) == 0
    capsys.readouterr()
    assert len(re.findall(r"^!\[", README, re.MULTILINE)) == 1
    [block] = fenced(README, "python")
    assert len([line for line in block.splitlines() if line and not line.startswith("#")]) <= 5
    write_files(OWN_MODEL, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "net", raising=False)
    variables: dict = {}
    exec(compile(block, "README.md", "exec"), variables)
    assert variables["run"].finished and isinstance(variables["small"], torch.nn.Module)
    assert len(capsys.readouterr().out.splitlines()) == 1


@pytest.mark.slow
def test_the_commands_of_the_guide_work(tmp_path, monkeypatch, capsys):
    write_files(GUIDE, tmp_path)
    write_files(START, tmp_path)
    write_iris(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert exit_code(["run", "first.toml", "--out", "runs/first", *SHORT]) == 0, (
        "the first page's run, which others watch"
    )
    one_each = ("compare.grid.seed=[0]", "compare.grid.data.partition.alpha=[1.0]", "compare.tune.local.lr=[0.1]",
                "compare.tune_rounds=1")  # fmt: skip
    few = [word for change in one_each for word in ("--set", change)]
    for arguments in commands(GUIDE):
        extra = [*SHORT, *few] if arguments[0] == "compare" else ["--yes"] * ("--clear-checkpoints" in arguments)
        assert exit_code([*arguments, *extra]) == 0, f"{' '.join(arguments)}: {capsys.readouterr().err}"
    assert "FedProx" in (tmp_path / "runs" / "compared" / "table.md").read_text()
    assert exit_code(["plan", "groups.toml"]) == 0


@pytest.mark.slow
def test_the_ship_page_works(tmp_path, monkeypatch, capsys):
    """Its commands in their order, its Python, and the loader on what it wrote."""
    pytest.importorskip("onnxruntime", reason="the extra export is not installed")
    write_files(SHIP, tmp_path)
    monkeypatch.chdir(tmp_path)
    verbs = []
    for arguments in commands(SHIP):
        if arguments[0] == "profile" or ("--executorch" in arguments and not find_spec("executorch")):
            continue
        extra = ["--set", "local.epochs=1", "--quiet"] if arguments[0] == "run" else []
        assert exit_code([*arguments, *extra]) == 0, f"{' '.join(arguments)}: {capsys.readouterr().err}"
        verbs.append(arguments[0])
    assert {"run", "predict", "calibrate", "export", "pictures"} <= set(verbs)
    for block in fenced(SHIP, "python"):
        if file_name(block):
            exec(compile(block, "ship.md", "exec"), {})
    command = [sys.executable, "device/run.py", "samples.npy", "--labels", "labels.npy", "--stop"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True)
    assert "accuracy" in done.stdout.splitlines()[-1] and len(done.stdout.splitlines()) == 359 + 2


# ---- a page that is followed from top to bottom --------------------------------------------------------------------


def steps(markdown: str) -> list[tuple[str, str]]:
    """Return language and body of every fenced block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE)


def normalize_output(text: str) -> str:
    """Return what a command prints without line breaks, and without what another machine rounds otherwise."""
    return re.sub(r"\d+e[-+]\d+", "#", " ".join(text.split()))


def parse_commands(block: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each command of a console block, and the stretches that it must print in this order."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, printed = part.partition("\n")
        stretches = [normalize_output(stretch) for stretch in re.split(r"^\.\.\.$", printed, flags=re.MULTILINE)]
        yield shlex.split(command)[1:], [stretch for stretch in stretches if stretch]


def fails(stretches: list[str]) -> bool:
    """Tell whether what a command prints is, or ends with, an error."""
    return re.search(r"(^| )fleetfit: ", " ".join(stretches)) is not None


def check_printed(text: str, stretches: list[str]) -> None:
    """Compare a text with the stretches that it must have, in this order."""
    at = 0
    for stretch in stretches:
        assert stretch in text[at:], f"the page has {stretch!r}, which is not printed: {text[at:]!r}"
        at = text.index(stretch, at) + len(stretch)


def follow(markdown: str, folder: Path, read: typing.Callable[[], typing.Any]) -> dict[str, typing.Any]:
    """Do what a page says, in a folder that is the working folder; return what its Python leaves.

    Args:
        markdown: The page.
        folder: Where its files go.
        read: Returns what was printed since the last call, as `.out` and `.err`.
    """
    variables: dict[str, typing.Any] = {}
    for language, body in steps(markdown):
        for name in [key for key, m in sys.modules.items() if str(getattr(m, "__file__", "")).startswith(str(folder))]:
            del sys.modules[name]  # as in a new process
        if language in ("python", "toml") and file_name(body):
            write_files(f"```{language}\n{body}```\n", folder)
        elif language == "python":
            read()
            exec(compile(body, "page", "exec"), variables)
        elif language == "text":
            parts = re.split(r"^\.\.\.$", body, flags=re.MULTILINE)
            check_printed(normalize_output(read().out), [normalize_output(part) for part in parts])
        elif language == "console":
            for arguments, stretches in parse_commands(body):
                assert exit_code(arguments) == (2 if fails(stretches) else 0), arguments
                printed = read()
                check_printed(normalize_output(printed.out + printed.err), stretches)
        else:
            assert language == "sh", f"a block of {language or 'no language'} cannot be run"
            for arguments in commands(f"```sh\n{body}```\n"):
                extra = SHORT if arguments[0] in ("run", "compare") else []
                assert exit_code([*arguments, *extra]) == 0, f"{' '.join(arguments)}: {read().err}"
    return variables


@pytest.mark.slow
def test_the_page_on_own_models_can_be_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as for a Python that is started there
    variables = follow(OWN_MODEL, tmp_path, capsys.readouterr)
    assert {part.shape for part in variables["logits"]} == {(359, 10)} and variables["net"].axes["inner"].size == 32
    workers = ff.load(tmp_path / "runs" / "workers")
    assert workers.experiment.engine.name == "processes" and (workers.folder / "derived.json").is_file()


@pytest.mark.slow
def test_the_page_on_own_architectures_can_be_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    variables = follow(OWN_ARCHITECTURE, tmp_path, capsys.readouterr)
    assert variables["first"].shape == (5, 10) and torch.equal(variables["first"], variables["logits"][0])
    with torch.no_grad():
        torch.testing.assert_close(variables["again"](variables["images"]), variables["logits"])


def test_the_page_on_own_models_uses_the_readmes_environment():
    """The only commands that are not run: they need a network."""
    _, first = steps(OWN_MODEL)[0]
    assert [line.split()[0] for line in first.splitlines()] == ["python3", ".", "pip", "mkdir", "cd"]
    assert "pip install -e " in START
    others = [line for kind, body in steps(OWN_MODEL)[1:] if kind == "sh" for line in shell_lines(body)]
    assert others and all(line.startswith("fleetfit ") for line in others)


@pytest.mark.slow
def test_the_page_on_callbacks_can_be_followed(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tensorboard", reason="it is an extra: fleetfit[tensorboard]")
    monkeypatch.chdir(tmp_path)
    variables = follow((ROOT / "docs" / "callbacks.md").read_text(), tmp_path, capsys.readouterr)
    assert variables["run"].finished and list((tmp_path / "runs" / "tracked" / "tensorboard").iterdir())


@pytest.mark.slow
def test_the_page_on_adding_a_method_can_be_followed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    follow(ADD_A_METHOD, tmp_path, capsys.readouterr)
    table = (tmp_path / "runs" / "compared" / "table.md").read_text()
    assert [row for row in ("FjORD", "FjORD with FedProx", "Federated Dropout") if f"| {row} |" not in table] == []


def test_the_method_on_the_page_is_that_in_the_repository():
    shown = {file_name(block): block.split("\n", 1)[1] for block in fenced(ADD_A_METHOD, "python")}
    source = (ROOT / "examples" / "a_method.py").read_text()
    assert shown["a_method.py"] == source
    assert len(source.splitlines()) < 100


def test_the_whole_method_on_the_page_is_the_package_s(tmp_path):
    write_files(ADD_A_METHOD, tmp_path)
    states = []
    for spec in ({"name": f"{tmp_path / 'drift.py'}:drift"}, {"name": "fedavg", "options": {"scaffold": {}}}):
        federation, simulation = tiny_federation(spec)
        *_, last = run(federation, local_engine(simulation), Settings(3, plain(lr=0.1)), start(federation))
        assert not last.report["failures"]
        states.append({**last.server.state, **{f"c of {n}": t for n, t in last.server.memory["control"].items()}})
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def train_with_hooks(hooks: dict[str, str]) -> Round:
    """Train for three rounds with some hooks set."""
    federation, simulation = tiny_federation({"name": "fedavg", "hooks": hooks})
    *_, last = run(federation, local_engine(simulation), Settings(3, plain(lr=0.2, epochs=2)), start(federation))
    assert not last.report["failures"]
    return last


def record_replies(federation: Federation, simulation: Simulation) -> list[typing.Any]:
    """Return the replies of a round."""
    engine = RecordingEngine(simulation)
    run_round(federation, engine, Settings(1, plain()), start(federation))
    return engine.replies


def test_the_smallest_example_of_each_hook_does_what_it_says(tmp_path):
    write_files(ADD_A_METHOD, tmp_path)
    named = {hook: f"{tmp_path / 'hooks.py'}:{hook}" for hook in HOOKS if hook != "attach"}  # a whole method has it
    plain = train_with_hooks({}).server
    same = set()
    for hook in named:
        after = train_with_hooks({hook: named[hook]}).server
        if plain.state.keys() == after.state.keys() and all(
            torch.equal(tensor, after.state[name]) for name, tensor in plain.state.items()
        ):
            same.add(hook)
    # no loss is beyond 10, all have samples, what these remember and note changes no weights; a run asks for levels
    assert same == {"make_aggregator", "filter_updates", "update_client_memory", "report", "annotate",
                    "update_server_memory", "make_levels"}  # fmt: skip
    assert train_with_hooks({"update_server_memory": named["update_server_memory"]}).server.memory == {"updates": 12}
    assert "classifier.fc.weight" in train_with_hooks({"adapt_model": named["adapt_model"]}).server.state
    method = build({"name": "fedavg", "hooks": named})
    targets = Targets((0.3, 0.6, 1.0), (0.25, 0.25, 0.25))
    assert [level.submodel.exits for level in method.make_levels(tiny_problem(), targets)] == [(3,)] * 3
    federation, simulation = tiny_federation({"name": "fedavg"})
    update = next(reply for reply in record_replies(federation, simulation) if isinstance(reply, Update))
    length = math.sqrt(sum(float((tensor**2).sum()) for tensor in update.state.values()))
    assert method.annotate(federation, start(federation), update)["length"] == pytest.approx(length)
    memory = None
    for taken_part in (1, 2):
        memory = method.update_client_memory(None, simulation.device(0, memory), None)
        assert memory == {"rounds": taken_part}


def test_the_work_of_drawn_levels_is_counted(tmp_path):
    """The smallest level has no smaller one to draw."""
    write_files(ADD_A_METHOD, tmp_path)
    works = []
    for loss in ({}, {"make_loss": f"{tmp_path / 'drawn.py'}:drawn"}):
        federation, simulation = tiny_federation({"name": "fedavg", "hooks": loss})
        works.append({reply.level: reply.multiply_adds for reply in record_replies(federation, simulation)})
    assert works[1][0] == works[0][0] and works[1][2] < works[0][2]


def test_a_page_that_says_something_else_is_seen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="printed"):
        follow("```console\n$ fleetfit list engines\nno such thing\n```\n", tmp_path, capsys.readouterr)
    with pytest.raises(AssertionError, match="nowhere"):
        follow("```sh\nfleetfit eval nowhere\n```\n", tmp_path, capsys.readouterr)
    follow("```console\n$ fleetfit list engines\n...\nprocesses\n...\n```\n", tmp_path, capsys.readouterr)


def test_what_check_model_may_say_is_in_the_code():
    source = normalize_output(" ".join(path.read_text() for path in (ROOT / "fleetfit").rglob("*.py")))
    joined = re.sub(r'" f?"', "", source)  # sentences go over several lines of code
    for page in (OWN_MODEL, OWN_ARCHITECTURE):
        rows = tables_of_markdown(page, "it says")
        assert len(rows) > 10
        assert not [row[0] for row in rows if code(row[0])[0] not in joined]


def test_the_page_on_adding_a_method_is_linked():
    assert "(add-a-method.md)" in GUIDE
    assert "(docs/add-a-method.md)" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_page_on_own_models_is_linked():
    assert "(docs/own-model.md)" in README and "(own-model.md)" in START
    assert "(own-model.md)" in GUIDE and "(own-architecture.md)" in OWN_MODEL and "(own-architecture.md)" in GUIDE


def test_a_command_that_does_not_work_is_seen(capsys):
    assert commands("```sh\nmake demo\nfleetfit run no-such-file.toml   # why\n```") == [["run", "no-such-file.toml"]]
    assert exit_code(["run", "no-such-file.toml"]) == 2


def test_a_resolved_configuration_gives_the_same_run(shown, tmp_path):
    before = ff.load(shown / "runs" / "first")
    after = ff.run(before.folder / "config.toml", out=tmp_path / "again")
    assert after.columns == before.columns, "the guide says: running config.toml again gives the same bits"


def test_every_verb_is_shown():
    app = make_app()
    groups = [app, *(g.typer_instance for g in app.registered_groups if not isinstance(g.name, str))]
    verbs = {c.name or c.callback.__name__ for group in groups for c in group.registered_commands if c.callback}
    assert {"run", "export"} <= verbs
    text = START + GUIDE + SHIP
    assert not [verb for verb in verbs if f"fleetfit {verb}" not in text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)\)", prose)
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


# ---- what is listed is all there is --------------------------------------------------------------------------------


def test_the_guide_states_every_default():
    stated = tomllib.loads(example("defaults.toml"))
    assert stated == to_table(load_experiment())


def commented_keys() -> Iterator[tuple[str, str]]:
    """Yield dotted key and value of each commented key of the block of defaults."""
    section = ""
    for line in example("defaults.toml").splitlines():
        header = re.match(r"(?:# )?\[([\w.]+)\]", line)
        section = f"{header[1]}." if header else section
        match = COMMENTED.match(line)
        if match:
            yield section + match[1], match[2]


@pytest.mark.parametrize(("key", "value"), list(commented_keys()), ids=lambda text: text)
def test_a_key_without_a_default_is_valid(key, value, tmp_path):
    if key == "data.transform":
        transform = Transform.fit(digits(), "digits", {})
        (tmp_path / "data.json").write_text(transform.to_files()["data.json"])
        value = json.dumps(str(tmp_path))
    section, _, name = key.partition(".")
    takes = (
        ["local.optimizer=adamw"]
        if section == "local" and name in {*OPTIMIZERS["adamw"]} - {*OPTIMIZERS["sgd"]}
        else ["attack.kind=sign_flip"]
        if section == "attack"
        else []
    )
    table = to_table(load_experiment(None, [*takes, f"{key}={value}"]))
    for part in key.split("."):
        table = table[part]
    stated = tomllib.loads(f"v = {value}")["v"]
    assert table | stated == table if isinstance(stated, dict) else table == stated  # a table's defaults are filled in


def test_the_guide_names_every_mode_of_tuning():
    rows = tables_of_markdown(GUIDE, "`peft.name`")
    assert [code(row[0])[0] for row in rows] == sorted(names.list_names("peft"), key=lambda n: (n != "full", n))


def fields(section: type[Section], where: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section and the sections in it."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from fields(kind, f"{where}{name}.")
        else:
            yield where + name


def test_the_guide_names_every_key():
    stated = to_table(load_experiment()) | {"compare": tomllib.loads(example("compare.toml"))["compare"]}
    commented = {key for key, _ in commented_keys()}

    def is_stated(key: str) -> bool:
        inner: typing.Any = stated
        for part in key.split("."):
            if part not in inner:
                return any(other == key or other.startswith(f"{key}.") for other in commented)
            inner = inner[part]
        return True

    keys = [key for key in fields(Experiment) if not key.startswith("recorded.")]  # which no user writes
    assert len(keys) > 30
    assert not [key for key in keys if not is_stated(key)]
    groups = tomllib.loads(example("groups.toml"))["fleet"]["groups"]
    assert set().union(*groups) == set(GroupSection.model_fields)


def test_the_guide_names_every_schedule():
    rows = [tomllib.loads(f"s = {code(row[0])[0]}")["s"] for row in tables_of_markdown(GUIDE, "`local.schedule`")]
    kinds = {kind.model_fields["kind"].annotation.__args__[0]: kind for kind in (Constant, Step, Cosine, Exponential)}
    assert {row["kind"]: set(row) for row in rows} == {name: set(k.model_fields) for name, k in kinds.items()}
    for row in rows:
        load_experiment(local={"schedule": row})


def test_the_guide_names_every_column(shown):
    columns = {
        *ff.load(shown / "runs" / "first").columns["static"],
        "backdoor",
        "backdoor_levels",
        "metrics",
        "personal",
    }
    assert {name for row in tables_of_markdown(GUIDE, "column") for name in code(row[0])} == columns


def test_the_guide_names_every_file_of_a_run_folder(shown, tmp_path):
    """Of a run that trains the whole model, of one that trains a part, and what only some runs have."""
    tuned = ff.run(settings("lora"), out=tmp_path / "tuned").folder
    paths = [*(shown / "runs" / "first").iterdir(), *tuned.iterdir()]
    there = {path.name + ("/" if path.is_dir() else "") for path in paths}
    listed = {name for row in tables_of_markdown(GUIDE, "file") for name in code(row[0])}
    of_some_runs = {"plots/", "secure.json", "callbacks.json", "derived.json", "tokenizer.json"}
    assert {name for name in there if not name.startswith(".")} | of_some_runs == listed


def test_the_pages_name_every_error_and_its_exit_code(capsys):
    classes = {
        name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, ff.FleetFitError)
    }
    rows = tables_of_markdown(ERRORS, "error")
    assert {code(row[0])[0] for row in rows} == classes - {"FleetFitError"}
    sentence = code(rows[0][2])[0]
    assert exit_code(["run", "--set", "local.lrr=1"]) == 2
    assert capsys.readouterr().err.strip() == f"fleetfit: {sentence}"
    assert [row[0] for row in tables_of_markdown(ERRORS, "exit code")] == ["0", "1", "2", "3", "130"]


@pytest.mark.parametrize("kind", ["methods", "options", "selection"])
def test_the_page_of_methods_has_each_with_its_keys_and_defaults(kind):
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^#|\Z)", METHODS, re.DOTALL | re.MULTILINE))
    assert {name for other in ("methods", "options", "selection") for name in names.list_names(other)} == set(parts)
    for name in names.list_names(kind):
        stated = tomllib.loads("\n".join(re.findall(r"^- `(\w+ = [^`]+)`", parts[name], re.MULTILINE)))
        defaults = {key: p.default for key, p in inspect.signature(names.resolve(kind, name)).parameters.items()}
        assert stated == {k: list(v) if isinstance(v, tuple) else v for k, v in defaults.items() if v is not None}, name
        assert all(f"\n- `{key}`: " in parts[name] for key, value in defaults.items() if value is None), name
        assert "Source: " in parts[name]


# ---- paper to code -------------------------------------------------------------------------------------------------

PAPERS = (ROOT / "docs" / "papers.md").read_text()


def functions_of_papers() -> list[tuple[str, str]]:
    """Return each function that the page names, and the file that it links to."""
    return re.findall(r"\[`(fleetfit[\w.]*:[\w.]+)`\]\(\.\./([\w/.]+)\)", PAPERS)


@pytest.mark.parametrize(("name", "path"), sorted(set(functions_of_papers())))
def test_each_function_of_the_papers_is_where_the_page_says(name, path):
    module, _, attribute = name.partition(":")
    target = importlib.import_module(module)
    for part in attribute.split("."):
        target = getattr(target, part)
    assert inspect.getdoc(target)
    defined = Path(inspect.getfile(inspect.unwrap(target)))
    assert path in {defined.relative_to(ROOT).as_posix(), f"{module.replace('.', '/')}/__init__.py"}


def test_each_test_that_the_page_of_papers_names_is_there():
    rows = [line for line in PAPERS.splitlines() if "](../fleetfit/" in line and line.startswith("|")]
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 40 and all(named), "each row names a test"
    there = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert not {name for tests in named for name in tests} - there
    assert len(functions_of_papers()) > 50


def test_every_equation_of_the_papers_is_on_the_page():
    parts = dict(re.findall(r"^## (\w+)[^\n]*\n(.*?)(?=^## |\Z)", PAPERS, re.DOTALL | re.MULTILINE))

    def numbers(paper, word):
        equations = set()
        for first, last in re.findall(rf"{word}s? (\d+)(?:(?: to| and) (\d+))?", parts[paper]):
            equations |= set(range(int(first), int(last or first) + 1))
        return equations

    assert numbers("ScaleFL", "Eq.") >= {1, 2, 3, 4, 5} and numbers("ScaleFL", "Algorithm") == {1, 2, 3, 4}
    assert numbers("ReeFL", "Eq") | numbers("ReeFL", r"Eqs?\.") >= set(range(1, 10))
    assert numbers("AdaptiveFL", "Algorithm") == {1, 2}

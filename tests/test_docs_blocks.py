"""Every block of code in README.md and docs/ is run by a test, or says above it why not.

A block that cannot run has `<!-- not run: why -->` on the line before it. What it names is still checked: a run file
against the schema (unless the reason begins with "no run file"), a command of `fleetfit` against the command line.
"""

import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from support.pages import (
    GUIDE_PAGES,
    exit_code,
    file_name,
    shell_lines,
    write_cameras,
    write_files,
    write_iris,
    write_photos,
)

import fleetfit as ff
from fleetfit.cli.main import make_app
from fleetfit.config import load_experiment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"(?:^<!-- not run: ([^\n]*?) -->\n)?^( *)```(\w*)\n(.*?)^\2```$", re.DOTALL | re.MULTILINE)

IN_ORDER = {"own-model", "own-architecture", "add-a-method", "callbacks"}
"""Pages that tests of test_readme.py follow block by block."""
WITH_COMMANDS = {"README", "start", "plug-ins", "which-method", "ship", "own-devices", *GUIDE_PAGES}
"""Pages whose commands tests of test_readme.py run, in order, with the files of the page."""
MEASURED = "[budget]\nparameters = 0.2\n"
"""A budget file, as a block names one that `fleetfit profile` writes."""
SHOWN = {"text", "csv", ""}
"""What is no code: output, trees, data."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, language and text, and why it is not run."""

    page: str
    language: str
    text: str
    why_not: str | None

    def __str__(self) -> str:
        return f"{self.page}-{file_name(self.text) or self.text.strip().splitlines()[0][:30]}"


def find_blocks(page: str, markdown: str) -> list[Block]:
    return [Block(page, language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE), why or None)
            for why, indent, language, text in FENCE.findall(markdown)]  # fmt: skip


BLOCKS = [block for path in PAGES for block in find_blocks(path.stem, path.read_text())]


def is_run_elsewhere(block: Block) -> bool:
    """Tell whether a test of test_readme.py runs a block: in order, as a command, or as a file that a command names."""
    if block.page in IN_ORDER:
        return True
    if block.page not in WITH_COMMANDS:
        return False
    name = file_name(block.text)
    commands = " ".join(b.text for b in BLOCKS if b.language == "sh" and b.page in WITH_COMMANDS)
    if block.language == "sh":
        return all(line.startswith(("fleetfit ", "make ")) for line in shell_lines(block.text))
    if block.language == "python" and not name:
        return block.page in ("README", "start")
    return name is not None and (name in commands or (block.page, block.language) == ("ship", "python"))


TOML = [b for b in BLOCKS if b.language == "toml" and not (b.why_not or "").startswith("no run file")]
HERE = [b for b in TOML if b.why_not is None and not is_run_elsewhere(b)]
PYTHON_HERE = [b for b in BLOCKS if b.language == "python" and b.why_not is None and not is_run_elsewhere(b)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    if block.why_not is not None:
        assert len(block.why_not.split()) > 2, "say why it is not run"
        assert block.language not in SHOWN, "this is no code"
    elif block.language not in SHOWN and block not in [*HERE, *PYTHON_HERE]:
        assert is_run_elsewhere(block), f"no test runs this block of {block.page}.md, and nothing above it says why"


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_line_of_code_fits_a_column_of_the_site(block: Block) -> None:
    """What a run printed, or what FleetFit writes, may be wider: the site wraps it."""
    if block.language not in {*SHOWN, "console"}:
        assert not [line for line in block.text.splitlines() if len(line) > 75]


@pytest.mark.parametrize("block", TOML, ids=str)
def test_a_run_file_is_valid(block: Block, tmp_path: Path) -> None:
    """Its keys and values; what its own functions do is for those who run it."""
    (tmp_path / "kitchen-pi.toml").write_text(MEASURED)
    write_iris(tmp_path)
    write_photos(tmp_path)
    if block.page == "own-devices":
        write_cameras(tmp_path)
    for kind in ("bark", "meow"):
        (tmp_path / "clips" / kind).mkdir(parents=True)
        (tmp_path / "clips" / kind / "0001.wav").touch()
    for file, name in re.findall(r'"([\w.]+\.py):(\w+)"', block.text):
        (tmp_path / file).write_text(f"def {name}(**settings):\n    raise NotImplementedError\n")
    (tmp_path / "run.toml").write_text(block.text)
    load_experiment(tmp_path / "run.toml")


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "python"], ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, f"{block.page}.md", "exec")


def known_commands() -> dict[str, set[str]]:
    """Return the options of each verb, by its words."""
    options: dict[str, set[str]] = {}

    def visit(command: Any, words: tuple[str, ...]) -> None:
        options[" ".join(words)] = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
        for word, inner in getattr(command, "commands", {}).items():
            visit(inner, (*words, word))

    visit(typer.main.get_command(make_app()), ())
    return options


def find_command_error(line: str, commands: dict[str, set[str]]) -> str | None:
    """Return what is wrong with a command of `fleetfit`, or None."""
    words = shlex.split(line, comments=True)[1:]
    verb = " ".join(words[:2]) if " ".join(words[:2]) in commands else words[0] if words else ""
    if verb not in commands:
        return f"there is no verb {verb}"
    general = commands[""] | {"--traceback", "--log"}
    odd = [w for w in words if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in commands[verb] | general]
    return f"{verb} has no {odd[0]}" if odd else None


def test_commands_have_verbs_and_options_that_exist() -> None:
    commands = known_commands()
    lines = [line for block in BLOCKS if block.language in ("sh", "bash", "console")
             for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()]  # fmt: skip
    typed = [line.removeprefix("$ ") for line in lines if re.match(r"(\$ )?fleetfit ", line)]
    assert len(typed) > 40
    checked = [line for line in typed if "typo" not in line]
    assert not {line: problem for line in checked if (problem := find_command_error(line, commands))}
    assert find_command_error("fleetfit nothing", commands) and find_command_error("fleetfit run --nothing", commands)


def test_commands_within_sentences_have_the_options_that_a_verb_needs() -> None:
    verbs = typer.main.get_command(make_app()).commands  # type: ignore[attr-defined]
    text = "\n".join(path.read_text() for path in PAGES)
    lines = [line for line in re.findall(r"`fleetfit ([^`]+)`", text) if re.match(r"[a-z][a-z-]* [^-\s]", line)]
    assert len(lines) > 10
    for line in lines:
        verb = line.split()[0]
        options = [one.opts[0] for one in verbs[verb].params if one.required and one.opts[0].startswith("--")]
        assert all(option in line.split() for option in options), line


def test_a_mark_belongs_to_the_block_below_it() -> None:
    page = "<!-- not run: needs a network -->\n```sh\nflwr\n```\n\n```sh\nfleetfit list data\n```\n"
    assert [block.why_not for block in find_blocks("p", page)] == ["needs a network", None]
    marks = sum(path.read_text().count("<!-- not run:") for path in PAGES)
    assert marks == sum(block.why_not is not None for block in BLOCKS), "a mark that stands before no block"


@pytest.mark.slow
@pytest.mark.parametrize("block", HERE, ids=str)
def test_a_run_file_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """For one round of one epoch; rows and settings as they stand, with one seed and one value each."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_files(
        "\n".join(f"```toml\n{b.text}```\n" for b in BLOCKS if b.page == block.page and b.language == "toml"), tmp_path
    )
    (tmp_path / "kitchen-pi.toml").write_text(MEASURED)
    write_iris(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text(block.text)
    if "compare" in tomllib.loads(block.text):
        one = ["rounds=1", "local.epochs=1", "compare.grid.seed=[0]", "compare.tune.local.lr=[0.1]"]
        section = load_experiment(path).compare
        few = [o for o in one if not o.startswith("compare.") or getattr(section, o.split(".")[1])]
        assert exit_code(["compare", str(path), "--quiet", *(w for o in few for w in ("--set", o))]) == 0, (
            capsys.readouterr()
        )
    else:
        try:
            run = ff.run(load_experiment(path, ["rounds=1", "local.epochs=1"]), out=tmp_path / "out")
        except ff.MissingExtra as error:
            pytest.skip(str(error))
        assert run.finished


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON_HERE, ids=str)
def test_python_runs(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    exec(compile(block.text, f"{block.page}.md", "exec"), {"__name__": "page"})

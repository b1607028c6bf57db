"""Find names, phrases and tests on wording that the rules of ADR 0021 refuse, and shorten the baselines of those left.

    python tests/words.py           # list what is new, and the lines of the baselines that can be removed
    python tests/words.py shrink    # remove those lines; nothing is ever added

`tests/baselines/names.txt` holds one name per line, `tests/baselines/prose.txt` a number of lines per file,
`tests/baselines/wording.txt` a number of assertions on wording per test file. They are edited by removing lines or
lowering numbers only. No test has a variable or a helper of a refused name.
"""

import ast
import functools
import re
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMES, PROSE = ROOT / "tests/baselines/names.txt", ROOT / "tests/baselines/prose.txt"
WORDING = ROOT / "tests/baselines/wording.txt"

WORDS = {
    kind: frozenset(words) for kind, words in tomllib.loads((ROOT / "tests/baselines/words.toml").read_text()).items()
}
PHRASE = re.compile(
    r"\b(nobody|somebody|whoever|everybody|anybody|is said|are said|is told|are told|tells? apart|what is there|"
    r"is no [a-z]|are no [a-z]|so many|mend(s|ed)?|in vain|by itself stands|stands? (there|here|in the)|lies? in|"
    r"goes on|go on with|that there (is|are)|"
    r"what (is|was|were|are) (in|on|to|of|there|sent|kept|trained|asked|known)|"
    r"\w*(optimi|normali|initiali|standardi|tokeni|quanti|regulari|minimi|maximi|summari|seriali|recogni|generali)"
    r"s(e|ing|ation)\w*|"
    r"\w*(colour|neighbour|behaviour|favour|centre|labell|modell|travell)\w*|defences?|licence|grey|(mis)?spelt|"
    r"analys(e|ing))\b",  # American, as in the libraries of this field
    re.IGNORECASE,
)

EXPECTING = ("raises", "Expected", "check_error")
SENTENCE = re.compile(r"\b[a-z]{2,}( [a-z]+){2} [a-z]{2,}")


def explain_refusal(name: str, folder: str = "") -> str:
    """Return why a public name is refused: "preposition", "x_of", "participle"; or an empty string."""
    words = name.strip("_").split("_")
    if (
        folder in WORDS["entry_points"]
        or words[0] in WORDS["verbs"]
        or (words[0] in WORDS["converters"] and len(words) > 1)
    ):
        return "x_of" if name.endswith("_of") and folder not in WORDS["entry_points"] else ""
    if words[0] in WORDS["prepositions"]:
        return "preposition"
    if name.endswith("_of"):
        return "x_of"
    if _is_participle(words[-1]) and not (len(words) > 1 and words[0] in {"is", "has", "mark", "get", "count"}):
        return "participle"
    return "participle" if _is_participle(words[0]) and len(words) > 1 and words[1] in WORDS["prepositions"] else ""


def _is_participle(word: str) -> bool:
    return (word.endswith("ed") and word not in WORDS["no_participles"]) or word in WORDS["participles"]


@functools.cache
def find_names(root: Path = ROOT) -> set[str]:
    """Return the refused public functions and classes of the package, as "fleetfit/core/tasks.py task_named"."""
    names = set[str]()
    for path in sorted((root / "fleetfit").rglob("*.py")):
        definitions = [
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        ]
        names |= {
            f"{path.relative_to(root).as_posix()} {name}"
            for name in definitions
            if not name.startswith("_") and explain_refusal(name, path.parent.name)
        }
    return names


@functools.cache
def find_phrases(root: Path = ROOT) -> dict[str, list[int]]:
    """Return the numbers of the lines with a refused phrase, by file: docstrings, comments, messages, pages."""
    lines = {}
    pages = [root / f"{name}.md" for name in ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING", "RELEASING", "SECURITY")]
    pages += [*sorted((root / "docs").glob("*.md")), *sorted((root / "docs" / "notebooks").glob("*.ipynb"))]
    for path in [*sorted((root / "fleetfit").rglob("*.py")), *pages]:
        place = path.relative_to(root).as_posix()
        rows = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if numbers := [number for number, row in enumerate(rows, 1) if PHRASE.search(row)]:
            lines[place] = numbers
    return lines


@functools.cache
def find_matches(root: Path = ROOT) -> dict[str, list[int]]:
    """Return the numbers of the lines on which a test asserts on the words of a sentence, by file.

    They are `match=` of `raises`, and texts with four plain words in a row in an assertion or in `raises`.
    """
    lines = {}
    for path in sorted((root / "tests").rglob("*.py")):
        numbers = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
            expects = name in EXPECTING
            if expects and any(keyword.arg == "match" for keyword in node.keywords):
                numbers.add(node.lineno)
            if expects or isinstance(node, ast.Assert):
                texts = ast.walk(node.test if isinstance(node, ast.Assert) else node)
                numbers |= {text.lineno for text in texts if SENTENCE.search(str(getattr(text, "value", "")))}
        if numbers:
            lines[path.relative_to(root).as_posix()] = sorted(numbers)
    return lines


@functools.cache
def find_locals(root: Path = ROOT) -> dict[str, list[int]]:
    """Return the numbers of the lines on which a test module binds a refused name, by file."""
    lines = {}
    for path in sorted((root / "tests").rglob("*.py")):
        numbers = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.FunctionDef(name=name):
                    if name.strip("_") in WORDS["locals"]:
                        numbers.add(node.lineno)
        if numbers:
            lines[path.relative_to(root).as_posix()] = sorted(numbers)
    return lines


def read_names() -> set[str]:
    """Return the names that the baseline still allows."""
    return set(NAMES.read_text(encoding="utf-8").splitlines())


def read_counts(path: Path = PROSE) -> dict[str, int]:
    """Return how many lines a baseline still allows, by file."""
    rows = [line.rsplit(maxsplit=1) for line in path.read_text(encoding="utf-8").splitlines()]
    return {place: int(count) for place, count in rows}


def shrink() -> None:
    """Remove names from the baseline that are gone, and lower its numbers to what is left."""
    NAMES.write_text("".join(f"{name}\n" for name in sorted(read_names() & find_names())), encoding="utf-8")
    for path, lines in ((PROSE, find_phrases()), (WORDING, find_matches())):
        left = Counter(read_counts(path)) & Counter({place: len(numbers) for place, numbers in lines.items()})
        path.write_text("".join(f"{place} {count}\n" for place, count in sorted(left.items())), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["shrink"]:
        shrink()
    names, allowed_names = find_names(), read_names()
    for name in sorted(names - allowed_names):
        print(f"new name: {name} ({explain_refusal(name.split()[1])})")
    for place, numbers in find_locals().items():
        print(f"new local: {place}, lines {numbers}")
    removable = len(allowed_names - names)
    for path, lines in ((PROSE, find_phrases()), (WORDING, find_matches())):
        allowed = read_counts(path)
        for place, numbers in lines.items():
            if len(numbers) > allowed.get(place, 0):
                print(f"new in {path.name}: {place}, {len(numbers)} for {allowed.get(place, 0)}, lines {numbers}")
        removable += sum(count > len(lines.get(place, [])) for place, count in allowed.items())
    print(f"{removable} lines of the baselines can be removed or lowered: python tests/words.py shrink")

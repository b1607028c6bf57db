"""A seeded sample of mutants of the core, each run against the quick tests of its module: `make mutants`.

Mutants are mutmut's (its operators, which are pinned with everything else); what runs them is here, because mutmut has
no sample, copies no data files that tests read, and does not change what stands outside of functions. Left out: the
words of messages (texts with a space), which are for people, `__all__`, and `strict=` of zip, a guard against mistakes
in the code itself.

Each mutant gets the whole tree in a folder of its own, so that processes which a test starts see it too, and a forked
process that has PyTorch imported already. The tests of its module run there, the likeliest first, until one fails.
A mutant without a failure survives, and is shown with its line. Survivors that change nothing that a test could see
stand in `accepted.toml`, each with the reason; they count as survivors like all others. The command fails where another
one survives, or where less than 95% are killed.

    .venv/bin/python tests/mutants/mutants.py [--sample 500] [--seed 0] [--workers 2] [--only layout]

Results are kept in `runs/mutants/`: a run that was stopped (Ctrl-C shows what is known) goes on where it was, and after
a change only what it touched runs again, and what a test noticed that is called otherwise now. The sample keeps most of
its mutants when the code changes elsewhere.
"""

import argparse
import ast
import contextlib
import functools
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = ROOT / "runs" / "mutants"
COPIED = ("fleetfit", "tests", "benchmarks", "docs", "examples", "experiments", "pyproject.toml", "README.md")

TESTS: Mapping[str, Sequence[str]] = {
    "aggregate.py": ("test_aggregate", "test_rounds", "test_plain_examples", "golden"),
    "evaluation": ("test_evaluation", "test_rounds", "golden", "test_attacks"),
    "anatomy": ("test_layout", "test_arrange", "test_model_mistakes", "test_wrong_layouts", "test_check_model",
                "test_submodel", "properties/test_product_properties", "test_reefl"),
    "layout.py": ("test_layout", "test_submodel", "test_wrong_layouts", "golden"),
    "hooks": ("test_method_spec", "test_methods", "test_rounds", "test_filter_updates", "test_docs_generated",
              "golden"),
    "methods": ("test_methods", "test_reductions", "test_selection", "golden", "test_used_keys"),
    "options": ("test_server_options", "test_methods", "test_lora_product", "test_deadlines", "golden"),
    "rounds": ("test_rounds", "test_filter_updates", "test_availability", "test_standing", "golden"),
    "submodel": ("test_submodel", "test_aggregate", "test_rounds", "golden"),
    "training": ("test_train", "test_limits", "test_clock", "test_deadlines", "test_start",
                 "test_evaluation", "golden"),
    "validation.py": ("test_validation", "test_rounds", "test_evaluation", "test_filter_updates", "test_compression",
                      "test_secure_runs"),
}  # fmt: skip
"""The tests of each part of `fleetfit/`; a test file that has the name of the mutated module goes first."""

MORE: Mapping[str, Sequence[str]] = {
    "hooks/losses.py": (
        "test_losses",
        "test_methods",
        "test_depthfl",
        "test_reefl",
        "golden",
    ),
    "rounds/links.py": (
        "test_links",
        "test_rounds",
        "test_availability",
        "test_deadlines",
        "golden",
    ),
    "rounds/report.py": (
        "test_rounds",
        "test_filter_updates",
        "test_standing",
        "test_attacks",
        "test_deadlines",
        "test_clock",
        "test_availability",
        "golden",
    ),
    "rounds/loop.py": (
        "test_rounds",
        "test_standing",
        "test_availability",
        "test_nothing_learned",
        "golden",
    ),
    "rounds/round.py": (
        "test_rounds",
        "test_filter_updates",
        "test_validation",
        "test_availability",
        "test_standing",
        "test_deadlines",
        "test_attacks",
        "test_private_sums",
        "test_secure_runs",
        "golden",
    ),
    "rounds/restore.py": ("test_state_checks", "test_checkpoints", "test_class_prior"),
    "rounds/rollback.py": (
        "test_standing",
        "test_rounds",
        "test_filter_updates",
        "test_state_checks",
        "golden",
    ),
    "submodel/strips.py": (
        "test_strips",
        "test_aggregate",
        "golden",
    ),
    "submodel/submodel.py": (
        "test_submodel",
        "properties/test_submodel_properties",
        "test_validation",
        "test_rounds",
        "golden",
    ),
    "methods/_pool.py": ("test_pool", "test_adaptivefl"),
    "methods/adaptivefl.py": ("test_adaptivefl",),
    "methods/feddf.py": ("test_feddf",),
    "methods/inclusivefl.py": ("test_inclusivefl",),
    "methods/decoupled.py": ("test_adaptivefl",),
    "methods/heterofl.py": ("test_methods", "test_tasks"),
    "methods/nefl.py": ("test_nefl",),
    "options/_order_statistics.py": ("test_robust",),
    "options/feddistill.py": ("test_extra_tensors",),
    "options/feddyn.py": ("test_server_options", "test_reefl"),
    "options/fednova.py": ("test_extra_tensors",),
    "options/scaffold.py": ("test_extra_tensors",),
    "options/in_time.py": ("test_deadlines", "test_server_options"),
    "options/krum.py": ("test_robust",),
    "options/outliers.py": ("test_robust",),
    "options/trimmed_mean.py": ("test_robust",),
    "aggregate.py": ("test_aggregate", "test_strips", "test_buffers"),
    "evaluation/columns.py": ("test_evaluation", "test_own_metrics", "test_attacks"),
    "training/scoring.py": ("test_one_pass", "test_own_metrics", "test_tasks"),
    "training/features.py": ("test_features",),
    "training/frozen.py": ("test_features",),
    "training/row_store.py": ("test_features",),
    "training/runtime.py": ("test_speed", "test_train"),
    "training/shared_pass.py": ("test_one_pass",),
    "training/local_model.py": ("test_peft", "test_train"),
    "training/start.py": ("test_start", "test_peft"),
    "anatomy/architecture.py": ("test_layout", "test_reefl", "test_peft"),
    "anatomy/placement.py": ("test_own_tensors",),
    "hooks/build.py": ("test_method_spec", "test_used_keys"),
    "training/job.py": (
        "test_compression",
        "test_train",
        "test_limits",
        "test_deadlines",
        "test_first_step",
        "test_one_pass",
    ),
}

LEAST = 0.95  # of the mutants are to be killed; what is accepted counts as survived
LIMIT_S = 300  # of processor time, a multiple of what the slowest list of tests takes; three times that by the clock
QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning")  # what is preloaded is not rewritten


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        module: The file, below `fleetfit/`.
        line: Where it is, from 1.
        was: The lines before, without the space around them.
        becomes: The lines after.
        code: The whole file after.
        key: A hash that says which one it is.
    """

    module: str
    line: int
    was: str
    becomes: str
    code: str = field(repr=False)
    key: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "killed" by a test, "slow" (stopped at the limit, as good as killed) or "survived"."""

    key: str
    module: str
    line: int
    was: str
    becomes: str
    end: str
    by: str
    seconds: float
    tests: str  # a hash of what ran


def modules() -> list[str]:
    """Return the files of the core, in order."""
    top = ROOT / "fleetfit"
    paths = []
    for part in TESTS:
        place = top / part
        paths += [place] if place.is_file() else sorted(place.glob("*.py"))
    return [str(path.relative_to(top)) for path in paths]


def place_of(name: str) -> Path:
    """Return the test file that the tables mean."""
    return ROOT / "tests" / ("golden/test_golden.py" if name == "golden" else f"{name}.py")


def tests_of(module: str) -> list[str]:
    """Return the test files of a module, the likeliest to notice first, each once."""
    stem = Path(module).stem.strip("_")
    names = [*MORE.get(module, ()), f"test_{stem}", *TESTS[module.split("/")[0]]]
    return list(dict.fromkeys(str(p.relative_to(ROOT)) for p in map(place_of, names) if p.is_file()))


# ---- which mutants there are ---------------------------------------------------------------------------------------


def mutants_of(module: str, seed: int) -> Iterator[tuple[str, str, object, object, object]]:
    """Yield all mutants of a file: rank in the sample's order, module, and what `written` needs."""
    import libcst as cst
    from libcst.metadata import MetadataWrapper, PositionProvider
    from mutmut.mutation.file_mutation import MutationVisitor
    from mutmut.mutation.mutators import mutation_operators
    from mutmut.mutation.pragma_handling import IgnoredCode

    source = (ROOT / "fleetfit" / module).read_text()
    exported = lines_of_all(source)
    wrapper = MetadataWrapper(cst.parse_module(source))
    visitor = MutationVisitor(mutation_operators, IgnoredCode(set(), set(), set()))
    tree = wrapper.visit(visitor)
    places, counts, functions = wrapper.resolve(PositionProvider), {}, {}
    for mutation in visitor.mutations:
        before, after = mutation.original_node, mutation.mutated_node
        if isinstance(before, cst.SimpleString) and (" " in before.value or before.value.isupper()):
            continue
        text, line = tree.code_for_node(before), places[before].start.line
        if line in exported:
            continue
        outer = mutation.contained_by_top_level_function
        if outer not in functions:
            functions[outer] = "" if outer is None else outer.name.value if hasattr(outer, "name") else "class body"
        inside = functions[outer]
        what = (module, inside, text, tree.code_for_node(after))
        counts[what] = counts.get(what, 0) + 1  # the same change at several places of one function
        rank = hashlib.sha256(json.dumps([seed, *what, counts[what]]).encode()).hexdigest()
        yield rank, module, (tree, line), before, after


def lines_of_all(source: str) -> set[int]:
    """Return the lines on which `__all__` stands."""
    rows = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    named = [node for node in rows if ast.unparse(node.targets[0]) == "__all__"]
    return {line for node in named for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def _without_strict(code: str) -> str:
    return re.sub(r",\s*\)", ")", re.sub(r",?\s*strict=\w+", "", code))


def written(rank: str, module: str, place: tuple, before: object, after: object) -> Mutant | None:
    """Return a mutant with its code; None where it is no Python, or changes nothing of interest."""
    tree, _ = place
    code = tree.deep_replace(before, after).code
    try:
        compile(code, module, "exec")
    except (SyntaxError, ValueError):
        return None
    old, new = tree.code.splitlines(), code.splitlines()
    head = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    tail = next((i for i, (a, b) in enumerate(zip(old[::-1], new[::-1], strict=False)) if a != b), 0)
    tail = min(tail, len(old) - head, len(new) - head)
    was, becomes = ("\n".join(s.strip() for s in some[head : len(some) - tail]) for some in (old, new))
    if _without_strict(was) == _without_strict(becomes):
        return None
    key = hashlib.sha256(f"{module}\0{rank}\0{code}".encode()).hexdigest()[:16]
    return Mutant(module, head + 1, was, becomes, code, key)


def sample(n: int, seed: int, only: str) -> tuple[list[Mutant], int]:
    """Draw n mutants; return them in the order of the modules, and how many there are in all."""
    every = [one for module in modules() if module.startswith(only) for one in mutants_of(module, seed)]
    chosen: list[Mutant] = []
    for one in sorted(every, key=lambda one: one[0]):
        if len(chosen) == n:
            break
        text = written(*one)
        if text is not None:
            chosen.append(text)
    return chosen, len(every)


# ---- running one ---------------------------------------------------------------------------------------------------


def preload() -> None:
    """Import what all tests need, and nothing of FleetFit, so that each forked process has it."""
    os.environ.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    import hypothesis
    import numpy  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import safetensors.torch  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch
    import torch._dynamo  # late imports of PyTorch itself
    import typer  # noqa: F401

    torch.set_num_threads(1)
    hypothesis.settings.register_profile("mutants", deadline=None, derandomize=True, database=None)
    hypothesis.settings.load_profile("mutants")


def forked(tree: Path, tests: Sequence[str], log: Path, cpu_s: float, first: bool = True) -> int:
    """Start the tests in a copy of the tree, until the `first` fails, in a process of their own; return its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for fd in (1, 2):
            os.dup2(out, fd)
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 5))
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT), str(HERE)))]
        sys.dont_write_bytecode = True
        import pytest

        limits = ["-x"] if first else []
        own = f"--basetemp={log.with_suffix('')}"  # pytest's usual place is tidied by whoever else runs it
        status = pytest.main([*limits, "-q", "--tb=line", "-p", "no:cacheprovider", own, *QUIET, *tests])
    except BaseException as error:
        print("driver:", repr(error))
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def ended(pid: int, until: float) -> int | None:
    """Return how a process ended, or None while it runs; at the limit of wall time, end it and its children."""
    child, status = os.waitpid(pid, os.WNOHANG)
    if not child and time.monotonic() > until:
        os.killpg(pid, signal.SIGKILL)
        child, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if child else None


def verdict(code: int, log: Path) -> tuple[str, str]:
    """Return what became of the mutant, and the test that says so."""
    lines = log.read_text(errors="replace").splitlines()
    if code < 0:
        return "slow", f"signal {-code}"
    if code == 0:
        return "survived", ""
    by = next((line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))), "")
    if code in (1, 2, 3) or by or any("ImportError" in line for line in lines):
        return "killed", by or (lines[-1] if lines else "")
    raise RuntimeError(f"pytest ended with {code}:\n" + "\n".join(lines[-15:]))


class Slot:
    """One copy of the tree, and what runs in it."""

    def __init__(self, base: Path, number: int) -> None:
        self.tree, self.log = base / f"tree{number}", base / f"log{number}.txt"
        shutil.rmtree(self.tree, ignore_errors=True)
        for name in COPIED:
            place = ROOT / name
            if place.is_dir():
                shutil.copytree(place, self.tree / name, ignore=shutil.ignore_patterns("runs", ".hypothesis"))
            else:
                shutil.copy2(place, self.tree / name)
        self.mutant: Mutant | None = None

    def start(self, mutant: Mutant) -> None:
        self.mutant, self.began = mutant, time.monotonic()
        place = self.tree / "fleetfit" / mutant.module
        self.original = place.read_text()
        place.write_text(mutant.code)
        self._forget(mutant.module)
        self.pid = forked(self.tree, tests_of(mutant.module), self.log, LIMIT_S)
        self.until = self.began + 3 * LIMIT_S

    def poll(self) -> Outcome | None:
        assert self.mutant is not None
        code = ended(self.pid, self.until)
        if code is None:
            return None
        m, (end, by) = self.mutant, verdict(code, self.log)
        (self.tree / "fleetfit" / m.module).write_text(self.original)
        self._forget(m.module)
        self.mutant, took = None, round(time.monotonic() - self.began, 1)
        return Outcome(m.key, m.module, m.line, m.was, m.becomes, end, by, took, hashed(m.module))

    def stop(self) -> None:
        """End what runs, and put the module back."""
        if self.mutant is None:
            return
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # it has ended, and in an odd way
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        (self.tree / "fleetfit" / self.mutant.module).write_text(self.original)
        self._forget(self.mutant.module)
        self.mutant = None

    def _forget(self, module: str) -> None:
        path = self.tree / "fleetfit" / module
        for old in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            old.unlink()


@functools.cache
def _bytes(name: str) -> bytes:
    return (ROOT / name).read_bytes()  # as they were at the start


def hashed(module: str) -> str:
    """Return a hash of the tests of a module; a survivor runs again when they change."""
    texts = [_bytes(name) for name in tests_of(module)]
    return hashlib.sha256(b"\0".join(texts)).hexdigest()[:12]


def unchanged(slot: Slot, tests: Sequence[str]) -> tuple[int, list[str]]:
    """Run tests without a change, all of them; return how pytest ended and what it printed."""
    pid, code = forked(slot.tree, tests, slot.log, 3600, first=False), None
    while code is None:
        time.sleep(0.05)
        code = ended(pid, time.monotonic() + 3600)
    return code, slot.log.read_text(errors="replace").splitlines()


def find_lost(slot: Slot, tests: Sequence[str]) -> set[str]:
    """Return which of these tests are not there any more: of what they noticed nobody can say whether it is noticed."""
    files = sorted({name for test in tests if (slot.tree / (name := test.partition("::")[0])).is_file()})
    _, there = unchanged(slot, ["--collect-only", *files]) if files else (0, [])
    return set(tests).difference(there)


def doubted(slot: Slot, tests: Sequence[str]) -> list[str]:
    """Run the tests that failed with some mutant once without a change, and return those which fail then too."""
    code, lines = unchanged(slot, tests)
    if code not in (0, 1):
        sys.exit("the tests that failed with mutants do not run without one:\n" + "\n".join(lines[-30:]))
    return [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]


# ---- the command ---------------------------------------------------------------------------------------------------


def read_outcomes(file: Path, mutants: Sequence[Mutant]) -> dict[str, Outcome]:
    """Return the results of before that still hold."""
    if not file.exists():
        return {}
    old = [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]
    by_key = {m.key: m for m in mutants}
    stored = {o.key: o for o in old if o.key in by_key}
    return {k: o for k, o in stored.items() if o.end != "survived" or accepted(o) or o.tests == hashed(o.module)}


def accepted(outcome: Outcome) -> str | None:
    """Return why a survivor may survive, if somebody has said so."""
    rows = tomllib.loads((HERE / "accepted.toml").read_text()).get("mutant", [])
    same = [r for r in rows if (r["module"], r["was"], r["becomes"]) == (outcome.module, outcome.was, outcome.becomes)]
    return same[0]["why"] if same else None


def outcomes(slots: Sequence[Slot], waiting: Sequence[Mutant]) -> Iterator[Outcome]:
    """Run mutants side by side, one in each slot, and yield what became of them."""
    order = iter(waiting)
    while True:
        for slot in slots:
            if slot.mutant is None and (following := next(order, None)) is not None:
                slot.start(following)
        busy = [slot for slot in slots if slot.mutant is not None]
        if not busy:
            return
        for slot in busy:
            if (outcome := slot.poll()) is not None:
                yield outcome
        time.sleep(0.02)


def test_of(outcome: Outcome) -> str:
    """Return the test that noticed a mutant."""
    return outcome.by.split(" - ")[0]


def noticing(results: Mapping[str, Outcome]) -> list[str]:
    """Return the tests that noticed something, each once."""
    return sorted({test_of(outcome) for outcome in results.values() if "::" in outcome.by})


def run(mutants: Sequence[Mutant], file: Path, workers: int) -> dict[str, Outcome]:
    """Run what has no result yet, and return all results."""
    preload()
    slots = [Slot(KEPT, i) for i in range(workers)]
    results = read_outcomes(file, mutants)
    lost = find_lost(slots[0], noticing(results))
    results = {key: outcome for key, outcome in results.items() if test_of(outcome) not in lost}
    waiting = [m for m in mutants if m.key not in results]
    print(f"{len(results)} results are known, {len(waiting)} mutants to run on {workers} processes", flush=True)
    try:
        for done in outcomes(slots, waiting):
            results[done.key] = done
            with file.open("a") as out:
                out.write(json.dumps(asdict(done)) + "\n")
            mark = f"{len(results):4}/{len(mutants)} {done.end:8} {done.seconds:6.1f} s"
            print(f"{mark}  {done.module}:{done.line} {done.by[:70]}", flush=True)
    except KeyboardInterrupt:  # they are in the order of the draw: the first ones are a sample, too
        print("stopped; the results so far:", flush=True)
    finally:
        for slot in slots:
            slot.stop()
    noticed = noticing(results)
    print(f"running the {len(noticed)} tests that noticed something once without a change", flush=True)
    if wrong := doubted(slots[0], noticed):
        sys.exit("these fail without any change, so that nothing is known of what they noticed:\n" + "\n".join(wrong))
    return results


def main() -> int:
    """Draw, run, and print what survived; 1 where too much did, or something that is not accepted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", default="", help="modules whose path below fleetfit/ begins so")
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    mutants, every = sample(options.sample, options.seed, options.only)
    print(f"{len(mutants)} of {every} mutants of {options.only or 'the core'}, seed {options.seed}")
    results = run(mutants, KEPT / f"{options.seed}.jsonl", options.workers)
    survivors = sorted((o for o in results.values() if o.end == "survived"), key=lambda o: (o.module, o.line))
    unknown = [o for o in survivors if accepted(o) is None]
    for o in survivors:
        why = accepted(o)
        print(f"\nsurvived{'' if why is None else ' (accepted: ' + why + ')'}: fleetfit/{o.module}:{o.line}")
        print("\n".join([f"  - {s}" for s in o.was.splitlines()] + [f"  + {s}" for s in o.becomes.splitlines()]))
    killed = len(results) - len(survivors)
    share = killed / max(len(results), 1)
    print(f"\n{killed} of {len(results)} mutants killed ({share:.1%}, at least {LEAST:.0%} wanted); {len(survivors)} "
          f"survived: {len(survivors) - len(unknown)} accepted, {len(unknown)} others")  # fmt: skip
    return 1 if unknown or share < LEAST else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # a second Ctrl-C: what ran is on disk
        sys.exit(130)

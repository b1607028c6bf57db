"""What a run has imported by its first training steps: PyTorch, and nothing that takes long and is needed later."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = (
    "torch._dynamo", "torch._inductor", "sympy", "sklearn", "scipy", "pandas", "matplotlib", "pyarrow", "datasets",
    "soundfile", "tokenizers", "transformers", "tensorboard", "wandb", "mlflow", "IPython", "optuna",
    "fleetfit.api.comparison",
    "fleetfit.api.profiling", "fleetfit.data.files.table", "fleetfit.inference.export", "fleetfit.report.figures",
    "fleetfit.report.page",
)  # fmt: skip
KEYS = ("rounds=1", "local.epochs=1", "evaluate.every=0", "data.partition.clients=4", "evaluate.batch_norm=['static']")
SMALL = [word for key in KEYS for word in ("--set", key)]
HOOK = f"""
import sys
from fleetfit.method import Method

def said():
    def remember(job, device, result):
        with open({{file!r}}, "a") as file:
            file.write(str([name for name in {HEAVY} if name in sys.modules]) + "\\n")
        return None
    return Method(update_client_memory=remember)
"""


def fleetfit(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run the command line in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "fleetfit", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_a_run_imports_only_what_it_needs(engine: str, tmp_path: Path) -> None:
    """A client's job has begun and ended, in this process and in a worker; digits, the small CNN and SGD."""
    seen, hook = tmp_path / "seen.txt", tmp_path / "hook.py"
    hook.write_text(HOOK.format(file=str(seen)))
    arguments = ["--set", f"method.name={hook}:said", "--set", f"engine.name={engine}"]
    arguments += ["--set", "engine.workers=1"] if engine == "processes" else []
    fleetfit("run", "--quiet", "--out", str(tmp_path / "run"), *SMALL, *arguments)
    modules = seen.read_text().splitlines()
    assert modules and set(modules) == {"[]"}


@pytest.mark.parametrize("first", ["", "import torch, gc; gc.disable(); "])
def test_pytorch_is_imported_without_full_collections(first: str) -> None:
    """Its objects are frozen, unless the caller had imported it; the collector is on or off as before."""
    code = "import gc, fleetfit.api; print(gc.get_stats()[2]['collections'], gc.get_freeze_count(), gc.isenabled())"
    done = subprocess.run([sys.executable, "-c", first + code], capture_output=True, text=True, check=True)
    collections, frozen, is_enabled = done.stdout.split()
    if "torch" in first:
        assert frozen == "0"
    else:
        assert collections == "0" and int(frozen) > 50_000
    assert is_enabled == str("disable" not in first)


def test_the_result_is_printed_before_anything_is_drawn(tmp_path: Path) -> None:
    """What imports matplotlib first finds both tables on stdout; the plots are there at the end."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "run"
    program = (
        "import sys\n"
        "class Sees:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'matplotlib.figure':\n"
        "            print('DRAWING', flush=True)\n"
        "sys.meta_path.insert(0, Sees())\n"
        "from fleetfit.cli import main\n"
        "main(sys.argv[1:])"
    )
    words = ["run", "--out", str(out), *SMALL]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("DRAWING") == 1
    before, behind = done.stdout.split("DRAWING")
    assert "multiply-adds" in before and "global accuracy %" in before
    assert f"Plots: {out}/plots" in behind and list((out / "plots").iterdir()) and (out / "summary.json").is_file()

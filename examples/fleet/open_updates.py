"""Whether a server holds a single client's update: what clients send in the first round, and a search for it.

Training is deterministic, so what each node will send is known beforehand, by a simulation of the same run. Of each
client a few bytes are looked for, as they are in an update that travels in the open (its tensors) and in one that is
quantized but not masked (whole numbers).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fleetfit.config import load_experiment
from fleetfit.config.assemble.run import assemble
from fleetfit.core import Failure, Job, Update
from fleetfit.engines.secure import BlockLayout, format_submodel
from fleetfit.privacy import Randomness
from fleetfit.rounds import run_round, start
from fleetfit.secure import Quantizer
from fleetfit.submodel import concat_state

WORDS = 8
"""Numbers of a piece that is looked for."""
WITHOUT_MASKS = """
import fleetfit.secure.keys

fleetfit.secure.keys.add_mask = lambda words, key, sign: None
"""
"""As `sitecustomize.py` on a process's PYTHONPATH: its secure rounds have no masks."""


class _Watched:
    """An engine that keeps what comes back."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.replies: list[tuple[Job, Update | Failure]] = []

    def run(self, jobs: Iterator[Job]) -> Iterator[Update | Failure]:
        """Run jobs, and keep what comes back."""
        asked = list(jobs)
        for job, reply in zip(asked, self.engine.run(iter(asked)), strict=True):
            self.replies.append((job, reply))
            yield reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def needles(table: Mapping[str, Any]) -> dict[int, list[bytes]]:
    """Return pieces of what each client sends in the first round of a run file, which is run in this process."""
    assembly = assemble(load_experiment(dict(table)))
    if assembly.settings.privacy is not None:  # whose noise comes after what clients send
        assembly.settings.privacy.randomness = Randomness(bytes(32), bytes(16))
    asked, settings = assembly.settings.secure, replace(assembly.settings, secure=None)
    grid = Quantizer(1.0, 20) if asked is None else asked.grid
    engine = _Watched(replace(assembly, settings=settings).engine())
    run_round(assembly.federation, engine, settings, start(assembly.federation))
    blocks = BlockLayout(assembly.federation.problem.layout)
    submodels = sorted({format_submodel(job.submodel) for job, _ in engine.replies})
    found: dict[int, list[bytes]] = {}
    for job, update in engine.replies:
        assert isinstance(update, Update) and job.client is not None
        flat = concat_state(update.state)
        moved = (flat != concat_state(job.state)).nonzero().flatten()
        middle = int(moved[len(moved) // 2])
        bit = submodels.index(format_submodel(job.submodel))
        own = [block for block in blocks.get_blocks(submodels)[1] if block >> bit & 1]
        words, _ = blocks.quantize_update(submodels, job, update, own, grid)
        found[job.client] = [flat[middle : middle + WORDS].numpy().tobytes(), *_pieces(words.values())]
    return found


def _pieces(words: Iterable[np.ndarray]) -> Iterator[bytes]:
    for numbers in words:
        moves = np.flatnonzero(numbers[:-WORDS])
        if len(moves) > WORDS:
            for first in moves[:: len(moves) // 3]:  # several: a database may break one between two of its pages
                yield numbers[first : first + WORDS].tobytes()


class Search:
    """Looks for pieces of updates in files, time and again while a run goes on."""

    def __init__(self, wanted: Mapping[int, list[bytes]], folder: Path) -> None:
        """Take what is looked for, and the folder of a `deployment.Deployment`."""
        self.wanted, self.folder = wanted, folder
        self.found: dict[int, set[str]] = {}
        self.bytes = 0

    def look(self) -> None:
        """Look into what the server has at this moment: its database, its logs and its run folder."""
        places = [*self.folder.glob("state.db*"), *self.folder.glob("superlink.log"), *self.folder.glob("run-*.log"),
                  *self.folder.glob("run/**/*")]  # fmt: skip
        self.bytes = 0
        for path in places:
            try:
                text = path.read_bytes() if path.is_file() else b""
            except FileNotFoundError:
                continue
            self.bytes += len(text)
            for client, pieces in self.wanted.items():
                if any(piece in text for piece in pieces):
                    self.found.setdefault(client, set()).add(path.name)

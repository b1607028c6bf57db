"""The run folder: configuration, environment, metrics, checkpoints, plan and summary, as plain values and tensors.

    config.toml        the configuration, with every default
    environment.json   versions, platform, git commits, fingerprints of data and code, the checksum of config.toml
    plan.toml          the levels with their sizes and costs
    fleet.json         clients of each budget group; class counts, group and level of the first clients
    nodes.json         the nodes of a real fleet
    data.json          what other samples are prepared by; also columns.json, tokenizer.json
    derived.json       what was derived from a plain module
    base.safetensors   the frozen tensors, if there are any
    metrics.jsonl      one JSON object per round
    checkpoints/       round-000012.safetensors: server, client memories and the last statistics; the newest two
    callbacks.json     the last round that each callback has received
    privacy.json       the privacy that is spent; also secure.json
    inference/         calibrations of early stopping, by level
    summary.json       the final numbers; written last, so its presence marks a finished run
    plots/, report.html

A folder is created atomically, with its configuration. All files except `metrics.jsonl` are written under a temporary
name, flushed to disk and renamed, so a killed process leaves the old or the new file. The line of a round is written
before its checkpoint; a resumed run removes the lines after its checkpoint. Files of tensors have a checksum.

A folder may be untrusted. Only regular files are read, and links in the folder are not followed when writing. `schema`
validates types and ranges of files, and `fleetfit.rounds.restore` compares tensors with the model.
"""

from pathlib import Path

RUNS = Path("runs")
"""The default folder of run folders."""
RUN_FILES = ("config.toml", "metrics.jsonl", "summary.json", "plan.toml", "fleet.json", "environment.json",
             "nodes.json", "privacy.json", "secure.json")  # fmt: skip
"""The files of a run folder that a person may read."""
RESULTS_FILE = "results.json"
"""The results of a comparison, in its folder."""
TUNING_FOLDER = "tune"
"""The folder of a comparison's tuning runs, in its folder."""
MAX_FOLDERS = 5
"""Folders between the folder of a comparison and a run: tune, row, setting, values and seed."""


class InvalidRecord(ValueError):
    """A stored value does not fit its model.

    Attributes:
        key: Dotted keys and positions of the value; None for the whole value.
    """

    def __init__(self, reason: str, key: str | None) -> None:
        super().__init__(reason)
        self.key = key

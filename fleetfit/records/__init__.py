"""The run folder: configuration, environment, metrics, checkpoints, plan, summary; plain values and tensors.

    config.toml        the resolved configuration
    environment.json   versions, platform, git commit, the checksum of config.toml
    plan.toml          the levels with their sizes and costs
    fleet.json         clients per budget group; class counts, group and level of the first clients
    metrics.jsonl      one JSON object per round
    checkpoints/       round-000012.safetensors: server, client memories and the last statistics; the newest two
    callbacks.json     up to which round each callback has been told, where there are some
    summary.json       the final numbers; written last, so its presence says that the run is finished
    plots/
    report.html        all of it as one page

A folder appears at once, with its configuration, or not at all. Every file but `metrics.jsonl` is written beside its
place, flushed to disk and renamed, so a process killed at any moment leaves each of them old or new, never half. A
round's line goes to `metrics.jsonl` before its checkpoint is written; a resumed run cuts off the lines after the
checkpoint that it starts from, a half-written one too. Files of tensors carry a checksum of their header and data.

A folder may come from a stranger. Only regular files are read, and links in the folder are not followed when writing.
`schema` validates types and ranges of what is read; `fleetfit.soundness` compares tensors with the model.
"""

from fleetfit.records.checkpoints import FORMAT
from fleetfit.records.folder import (
    RunFolder,
    choose_path,
    compute_checksums,
    describe_environment,
    processor,
    to_json_value,
)

__all__ = [
    "FORMAT",
    "RunFolder",
    "choose_path",
    "compute_checksums",
    "describe_environment",
    "processor",
    "to_json_value",
]

"""The run folder: configuration, environment, metrics, checkpoints, plan and summary, as plain values and tensors.

    config.toml the resolved configuration environment.json versions, platform, git commits, the checksum of config.toml
    plan.toml the levels with their sizes and costs fleet.json clients per budget group; class counts, group and level
    of the first clients metrics.jsonl one JSON object per round checkpoints/ round-000012.safetensors: server, client
    memories and the last statistics; the newest two base.safetensors the frozen tensors, if there are any
    callbacks.json the last round that each callback has received, if there are callbacks summary.json the final
    numbers; written last, so its presence marks a finished run plots/ report.html all of it as one page

A folder is created atomically, with its configuration. All files except `metrics.jsonl` are written under a temporary
name, flushed to disk and renamed, so a killed process leaves the old or the new file. The line of a round is written
before its checkpoint; a resumed run removes the lines after its checkpoint. Files of tensors have a checksum.

A folder may be untrusted. Only regular files are read, and links in the folder are not followed when writing. `schema`
validates types and ranges of files, and `fleetfit.state_checks` compares tensors with the model.
"""

from pathlib import Path

RUNS = Path("runs")
"""The default folder of run folders."""

"""Whether all runs of a comparison had the same data: it may go on when what lies at a path has changed."""

import json
from dataclasses import dataclass, field

from fleetfit.api.metadata import CHANGED, Fingerprint, format_difference, read_fingerprint
from fleetfit.api.results import Run
from fleetfit.config import to_table

_MOST = 4  # runs that a sentence names
_OF_A_RUN = ("partition", "columns")  # who has which samples; and where a run folder says how columns became numbers


@dataclass
class _Known:
    """The first run with some section `[data]`, and the runs whose data differ from its, by what differs."""

    title: str
    data: Fingerprint
    others: dict[str, list[str]] = field(default_factory=dict)


class SameData:
    """Compares the data of runs that say the same of them in `[data]`, as their folders record them."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._mixed: list[str] = []

    def known(self, title: str, run: Run) -> str:
        """Take a run in; return what differs from the first one with the same `[data]`, in a sentence, or ""."""
        data = read_fingerprint(run.files)
        if data is None:
            return ""
        said = to_table(run.experiment).get("data", {})
        section = {key: value for key, value in said.items() if key not in _OF_A_RUN}
        first = self._known.setdefault(json.dumps(section, sort_keys=True, default=str), _Known(title, data))
        found = format_difference(first.data, data)
        if not found:
            return ""
        titles = first.others.setdefault(found, [])
        if title not in titles:
            titles.append(title)
        return f"{CHANGED} {first.title}: {found}. Numbers on different data do not rank methods."

    def mixed(self, title: str, run: Run) -> None:
        """Take in what a run says of data that changed while it was cut off."""
        self._mixed += [f"{title}: {note}" for note in run.notes if note.startswith(CHANGED)]

    @property
    def notes(self) -> list[str]:
        """What stands below the table."""
        said = list(dict.fromkeys(self._mixed))
        for first in self._known.values():
            for found, titles in first.others.items():
                more = f" and {len(titles) - _MOST} more" if len(titles) > _MOST else ""
                said.append(
                    f"{CHANGED} {first.title}: {found}, in {'; '.join(titles[:_MOST])}{more}. Numbers on different "
                    "data do not rank methods; compare anew in another folder, with --out."
                )
        return said

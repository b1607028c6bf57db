"""Small modules in other people's style, each as its kind of repository writes it, with random weights.

They know nothing of FleetFit. What a derivation cannot do with one is listed where it is tested; a module is never
changed to suit it. Those of `bed.networks` need their package when they are made.
"""

from bed import attention, convolution, language, mixed, networks, recurrent, residual
from bed.entry import Entry

__all__ = ["ENTRIES", "Entry"]

_KINDS = (residual, convolution, attention, language, recurrent, mixed, networks)

ENTRIES: dict[str, Entry] = {entry.name: entry for kind in _KINDS for entry in kind.ENTRIES}
assert len(ENTRIES) == sum(len(kind.ENTRIES) for kind in _KINDS), "two modules of one name"

"""Data sets: the public ones by name, every kind of file, and how they are divided among clients.

    sets/         the public data sets, each by its name or a family of them in one file: mnist, cifar, femnist, ...
    files/        the kinds of files that anybody has: images, text, plain_text, arrays (each a `data.name` too), and
                  what reads them: parquet, leaf, sounds, tokens, memory; places says where the files of a set lie
    dataset.py    Data, which all of them return: what it must be, one client's share, the way to worker processes
    splits.py     train, validation, test: what is held out
    partition.py  how the splits are divided among clients
    augment.py    what training batches go through
    encoded.py    images as files: decoded once, or batch by batch where memory is too small
    cache.py      what is kept on disk, so that a set is decoded once

Imports point one way: sets, files, then dataset and what it is made of. A new public set is a file in `sets` (or a row
in one), a new kind of file one in `files`.
"""

from fleetfit.data.dataset import Data, Facts, unlabelled
from fleetfit.data.encoded import Encoded
from fleetfit.data.partition import Parts, class_counts, find_unassigned, partition, sizes_of

__all__ = [
    "Data",
    "Encoded",
    "Facts",
    "Parts",
    "class_counts",
    "find_unassigned",
    "partition",
    "sizes_of",
    "unlabelled",
]

"""Data sets: public sets by name, formats of files, and partitions among clients.

    sets/         public data sets, one or a family of them in a file: mnist, cifar, femnist, ...
    files/        formats of files. images, sounds, text, plain_text, arrays and table are names of data as well; detect
                  chooses one for a path; folders and labeled find the files of a set; parquet, leaf, tokens, memory
                  read data
    transform.py  Transform: what other samples are prepared by; fitted, stored as data.json, applied
    rows.py       Rows: labeled samples of any source on their way to Data
    dataset.py    Data, the type of every data set, and its transfer to worker processes
    splits.py     train, validation and test; holding samples out
    partition.py  partitions among clients
    augment.py    augmentation of training batches
    image_reader.py  images as files, decoded at once, or batch by batch where memory is too small
    cache.py      decoded samples on disk, so that a set is decoded once

Sets import files, and files import dataset and the modules below it. A new public set is a file in `sets` (or a row of
a file's table), a new format one in `files`.
"""

from fleetfit.data.dataset import (
    AbsentData as AbsentData,
    Data as Data,
    DataInMemory as DataInMemory,
    Facts as Facts,
    choose_samples as choose_samples,
    drop_labels as drop_labels,
)
from fleetfit.data.image_reader import EncodedImages as EncodedImages
from fleetfit.data.partition import (
    Parts as Parts,
    class_counts as class_counts,
    count_samples as count_samples,
    find_unassigned as find_unassigned,
    partition as partition,
)

"""Data sets, one function per data set, and how they are divided among clients."""

from fleetfit.data._encoded import Encoded
from fleetfit.data._unlabelled import unlabelled
from fleetfit.data.dataset import Data, Facts
from fleetfit.data.partition import class_counts, partition

__all__ = ["Data", "Encoded", "Facts", "class_counts", "partition", "unlabelled"]

"""Fashion-MNIST: 70,000 grey pictures of clothes, in the format of MNIST.

Xiao, Rasul and Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms" (2017).
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.images import named

FACTS = Facts(
    train=60_000,
    test=10_000,
    classes=10,
    resolution="28x28",
    source="Xiao et al. (2017), https://github.com/zalandoresearch/fashion-mnist",
)


def fashion_mnist(
    folder: str | None = None, validation: float = 0.1, augment: str | None = None, seed: int = 0
) -> Data:
    """Return Fashion-MNIST from Parquet files (see `parquet` for the layouts), images [70000, 1, 28, 28].

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images that is held out, class by class, 0 <= validation < 1.
        augment: What training batches go through, such as "crop-flip"; None: nothing.
        seed: Of what is held out.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: pyarrow or Pillow is not installed.
    """
    return named("fashion_mnist", FACTS, folder, 1, "label", validation, augment, seed, mean=(0.2860,), std=(0.3530,))

"""MNIST and Fashion-MNIST: 70,000 grey images of 28x28 pixels in ten classes each.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998). Xiao, Rasul and
Vollgraf, "Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms" (2017).
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.images import make_data, read_named_set
from fleetfit.factories import Preset, make_presets

FACTS = {
    "mnist": Facts(
        train=60_000,
        test=10_000,
        classes=10,
        resolution="28x28",
        source="LeCun et al. (1998), http://yann.lecun.com/exdb/mnist",
    ),
    "fashion_mnist": Facts(
        train=60_000,
        test=10_000,
        classes=10,
        resolution="28x28",
        source="Xiao et al. (2017), https://github.com/zalandoresearch/fashion-mnist",
    ),
}
SETS = {
    "mnist": Preset(
        "MNIST: 70,000 handwritten digits.",
        {"name": "mnist", "repository": "ylecun/mnist", "mean": (0.1307,), "std": (0.3081,)},
    ),
    "fashion_mnist": Preset(
        "Fashion-MNIST: 70,000 grey images of clothes, in the format of MNIST.",
        {"name": "fashion_mnist", "repository": "zalando-datasets/fashion_mnist", "mean": (0.2860,), "std": (0.3530,)},
    ),
}


def _make_mnist(
    name: str,
    repository: str,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    folder: str | None = None,
    validation: float = 0.1,
    augment: str | None = None,
    seed: int = 0,
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
) -> Data:
    """Return a set from Parquet files (see `fleetfit.data.files.images` for the layouts), images [70000, 1, 28, 28].

    Args:
        name: The set's name.
        repository: Its repository on the hub.
        mean: Mean of its training images.
        std: Standard deviation of its training images.
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images to hold out, class by class, 0 <= validation < 1.
        augment: Augmentation of training batches, such as "crop" or, for clothes, "crop-flip"; None: nothing. Digits
            should not be mirrored.
        seed: Seed of the held out samples.
        resize: Side in pixels to which batches are enlarged after augmentation; None: they keep their size.
        samples: Number of training images to draw, class by class, those held out included; None: all.
        hub: Whether to download the set from the Hugging Face hub if it is not on disk.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: `datasets` is not installed and the set has to be downloaded.
    """
    labelled = read_named_set(name, FACTS[name], repository, folder, hub, channels=1, label="label")
    return make_data(name, labelled, validation, 0.0, seed, augment, mean, std, resize, samples)


mnist, fashion_mnist = make_presets(_make_mnist, SETS)

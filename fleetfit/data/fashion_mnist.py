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
HUB = "zalando-datasets/fashion_mnist"


def fashion_mnist(
    folder: str | None = None,
    validation: float = 0.1,
    augment: str | None = None,
    seed: int = 0,
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
) -> Data:
    """Return Fashion-MNIST from Parquet files (see `parquet` for the layouts), images [70000, 1, 28, 28].

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images that is held out, class by class, 0 <= validation < 1.
        augment: What training batches go through, such as "crop-flip"; None: nothing.
        seed: Of what is held out.
        resize: Side in pixels to which batches are enlarged, after augmentation; None: they stay as they are.
        samples: So many training images only, drawn class by class, those held out included; None: all.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: pyarrow or Pillow is not installed, or `datasets` is not and the set has to be downloaded.
    """
    return named("fashion_mnist", FACTS, HUB, folder, 1, "label", validation, augment, seed, (0.2860,), (0.3530,),
                 resize, samples, hub)  # fmt: skip

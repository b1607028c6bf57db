"""MNIST: 70,000 handwritten digits.

LeCun, Bottou, Bengio and Haffner, "Gradient-Based Learning Applied to Document Recognition" (1998).
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.images import named

FACTS = Facts(
    train=60_000,
    test=10_000,
    classes=10,
    resolution="28x28",
    source="LeCun et al. (1998), http://yann.lecun.com/exdb/mnist",
)
HUB = "ylecun/mnist"


def mnist(
    folder: str | None = None,
    validation: float = 0.1,
    augment: str | None = None,
    seed: int = 0,
    resize: int | None = None,
    samples: int | None = None,
    hub: bool = False,
) -> Data:
    """Return MNIST from Parquet files (see `parquet` for the layouts), images [70000, 1, 28, 28].

    Args:
        folder: The folder with its files or the one above; None: FLEETFIT_DATA names the one above.
        validation: Share of the training images that is held out, class by class, 0 <= validation < 1.
        augment: What training batches go through, such as "crop"; None: nothing. A mirrored digit is no digit.
        seed: Of what is held out.
        resize: Side in pixels to which batches are enlarged, after augmentation; None: they stay as they are.
        samples: So many training images only, drawn class by class, those held out included; None: all.
        hub: Whether the set is downloaded from the Hugging Face hub where it is not on disk.

    Raises:
        DataError: The files are missing or wrong, or `validation` is out of range.
        MissingExtra: pyarrow or Pillow is not installed, or `datasets` is not and the set has to be downloaded.
    """
    return named("mnist", FACTS, HUB, folder, 1, "label", validation, augment, seed, (0.1307,), (0.3081,), resize,
                 samples, hub)  # fmt: skip

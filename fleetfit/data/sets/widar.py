"""Widar: 22 hand gestures that disturb Wi-Fi, by user, as body-coordinate velocity profiles.

Zheng et al., "Zero-Effort Cross-Domain Gesture Recognition with Wi-Fi" (2019), Widar 3.0, as the 22 gestures of 17
users that Yang et al., "SenseFi: A Library and Benchmark on Deep-Learning-Empowered WiFi Human Sensing" (2023), sorted
into train/CLASS/*.csv and test/CLASS/*.csv: one profile of 22 x 400 numbers each, 22 moments of 20 x 20 velocities. The
user is the beginning of a file's name. This makes the .npz file from that folder:

    import numpy as np
    from pathlib import Path

    def pack(folder):
        arrays = {}
        for split in ("train", "test"):
            files = sorted(Path(folder, split).glob("*/*.csv"))
            profiles = [np.loadtxt(file, delimiter=",", dtype=np.float32) for file in files]
            arrays[f"x_{split}"] = np.stack(profiles).reshape(-1, 22, 20, 20)
            arrays[f"y_{split}"] = np.array([file.parent.name for file in files])
            arrays[f"user_{split}"] = np.array([file.name.split("-")[0] for file in files])
        np.savez("widar.npz", **arrays)
"""

from fleetfit.data.dataset import Data, Facts
from fleetfit.data.files.arrays import Arrays, arrays
from fleetfit.data.files.folders import resolve_folder
from fleetfit.errors import DataError

FACTS = Facts(
    train=34_926,
    test=8_726,
    classes=22,
    resolution="22x20x20",
    source="Zheng et al. (2019), http://tns.thss.tsinghua.edu.cn/widar3.0; sorted by Yang et al. (2023)",
)
_SHAPE = (22, 20, 20)


def widar(file: str = "widar.npz", validation: float = 0.1, seed: int = 0, resize: int | None = None) -> Data:
    """Return Widar from its .npz file (see the module's docstring), x [43652, 22, 20, 20].

    The file has x_train, y_train, user_train, x_test, y_test and user_test. Users are the groups, and all are in both
    splits, so that `partition = { kind = "natural" }` makes every user a client with test data of its own.

    Args:
        file: The .npz file; a relative path that does not exist is searched for in the folder FLEETFIT_DATA.
        validation: Share of each user's training samples to hold out, 0 <= validation < 1.
        seed: Seed of the held out samples.
        resize: Side to which the 20 x 20 velocities are resized batch by batch; None: no resizing.

    Raises:
        DataError: The file is missing or has other arrays, or `validation` is out of range.
    """
    groups = "user" if "user_train" in Arrays(resolve_folder(file)) else None
    data = arrays(file, groups=groups, mean=(0.0025,), std=(0.0119,), validation=validation, test=0.0, seed=seed,
                  resize=resize)  # fmt: skip
    if tuple(data.x.shape[1:]) != _SHAPE or data.classes != FACTS.classes:
        raise DataError(
            f"widar has 22 classes of profiles [22, 20, 20], but {file} has {data.classes} classes of "
            f'{list(data.x.shape[1:])}; data.name = "arrays" reads any arrays.',
            path=file,
        )
    return data

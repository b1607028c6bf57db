"""How fast the simulated devices of a fleet are: their groups' profiles, and who is slower."""

from dataclasses import fields, replace

import numpy as np

from fleetfit.config.schema import FleetSection, ProfileSection
from fleetfit.errors import ConfigError, did_you_mean
from fleetfit.profiles import PROFILES, DeviceProfile
from fleetfit.seeds import make_numpy_rng
from fleetfit.values import Speed


def build_speeds(section: FleetSection, group: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Return by figure what each client has [K]; nothing where no group has a profile.

    Args:
        section: The fleet as configured.
        group: Index of each client's group [K].
        seed: The run's; it says who is slow.

    Raises:
        ConfigError: Something is set that needs profiles.
    """
    if section.groups[0].profile is None:
        in_vain = [key for key, value in (("slow", section.slow), ("jitter", section.jitter)) if value]
        if in_vain:
            raise ConfigError(f"[fleet] {in_vain[0]}: it needs a profile for each of the groups, and none has one.")
        return {}
    profiles = [find_profile(g.profile) for g in section.groups if g.profile is not None]
    found = {f.name: np.array([getattr(p, f.name) for p in profiles])[group] for f in fields(Speed)}
    if section.slow is not None:
        slow = draw_slow_clients(group, section.slow.share, seed)
        found["multiply_adds_per_s"] = np.where(slow, 1 / section.slow.factor, 1.0) * found["multiply_adds_per_s"]
        for name in ("down_bytes_per_s", "up_bytes_per_s"):
            found[name] = np.where(slow, 1 / section.slow.link, 1.0) * found[name]
    return found


def draw_slow_clients(group: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Return who is slow, bool [K]: round(share * K) clients, drawn, in every group as many as its size asks for."""
    order = make_numpy_rng(seed, "slow").permutation(len(group))
    order = order[np.argsort(group[order], kind="stable")]
    counted = np.floor(np.arange(len(group) + 1) * share + 0.5)
    slow = np.zeros(len(group), dtype=bool)
    slow[order] = np.diff(counted) > 0
    return slow


def find_profile(given: str | ProfileSection) -> DeviceProfile:
    """Return the profile of a name or of a table of figures.

    Raises:
        ConfigError: There is no such profile.
    """
    if not isinstance(given, str):
        return replace(DeviceProfile(1.0, 1.0, 1.0), **{key: getattr(given, key) for key in type(given).model_fields})
    if given not in PROFILES:
        raise ConfigError(
            f'[fleet] groups.profile: there is no profile "{given}"; there are {", ".join(PROFILES)}, or write a table '
            f"of figures.{did_you_mean(given, PROFILES)}"
        )
    return PROFILES[given]


def check_profiles(section: FleetSection) -> None:
    """Check that all groups have a profile or none has, and that named ones exist.

    Raises:
        ConfigError: Something does not fit.
    """
    without = [str(i) for i, g in enumerate(section.groups, 1) if g.profile is None]
    if 0 < len(without) < len(section.groups):
        raise ConfigError(
            f"[fleet] groups: #{', #'.join(without)} have no profile and others have; the clock of a round needs all."
        )
    for group in section.groups:
        if group.profile is not None:
            find_profile(group.profile)

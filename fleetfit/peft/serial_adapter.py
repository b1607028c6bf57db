"""Serial adapters: a bottleneck after attention and after the MLP of every block (Houlsby et al., ICML 2019).

All else is frozen but the classifiers. With rank 32 these are 49,984 numbers per block of DeiT-S, as in ReeFL (ICML
2024, appendix A).

Differs from the paper: an adapter begins by adding exactly nothing.
"""

from fleetfit.anatomy import Architecture
from fleetfit.peft._adapter import SUBLAYERS, Adapted


def serial_adapter(architecture: Architecture, rank: int = 32, targets: tuple[str, ...] = SUBLAYERS) -> Architecture:
    """Put an adapter after each sub-layer.

    Args:
        architecture: The model family.
        rank: Features in the middle of an adapter.
        targets: Patterns of the names of the sub-layers: modules that map [..., D] to [..., D].

    Raises:
        ModelError: No module has such a name.
    """
    return Adapted(architecture, tuple(targets), rank, serial=True)

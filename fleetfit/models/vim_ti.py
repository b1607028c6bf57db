"""Vision Mamba, tiny (Vim-T): 24 bidirectional blocks of width 192; 7,148,008 parameters at 224x224, 1,000 classes."""

from fleetfit.models._head import HeadKind
from fleetfit.models.vim import Vim, vim


def vim_ti(
    classes: int = 10, input_shape: tuple[int, ...] = (3, 224, 224), patch: int = 16, head: HeadKind = "norm"
) -> Vim:
    """Return `vim` in the size that ReeFL's appendix F uses; the arguments are explained there.

    Smaller images take a smaller patch: 4 for 32x32.
    """
    return vim(classes, input_shape, depth=24, hidden=192, patch=patch, head=head)

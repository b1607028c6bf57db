"""The CIFAR CNN of the FedAvg paper (McMahan et al., AISTATS 2017), TensorFlow's tutorial model: about 10^6 parameters.

Two 5x5 convolutions of 64 channels, each with ReLU and 3x3 max pooling with stride 2, fully connected layers of 384 and
192 units with ReLU, and a linear classifier: 1,068,298 parameters on the paper's 24x24 crops, 1,756,426 on whole 32x32
images. Each layer is a block; an exit after a convolution pools its maps globally first.

Differs from the paper: the tutorial's local response normalisation is left out. It mixes each channel with its eight
neighbours, so a model without some of them would not be a part of the whole model.
"""

from fleetfit.models._stack import Stack


def fedavg_cifar_cnn(classes: int = 10, input_shape: tuple[int, ...] = (3, 24, 24)) -> Stack:
    """Return the family of the FedAvg paper's CNN for CIFAR.

    Args:
        classes: Classes; never cut.
        input_shape: Channels, height and width of the images, 4x4 and more.

    Raises:
        ModelError: The inputs are no images, or too small.
    """
    return Stack(classes, tuple(input_shape), (64, 64), (384, 192), pool=3)

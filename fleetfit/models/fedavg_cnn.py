"""The CNN of the FedAvg paper (McMahan et al., AISTATS 2017): two 5x5 convolutions; 1,663,370 parameters on MNIST.

Convolutions of 32 and 64 channels, each with ReLU and 2x2 max pooling, a fully connected layer of 512 units with ReLU,
and a linear classifier. Each layer is a block; an exit after a convolution pools its maps globally first.
"""

from fleetfit.models._stack import Stack


def fedavg_cnn(classes: int = 10, input_shape: tuple[int, ...] = (1, 28, 28)) -> Stack:
    """Return the family of the FedAvg paper's CNN for digits.

    Args:
        classes: Classes; never cut.
        input_shape: Channels, height and width of the images, 4x4 and more.

    Raises:
        ModelError: The inputs are no images, or too small.
    """
    return Stack(classes, tuple(input_shape), (32, 64), (512,))

"""The 2NN of the FedAvg paper (McMahan et al., AISTATS 2017): two hidden layers of 200 units, 199,210 parameters.

The count is that of MNIST. Each hidden layer with its ReLU is a block, and a linear classifier may sit after either.
Inputs of any shape are flattened.
"""

from fleetfit.models._stack import Stack


def mlp_2nn(
    classes: int = 10, input_shape: tuple[int, ...] = (1, 28, 28), hidden: tuple[int, ...] = (200, 200)
) -> Stack:
    """Return the family of the 2NN.

    Args:
        classes: Classes; never cut.
        input_shape: Shape of one sample.
        hidden: Units of each hidden layer, shallow to deep.

    Raises:
        ModelError: There is no hidden layer, or one without units.
    """
    return Stack(classes, tuple(input_shape), (), tuple(hidden))

"""The public functions: `run`, `resume`, `load`, `compare`, `plan` and others, each in the module of its subject.

`fleetfit` has them all by name, and imports a module when one of its names is first used.
"""

from fleetfit.machine import import_torch

import_torch()

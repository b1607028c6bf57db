"""AdaptiveFL's Table 1 (DAC 2024): the pool of sub-models of VGG-16."""

from fleetfit.cost import Timed, submodel_cost
from fleetfit.methods._pool import pool
from fleetfit.papers.table import PaperTable, Value, beside, built_in

_INPUT = (3, 32, 32)

TABLE_1 = {
    "L1": (33.65, 333.22, 1.00),
    "M1": (16.81, 272.17, 0.50),
    "M2": (15.41, 239.95, 0.46),
    "M3": (14.84, 203.41, 0.44),
    "S1": (8.39, 239.00, 0.25),
    "S2": (6.48, 191.31, 0.19),
    "S3": (5.67, 139.07, 0.17),
}
"""Millions of parameters and of multiply-adds and the ratio of parameters, as printed."""


def adaptivefl_table_1() -> PaperTable:
    """Return AdaptiveFL's Table 1."""
    architecture = built_in("vgg16")
    found = {model.name: model for model in pool(architecture)}
    costs = {name: submodel_cost(architecture, model.submodel, _INPUT) for name, model in found.items()}
    rows: list[tuple[Value, ...]] = []
    models = []
    for name, (parameters, multiply_adds, ratio) in TABLE_1.items():
        share = round(costs[name].parameters / costs["L1"].parameters, 2)
        numbers = beside(costs[name], parameters, multiply_adds)
        rows.append((name, found[name].width, found[name].whole, *numbers, share, ratio))
        submodel = found[name].submodel
        models.append(Timed(architecture, {**architecture.sizes(1.0), **submodel.sizes}, submodel.exits, _INPUT))
    return PaperTable(
        "AdaptiveFL, Table 1: the pool of VGG-16 (p = 3)",
        ("model", "r_w", "I", "parameters (M)", "printed", "multiply-adds (M)", "printed", "ratio", "printed"),
        tuple(rows),
        (
            "Batch norm, ten classes, 32x32 images. The paper's count has four more for each number that a convolution "
            "returns (bias, norm and activation), which is what its rows are above ours: 0.9 to 1.1 M.",
        ),
        models=tuple(models),
    )

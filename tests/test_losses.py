"""Each equation recomputed with plain loops on a few numbers."""

import math

import pytest
import torch

from fleetfit.core.tasks import classification, softened_kl
from fleetfit.hooks.losses import exit_weights, masked_cross_entropy, mutual_distillation, self_distillation
from fleetfit.methods.depthfl import ramp_up


def softmax(row: list[float], tau: float = 1.0) -> list[float]:
    powers = [math.exp(v / tau) for v in row]
    return [p / sum(powers) for p in powers]


def plain_kl(student: list[float], teacher: list[float], tau: float) -> float:
    """ScaleFL below Eq. 5: sum over classes of p_t log(p_t / p_s), times tau squared."""
    p_t, p_s = softmax(teacher, tau), softmax(student, tau)
    return sum(t * math.log(t / s) for t, s in zip(p_t, p_s, strict=True)) * tau**2


EXITS = [[[0.2, -1.0, 0.5], [1.0, 0.0, -1.0]], [[2.0, 0.1, -0.3], [0.4, 0.5, 0.6]], [[1.5, -0.5, 0.0], [0.0, 2.0, 1.0]]]
LABELS = [0, 2]


def plain_eq5(beta: float, tau: float, printed: bool) -> float:
    """Eq. 5 written out: i / (l(l+1)), doubled by default; the last exit has no KL with itself."""
    exits = len(EXITS)
    total = 0.0
    for i, rows in enumerate(EXITS, start=1):
        for row, teacher, y in zip(rows, EXITS[-1], LABELS, strict=True):
            ce = -math.log(softmax(row)[y])
            kl = plain_kl(row, teacher, tau) if i < exits else 0.0
            total += i * (beta * kl + ce) / len(LABELS)
    return total / (exits * (exits + 1)) * (1 if printed else 2)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("printed", [False, True])
def test_self_distillation_is_equation_5(beta: float, printed: bool) -> None:
    logits = [torch.tensor(rows, dtype=torch.float64) for rows in EXITS]
    loss = self_distillation(
        logits, torch.tensor(LABELS), classification, beta, 3.0, exit_weights(len(logits), printed)
    )
    assert loss.item() == pytest.approx(plain_eq5(beta, 3.0, printed), rel=1e-12)


def test_exit_weights_sum_to_one() -> None:
    for exits in range(1, 13):
        assert sum(exit_weights(exits)) == pytest.approx(1.0)
        assert sum(exit_weights(exits, printed=True)) == pytest.approx(0.5)


def test_teacher_gets_no_gradient_from_the_distillation() -> None:
    teacher = torch.tensor([[1.0, 0.0]], requires_grad=True)
    student = torch.tensor([[0.0, 1.0]], requires_grad=True)
    softened_kl(teacher, student, 2.0).backward()
    assert teacher.grad is None
    assert student.grad is not None and student.grad.abs().sum() > 0


def test_one_exit_is_plain_cross_entropy() -> None:
    logits = torch.tensor(EXITS[0])
    y = torch.tensor(LABELS)
    assert torch.equal(self_distillation([logits], y, classification, 0.5, 3.0), classification.loss(logits, y))


def test_masked_cross_entropy_zeroes_absent_logits() -> None:
    """HeteroFL: with class 1 absent, its logit counts as 0."""
    row = [0.2, -1.0, 0.5]
    expected = -math.log(softmax([0.2, 0.0, 0.5])[0])
    loss = masked_cross_entropy(torch.tensor([True, False, True]), classification)
    value = loss(torch.tensor([row]), torch.tensor([0]))
    assert value.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("exits", [1, 2, 3])
def test_mutual_distillation_sums_over_pairs(share: float, exits: int) -> None:
    """sum_i CE_i + share / (l - 1) * sum_i sum_{j != i} KL(exit j || exit i), averaged over the two samples."""
    total = 0.0
    for i in range(exits):
        for b, y in enumerate(LABELS):
            total += -math.log(softmax(EXITS[i][b])[y]) / 2
            for j in range(exits):
                if i != j:
                    total += share / (exits - 1) * plain_kl(EXITS[i][b], EXITS[j][b], 2.0) / 2
    logits = [torch.tensor(rows, dtype=torch.float64) for rows in EXITS[:exits]]
    loss = mutual_distillation(logits, torch.tensor(LABELS), classification, share, 2.0)
    assert loss.item() == pytest.approx(total, rel=1e-12)


def test_depthfl_s_ramp() -> None:
    """exp(-5 (1 - t/300)^2): e^-5 in the first round, e^(-5/4) half way, 1 from round 300 on."""
    assert [ramp_up(t, 300) for t in (0, 150, 299, 300, 900)] == pytest.approx(
        [0.006737947, 0.286504797, math.exp(-5 / 90000), 1.0, 1.0], rel=1e-6
    )
    assert ramp_up(0, 0) == 1.0

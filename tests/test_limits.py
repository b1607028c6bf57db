"""Cut gradients, few steps, early stopping: what holds local training back, against plain runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import raises
from support.training import assert_close, last_exit_loss, make_job, plain_outputs, plain_sgd, tiny_fleet, train_job
from tiny import plain
from torch import Tensor

from fleetfit.core import Device, Local
from fleetfit.errors import ConfigError


def at_once(epochs: int = 3, **more: Any) -> Local:
    return plain(lr=0.5, epochs=epochs, batch_size="all", **more)


def whole_batch(device: Device) -> tuple[Tensor, Tensor]:
    return device.data.batch(device.data.split("train"))


def test_clip_value_clips_elements() -> None:
    """w' = w - lr * clamp(g, -v, v), with g from autograd in float64."""
    federation, simulation = tiny_fleet(norm=False)
    device, local = simulation.device(5), at_once(1, clip_value=0.002)
    job = make_job(federation, 5, 2, local=local)
    leaves = {n: t.double().requires_grad_() for n, t in job.state.items()}
    x, y = whole_batch(device)
    value = last_exit_loss(plain_outputs(leaves, x.double(), (1, 2, 3)), y)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    assert max(float(g.abs().max()) for g in grads if g is not None) > 0.002  # something is cut
    expected = {n: (w - 0.5 * (torch.zeros_like(w) if g is None else g).clamp(-0.002, 0.002)).detach()
                for (n, w), g in zip(leaves.items(), grads, strict=True)}  # fmt: skip
    assert_close(train_job(job, device).state, expected)


def test_clip_value_precedes_clip_norm() -> None:
    federation, simulation = tiny_fleet(norm=False)
    job = make_job(federation, 5, 2, local=at_once(1, clip_value=0.002, clip_norm=0.001))
    state = train_job(job, simulation.device(5)).state
    length = sum(float(((state[n] - t) ** 2).sum()) for n, t in job.state.items()) ** 0.5
    assert length == pytest.approx(0.5 * 0.001, rel=1e-3)


def test_max_steps_ends_training() -> None:
    federation, simulation = tiny_fleet()
    device = simulation.device(5)
    local = plain(lr=0.1, epochs=4, batch_size=8)
    for most in (1, 3, 5):
        update = train_job(make_job(federation, 5, 2, local=local.replace(max_steps=most)), device)
        assert update.metrics["steps"] == most
    free = train_job(make_job(federation, 5, 2, local=local), device)
    bounded = train_job(make_job(federation, 5, 2, local=local.replace(max_steps=free.metrics["steps"])), device)
    assert all(torch.equal(bounded.state[n], t) for n, t in free.state.items())


def test_early_stopping_keeps_the_best_epoch() -> None:
    """A plain run notes the validation loss after each epoch; a learning rate that overshoots makes it rise."""
    federation, simulation = tiny_fleet(norm=False)
    device, patience = simulation.device(5), 2
    local = at_once(12, momentum=0.9)
    job = make_job(federation, 5, 2, local=local.replace(patience=patience))
    x, y = device.data.batch(device.data.split("validation"))
    states = [plain_sgd(job.state, (1, 2, 3), [whole_batch(device)] * n, last_exit_loss, local) for n in range(1, 13)]
    losses = [float(F.cross_entropy(plain_outputs(s, x.double(), (1, 2, 3))[-1], y)) for s in states]
    best, stop = 0, len(losses)
    for epoch, loss in enumerate(losses):
        best = epoch if loss < losses[best] else best
        if epoch - best == patience:
            stop = epoch + 1
            break
    assert stop < 12, "the learning rate was to make the loss rise"
    update = train_job(job, device)
    assert update.metrics["steps"] == stop
    assert_close(update.state, states[best], atol=2e-5)


def test_checks_by_step_equal_checks_by_epoch() -> None:
    """Bit for bit, where the first epoch is better than the start, which only a look at every step sees."""
    federation, simulation = tiny_fleet(norm=False)
    device, local = simulation.device(5), at_once(12, momentum=0.9, patience=2)
    states = [
        train_job(make_job(federation, 5, 2, local=local.replace(check_every=every)), device) for every in (None, 1)
    ]
    assert states[0].metrics == states[1].metrics and states[0].metrics["steps"] < 12
    assert all(torch.equal(states[1].state[n], t) for n, t in states[0].state.items())


def test_check_every_third_step() -> None:
    """It stops where the validation loss of a third, sixth, ... step has not been the lowest for so many steps."""
    federation, simulation = tiny_fleet(norm=False)
    device, local = simulation.device(5), at_once(30, momentum=0.9)
    job = make_job(federation, 5, 2, local=local.replace(patience=2, check_every=3))
    x, y = device.data.batch(device.data.split("validation"))
    steps = range(0, 31, 3)
    states = [plain_sgd(job.state, (1, 2, 3), [whole_batch(device)] * n, last_exit_loss, local) for n in steps]
    losses = [float(F.cross_entropy(plain_outputs(s, x.double(), (1, 2, 3))[-1], y)) for s in states]
    best = next(i for i in range(len(losses)) if losses[i] < min(losses[i + 1 : i + 3]))
    update = train_job(job, device)
    assert update.metrics["steps"] == 3 * best + 6 < 30
    assert_close(update.state, states[best], atol=2e-5)


class Watched:
    """The last exit's loss; notes in what mode the model is."""

    def __init__(self, modes: list[tuple[str, bool]], device: Device) -> None:
        self.modes, self.device = modes, device

    def __call__(self, module: Any, x: Tensor, y: Tensor) -> Tensor:
        self.modes.append(("step", module.training))
        return F.cross_entropy(module(x)[-1], y)


class WatchedLooking(Watched):
    def held_out(self, module: Any) -> float:
        self.modes.append(("look", module.training))
        return 1.0 / len(self.modes)


@pytest.mark.parametrize("loss", [Watched, WatchedLooking])
@pytest.mark.parametrize("every", [None, 1])
def test_checks_restore_training_mode(loss: type[Watched], every: int | None) -> None:
    """Steps have dropout and the batch's statistics, looks have neither, whoever computes what is looked at."""
    modes: list[tuple[str, bool]] = []
    hooks = {"make_loss": lambda job, device: loss(modes, device)}
    federation, simulation = tiny_fleet({"name": "fedavg", "hooks": hooks}, dropout=0.5)
    local = Local(lr=0.01, epochs=3, batch_size=14, patience=50, check_every=every)
    train_job(make_job(federation, 5, 2, local=local), simulation.device(5))
    assert [training for what, training in modes if what == "step"] == [True] * 6
    looks = [training for what, training in modes if what == "look"]
    assert looks == ([False] * {None: 3, 1: 7}[every] if loss is WatchedLooking else [])


def test_adam_along_a_cosine_is_torch_s() -> None:
    federation, simulation = tiny_fleet(norm=False)
    device = simulation.device(5)
    local = Local(
        lr=0.01, epochs=7, batch_size="all", weight_decay=0.1, max_steps=7, optimizer="adam", schedule_in_round="cosine"
    )
    job = make_job(federation, 5, 2, local=local)
    leaves = {n: t.double().requires_grad_() for n, t in job.state.items()}
    adam = torch.optim.Adam(list(leaves.values()), lr=0.01, weight_decay=0.1)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 7)
    x, y = whole_batch(device)
    for _ in range(7):
        for leaf in leaves.values():
            leaf.grad = None  # torch leaves alone what got no gradient: a head that the loss never uses
        last_exit_loss(plain_outputs(leaves, x.double(), (1, 2, 3)), y).backward()
        adam.step()
        falling.step()
    assert_close(train_job(job, device).state, {n: t.detach() for n, t in leaves.items()}, atol=1e-5)


@pytest.mark.parametrize(("key", "value"), [("optimizer", "adagrad"), ("lr", -1.0), ("epochs", 0.5), ("odd", 1)])
def test_hooks_set_only_keys_of_a_run_file(key: str, value: Any) -> None:
    with raises(ConfigError, repr(value), key=f"local.{key}"):
        plain().replace(**{key: value})


def test_no_early_stopping_without_validation_data() -> None:
    federation, simulation = tiny_fleet(norm=False)
    parts = [{**p, "validation": p["validation"][:0]} for p in simulation.parts]
    device = replace(simulation, parts=parts).device(5)
    update = train_job(make_job(federation, 5, 2, local=at_once(12, momentum=0.9, patience=1)), device)
    assert update.metrics["steps"] == 12

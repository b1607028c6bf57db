"""Train a full model centrally, in a bare PyTorch loop, with as many sample passes as a federated run: its yardstick.

    python experiments/central.py --data cifar10 --model resnet20 --passes 135000 --pieces 30

The learning rate follows the same cosine over `pieces` equal parts as a federated run over as many rounds. Accuracy
on the test set uses batch-norm statistics re-estimated from 5,000 training samples.
"""

import argparse
import json
import math

import torch
import torch.nn.functional as F

from fleetfit import names
from fleetfit.anatomy import batch_norms


def main() -> None:
    """Train, and print one line of JSON per piece."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--passes", type=int, default=135_000)
    parser.add_argument("--pieces", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--minimum", type=float, default=0.01, help="last learning rate, as a fraction of the first")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    data = names.resolve("data", options.data)()
    architecture = names.resolve("models", options.model)(classes=data.classes, channels=data.x.shape[1])
    model = architecture.build({n: a.size for n, a in architecture.axes.items()}, (architecture.blocks,))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
    rng = torch.Generator().manual_seed(options.seed)
    train = data.split("train")
    order = torch.cat(
        [train[torch.randperm(len(train), generator=rng)] for _ in range(options.passes // len(train) + 1)]
    )
    size = options.passes // options.pieces
    for piece in range(options.pieces):
        done = piece / max(1, options.pieces - 1)
        for group in optimizer.param_groups:
            group["lr"] = options.lr * (options.minimum + (1 - options.minimum) * (1 + math.cos(math.pi * done)) / 2)
        model.train()
        total = 0.0
        for batch in order[piece * size : (piece + 1) * size].split(options.batch):
            x, y = data.batch(batch, rng)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x)[-1], y)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(json.dumps({"passes": (piece + 1) * size, "loss": total / size}), flush=True)
    for norm in batch_norms(model).values():
        norm.reset_running_stats()
        norm.momentum = None  # a plain mean over the batches that follow
    with torch.no_grad():
        for batch in train[torch.randperm(len(train), generator=rng)[:5000]].split(128):
            model(data.batch(batch)[0])
        model.eval()
        test = data.split("test")
        right = sum(int((model(data.batch(b)[0])[-1].argmax(1) == data.y[b]).sum()) for b in test.split(256))
    print(json.dumps({"test_accuracy": right / len(test)}))


if __name__ == "__main__":
    main()

"""Models of Hugging Face `transformers` as they are: texts, images, and a causal language model.

    python examples/transformers_models.py

A model comes from a configuration in code, with random weights, or from a local folder (`save_pretrained`) with the
weights there. Nothing is fetched. In a run file, for [data] with texts:

    [model]
    name = "transformers_models.py:classify_texts"
    checkpoint = "path/to/folder"
"""

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    ViTConfig,
)

import fleetfit as ff


def classify_texts(classes: int, vocabulary: int, checkpoint: str = "") -> nn.Module:
    """Make a text classifier; from a local folder it starts from the weights there."""
    if checkpoint:
        config = AutoConfig.from_pretrained(checkpoint, num_labels=classes, local_files_only=True)
        return AutoModelForSequenceClassification.from_pretrained(checkpoint, config=config, local_files_only=True)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=4, num_attention_heads=8, intermediate_size=64,
        max_position_embeddings=128, num_labels=classes,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def classify_images(classes: int, channels: int) -> nn.Module:
    """Make a vision transformer for images of 8x8 pixels."""
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=channels, hidden_size=32, num_hidden_layers=4, num_attention_heads=8,
        intermediate_size=64, num_labels=classes,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config)


def predict_tokens(vocabulary: int) -> nn.Module:
    """Make a causal language model with grouped heads, which gives logits at each place."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=64, max_position_embeddings=32,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def make_topics(samples: int = 1200) -> ff.Data:
    """Make texts of 12 tokens on three topics: half of the tokens are the topic's own ten."""
    rng = torch.Generator().manual_seed(0)
    y = torch.randint(3, (samples,), generator=rng)
    own = torch.randint(10, (samples, 12), generator=rng) + 10 * y[:, None]
    other = torch.randint(30, (samples, 12), generator=rng)
    x = torch.where(torch.rand(samples, 12, generator=rng) < 0.5, own, other)
    train, test = torch.arange(samples).split([samples - samples // 5, samples // 5])
    return ff.Data("topics", x, y, {"train": train, "test": test}, classes=3, vocabulary=30)


def make_counts(samples: int = 1200) -> ff.Data:
    """Make rows that count by one, two or three from any number, modulo 30; each token's label is the next one."""
    rng = torch.Generator().manual_seed(0)
    first, step = (torch.randint(1, high, (samples, 1), generator=rng) for high in (30, 4))
    rows = (first + step * torch.arange(13)) % 30
    train, test = torch.arange(samples).split([samples - samples // 5, samples // 5])
    splits = {"train": train, "test": test}
    return ff.Data("counts", rows[:, :-1], rows[:, 1:], splits, classes=30, vocabulary=30, task="next_token")


def run_all(rounds: int = 10) -> list[ff.Run]:
    """Train the three models, four levels each."""
    topics, counts = make_topics(), make_counts()
    local = {"optimizer": "adamw", "lr": 0.003}
    return [
        ff.run(model=classify_texts(topics.classes, topics.vocabulary), data=topics, rounds=rounds, local=local),
        ff.run(model=classify_images(classes=10, channels=1), data="digits", rounds=rounds, local=local),
        ff.run(
            model=predict_tokens(counts.vocabulary),
            data={"name": counts, "partition": {"kind": "iid", "clients": 20}},
            rounds=rounds,
            local=local,
        ),
    ]


if __name__ == "__main__":
    for run in run_all():
        print(f"{run.summary['data']}: local {run.accuracy('local'):.2f}, global {run.accuracy('global'):.2f}")

"""Classes of transformers with random weights, as functions that a run file names; nothing is fetched."""

from torch import nn


def bert(classes: int) -> nn.Module:
    from transformers import AutoModelForSequenceClassification, BertConfig

    config = BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, intermediate_size=48,
        max_position_embeddings=16, num_labels=classes,
    )  # fmt: skip
    return AutoModelForSequenceClassification.from_config(config)


def distilbert(classes: int) -> nn.Module:
    from transformers import AutoModelForSequenceClassification, DistilBertConfig

    config = DistilBertConfig(
        vocab_size=30, dim=32, n_layers=2, n_heads=8, hidden_dim=48, max_position_embeddings=16, num_labels=classes
    )
    return AutoModelForSequenceClassification.from_config(config)


def vit(classes: int) -> nn.Module:
    from transformers import AutoModelForImageClassification, ViTConfig

    config = ViTConfig(
        image_size=8, patch_size=4, num_channels=1, hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
        intermediate_size=48, num_labels=classes,
    )  # fmt: skip
    return AutoModelForImageClassification.from_config(config)


def resnet(classes: int) -> nn.Module:
    from transformers import AutoModelForImageClassification, ResNetConfig

    config = ResNetConfig(
        num_channels=1, embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=classes
    )
    return AutoModelForImageClassification.from_config(config)


def llama(vocabulary: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=48, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def gpt2(vocabulary: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=vocabulary,
        n_embd=32,
        n_layer=2,
        n_head=8,
        n_positions=16,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)

"""Classes of the library transformers at tiny sizes, with random weights; the library is imported when one is made."""

from typing import Any

import torch.nn as nn

from bed.entry import Entry, images, sentences


def make(model: str, config: str, **sizes: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**sizes))


ENCODER = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
    max_position_embeddings=16, num_labels=4,
)  # fmt: skip
DECODER = ENCODER | dict(num_key_value_heads=2, pad_token_id=0)
GPT2 = dict(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0)
VIT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
    num_labels=10,
)  # fmt: skip

CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf_bert": ("BertForSequenceClassification", "BertConfig", ENCODER),
    "hf_distilbert": (
        "DistilBertForSequenceClassification", "DistilBertConfig",
        dict(vocab_size=40, dim=32, n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=16, num_labels=4),
    ),
    "hf_albert": ("AlbertForSequenceClassification", "AlbertConfig", ENCODER | dict(embedding_size=16)),
    "hf_llama": ("LlamaForSequenceClassification", "LlamaConfig", DECODER),
    "hf_qwen3": ("Qwen3ForSequenceClassification", "Qwen3Config", DECODER | dict(head_dim=8)),
    "hf_llama_lm": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "hf_gpt2_lm": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "hf_vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "hf_convnext": (
        "ConvNextForImageClassification", "ConvNextConfig",
        dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1], patch_size=2, num_labels=10),
    ),
    "hf_resnet": (
        "ResNetForImageClassification", "ResNetConfig",
        dict(embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[1, 1, 2, 1], layer_type="basic", num_labels=10),
    ),
    "hf_swin": (
        "SwinForImageClassification", "SwinConfig",
        dict(image_size=16, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4, num_labels=10),
    ),
    "hf_mobilenet_v2": (
        "MobileNetV2ForImageClassification", "MobileNetV2Config",
        dict(depth_multiplier=0.25, min_depth=8, finegrained_output=False, num_labels=10),
    ),
}  # fmt: skip

NEXT_TOKENS = {"hf_llama_lm", "hf_gpt2_lm"}

ENTRIES = [
    Entry(
        name,
        lambda row=row: make(row[0], row[1], **row[2]),
        sentences(40, 10) if "vocab_size" in row[2] else images(side=32 if "net" in name else 16),
        tokens=row[2].get("vocab_size", 0),
        next_tokens=name in NEXT_TOKENS,
    )
    for name, row in CLASSES.items()
]

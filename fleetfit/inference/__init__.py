"""What trained models are asked: where they look."""

from fleetfit.inference.attention import AttentionMaps, attention_maps

__all__ = ["AttentionMaps", "attention_maps"]

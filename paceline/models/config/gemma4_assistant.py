"""The assistants of Gemma 4, which draft tokens with a text model that has no keys and values of its own."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import ModelError
from paceline.models.config.fields import Fields
from paceline.models.config.gemma4 import gemma4
from paceline.models.model_config import Assistant, ModelConfig


def gemma4_assistant(fields: Fields) -> ModelConfig:
    if not isinstance(fields.raw.get("text_config"), dict):
        raise ModelError("text_config is missing")
    # The count includes all layers, but none of them reads another layer of this model.
    changes = {"num_kv_shared_layers": 0, "tie_word_embeddings": fields.get("tie_word_embeddings", True)}
    text = {**fields.raw["text_config"], **changes}
    config = gemma4(Fields({**fields.raw, "text_config": text}, fields.architecture))
    has_layer_inputs = config.gemma4 is not None and config.gemma4.layer_input_size
    if has_layer_inputs or config.experts is not None or not config.tie_word_embeddings:
        raise ModelError("an assistant with inputs for each layer, experts or a head of its own is not supported")
    if any(attention.window == 1 for attention in config.attention.values()):
        raise ModelError("sliding_window must be at least 2, because an assistant does not see the newest token")
    # transformers does not bound an assistant's logits, whatever its config says.
    return replace(config, assistant=_assistant(fields, config.vocab_size), logit_softcap=0.0)


def _assistant(fields: Fields, vocab_size: int) -> Assistant:
    target_size = fields.size("backbone_hidden_size", 1536)
    if not fields.get("use_ordered_embeddings", False):
        return Assistant(target_size)
    centroids, best = fields.size("num_centroids", 2048), fields.size("centroid_intermediate_top_k", 32)
    if vocab_size % centroids or best > centroids:
        raise ModelError(
            f"vocab_size ({vocab_size}) must be a multiple of num_centroids ({centroids}), and "
            f"centroid_intermediate_top_k ({best}) must be at most num_centroids"
        )
    return Assistant(target_size, centroids, best)

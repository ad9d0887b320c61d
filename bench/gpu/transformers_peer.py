"""The same shapes in `transformers`: random weights, a static cache, compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.models.model_config import ModelConfig


class Peer:
    """A model of `transformers` with the shape of one of ours.

    Args:
        compiles: with torch.compile, as its documentation advises for a static cache.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, compiles: bool) -> None:
        import transformers

        self._device = device
        make = transformers.LlamaConfig if config.architecture == "LlamaForCausalLM" else transformers.Gemma3TextConfig
        own = make(**_fields(config))
        with torch.device(device):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(own, dtype=dtype).eval()
        self._config = own
        # The parts of a graph that cannot be recorded would run one by one.
        self._forward = torch.compile(self._model, mode="reduce-overhead") if compiles else self._model

    def prepare(self, requests: int, count: int, context: int) -> Callable[[], object]:
        """A pass of `count` tokens behind context - count others, whose cache may hold anything; greedy tokens."""
        import transformers

        cache = transformers.StaticCache(config=self._config, max_cache_len=context)
        ids = torch.arange(requests * count, device=self._device).view(requests, count) % self._config.vocab_size
        places = torch.arange(context - count, context, device=self._device)

        def run() -> object:
            # Each run writes to the same places again.
            for layer in cache.layers:
                _rewind(layer, context - count)
            out = self._forward(
                input_ids=ids,
                position_ids=places.unsqueeze(0).expand(requests, -1),
                cache_position=places,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            return out.logits.argmax(-1)

        return run


def _rewind(layer: Any, length: int) -> None:
    """Sets how many tokens a layer's cache believes to hold."""
    layer.cumulative_length.fill_(length)
    if hasattr(layer, "cumulative_length_int"):  # what the host knows of a sliding layer
        layer.cumulative_length_int = length


def _fields(config: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.architecture == "Gemma3ForCausalLM":
        kinds = [f"{kind}_attention" for kind in config.layer_types]
        fields |= {"layer_types": kinds, "sliding_window": config.sliding_window}
    return fields

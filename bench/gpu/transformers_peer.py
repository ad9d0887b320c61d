"""Models of `transformers` with the same shapes: random weights, a static cache, torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline.models.model_config import ModelConfig


class Peer:
    """A model of `transformers` with the shape of one of ours.

    Args:
        compiles: whether to use torch.compile, as the documentation of `transformers` advises for a static cache.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, compiles: bool) -> None:
        import transformers

        self._device = device
        make = transformers.LlamaConfig if config.architecture == "LlamaForCausalLM" else transformers.Gemma3TextConfig
        hf_config = make(**_fields(config))
        with torch.device(device):
            self._model: Any = transformers.AutoModelForCausalLM.from_config(hf_config, dtype=dtype).eval()
        self._config = hf_config
        # Without fullgraph=True, parts that cannot be recorded in a graph run one by one instead of failing.
        self._forward = torch.compile(self._model, mode="reduce-overhead") if compiles else self._model

    def prepare(self, requests: int, count: int, context: int) -> Callable[[], object]:
        """Return a function that computes `count` tokens after context - count others, and the greedy next tokens.

        The KV of the earlier tokens has arbitrary content.
        """
        import transformers

        cache = transformers.StaticCache(config=self._config, max_cache_len=context)
        ids = torch.arange(requests * count, device=self._device).view(requests, count) % self._config.vocab_size
        places = torch.arange(context - count, context, device=self._device)

        def run() -> object:
            # Each run writes to the same places of the cache.
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
    """Set the number of tokens that a layer's cache counts as filled."""
    layer.cumulative_length.fill_(length)
    if hasattr(layer, "cumulative_length_int"):  # the host's copy of the count, in sliding layers
        layer.cumulative_length_int = length


def _fields(config: ModelConfig) -> dict[str, Any]:
    full = config.attention["full"]
    fields: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": full.num_heads,
        "num_key_value_heads": full.num_kv_heads,
        "head_dim": full.head_dim,
        "max_position_embeddings": config.max_position,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if config.architecture == "Gemma3ForCausalLM":
        kinds = [f"{kind}_attention" for kind in config.layer_types]
        fields |= {"layer_types": kinds, "sliding_window": config.attention["sliding"].window}
    return fields

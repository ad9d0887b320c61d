"""The frame that all architectures share: an embedding, layers one after another, a norm and a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from paceline.core.kv_coding import KVCoding
from paceline.kernels.interface import ForwardInputs, Kernels, Logits, NormKind
from paceline.models.base import EncodedRows, Weights, kv_groups
from paceline.models.blocks import AttentionStep, Embedding, RMSNorm, tensor_name
from paceline.models.layers import Layer, run_layers
from paceline.models.model_config import ModelConfig
from paceline.models.rotary import Rotary

MakeLayer = Callable[[int, str], Layer]
"""A function that makes a layer from its number and the prefix of its tensors' names."""


OUTER = ("", "model.", "vlm.", "vlm.model.")
"""What may stand before the names of the parts of a model for several media."""
_MEDIA = tuple(
    f"{prefix}{part}."
    for prefix in OUTER
    for part in (
        *("vision_tower", "audio_tower", "visual", "vision_embedder", "multi_modal_projector"),
        *("embed_vision", "embed_audio"),
    )
)
"""Beginnings of the names of tensors for images and audio, which only encoders read."""
TEXT = (*(f"{prefix}language_model." for prefix in OUTER), "lm_head.", "vlm.lm_head.", "mtp.")
"""Beginnings of the names of tensors that encoders do not read: tensors of the text model, and of a head that
drafts.
"""


def text_place(weights: Weights) -> str:
    """Return the prefix of the text model's tensors. Inside a model for several media, it has one of two spellings. A
    checkpoint of the layers alone, without a head, has no prefix.
    """
    # All have this tensor. The embedding may be missing if it is the head's matrix.
    places = [f"{prefix}language_model{end}" for prefix in OUTER for end in ("", ".model")] + [""]
    return next((place for place in places if weights.has(tensor_name(place, "norm.weight"))), "model")


class Decoder:
    """An `Architecture` of transformer layers. A model file has a subclass that says how to make a layer.

    Args:
        norm_kind: kind of the norm after the last layer.
        embedding_scale: factor on the embeddings.
    """

    place: str
    """Prefix of the names of all tensors but the head's."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        make_layer: MakeLayer,
        norm_kind: NormKind = NormKind.ROUNDED,
        embedding_scale: float = 1.0,
    ) -> None:
        self.place = place = text_place(weights)
        self.unread: Sequence[str] = _MEDIA if place not in ("model", "") else ()
        self.config = config
        self.group_shapes, self.layer_groups = kv_groups(config)
        self._embedding = Embedding(config, weights, kernels, place)
        self._embedding_scale = embedding_scale
        layers = tensor_name(place, "layers")
        self._layers = [make_layer(layer, f"{layers}.{layer}") for layer in range(config.num_layers)]
        self._norm = RMSNorm(
            weights, tensor_name(place, "norm"), config.hidden_size, config.norm_eps, kernels, norm_kind
        )
        self._rotary = Rotary(config, self._embedding.device, kernels)

    def code_kv(self, coding: KVCoding) -> None:
        self.group_shapes, self.layer_groups = kv_groups(self.config, coding)

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._embedding.embed(token_ids, self._embedding_scale)

    def lookups(self, token_ids: Tensor, begin: int, layers: int | None) -> Sequence[Tensor]:
        return ()

    def encoded_inputs(self, token_ids: Tensor, positions: Tensor, encoded: EncodedRows) -> Sequence[Tensor]:
        return (self.embed(token_ids).index_copy_(0, encoded.places, encoded.values),)

    def forward(self, inputs: ForwardInputs, embedded: bool = False) -> Tensor:
        further, span = inputs.further, slice(inputs.begin, inputs.layers)
        first = further[0] if embedded else self.embed(inputs.token_ids)
        x = further[-1] if inputs.begin else first
        steps = self._attention_steps(first, inputs, further[1:] if embedded else further)
        return run_layers(self._layers[span], self._norm, x, inputs.caches[span], steps, inputs.taps, inputs.begin)

    def _attention_steps(
        self, embedded: Tensor, inputs: ForwardInputs, further: Sequence[Tensor]
    ) -> list[AttentionStep]:
        """Return the attention inputs of the layers of a pass.

        Args:
            embedded: [tokens, hidden], the first layer's input.
            further: `inputs.further` without the embedded tokens.
        """
        rotations, batch, span = self._rotary(inputs.positions), inputs.batch, slice(inputs.begin, inputs.layers)
        return [
            AttentionStep(rotations.get(kind), batch, batch.groups[group])
            for kind, group in zip(self.config.layer_types[span], self.layer_groups[span])
        ]

    def logits(self, hidden: Tensor) -> Logits:
        return self._embedding.logits(hidden)

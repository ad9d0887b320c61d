"""The text models of Qwen 3-VL: Qwen 3 whose positions have three dimensions, and to which encodings are added in
several layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.kernels.interface import ForwardInputs, Kernels
from paceline.models.base import EncodedRows, Weights
from paceline.models.blocks import AttentionStep
from paceline.models.decoder import Decoder
from paceline.models.llama import Llama
from paceline.models.model_config import ModelConfig
from paceline.models.qwen3_moe import Qwen3Moe
from paceline.models.rotary import Rotation


class ReadsGrids(Decoder):
    """A decoder with M-RoPE and deepstack.

    The three positions of a token differ only in images and videos. So a step without images is the same as in the text
    model. A step with images gets its angles, and the numbers that deepstack adds to each token, as inputs. Deepstack
    adds 0 to tokens of text, so their bits are the same in both kinds of steps.
    """

    def encoded_inputs(self, token_ids: Tensor, positions: Tensor, encoded: EncodedRows) -> Sequence[Tensor]:
        assert encoded.positions is not None
        first, *added = torch.split(encoded.values, self.config.hidden_size, dim=1)
        embedded = self.embed(token_ids)
        further = [
            embedded.new_zeros(embedded.shape).index_copy_(0, encoded.places, added_rows) for added_rows in added
        ]
        grids = positions.repeat(3, 1).index_copy_(1, encoded.places, encoded.positions)
        rotation = self._rotary.of_grids(grids)
        return embedded.index_copy_(0, encoded.places, first), rotation.cos, rotation.sin, *further

    def _attention_steps(
        self, embedded: Tensor, inputs: ForwardInputs, further: Sequence[Tensor]
    ) -> list[AttentionStep]:
        if not further:
            return super()._attention_steps(embedded, inputs, further)
        cos, sin, *added = further
        added_in, batch = dict(enumerate(added)), inputs.batch
        return [
            AttentionStep(Rotation(cos, sin), batch, batch.groups[group], added_in.get(layer))
            for layer, group in enumerate(self.layer_groups[: inputs.layers])
        ]


class Qwen3VL(ReadsGrids, Llama):
    """Qwen3VLForConditionalGeneration, without its encoder."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__(config, weights, kernels, head_norms=True)


class Qwen3VLMoe(ReadsGrids, Qwen3Moe):
    """Qwen3VLMoeForConditionalGeneration, without its encoder."""

    def __init__(self, config: ModelConfig, weights: Weights, kernels: Kernels) -> None:
        super().__init__(config, weights, kernels, fused=True)

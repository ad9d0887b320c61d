"""Layers, and the loop over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from paceline.kernels.caches import AnyCache
from paceline.kernels.interface import Kernels, NormKind, Taps
from paceline.models.base import Weights
from paceline.models.blocks import AttentionStep, RMSNorm
from paceline.models.model_config import ModelConfig


class Layer(Protocol):
    """A layer that adds to the residual stream."""

    norm: RMSNorm
    """The norm of the layer's input."""

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        """Return x after the layer, and `next_norm` of it.

        Args:
            x: [tokens, hidden], the residual stream.
            normed: `norm` of x.
            next_norm: the norm that the next layer, or the end of the model, applies to the result.
        """


Mixer = Callable[[Tensor, AnyCache, AttentionStep], Tensor]
"""Attention, or a recurrent mixer in place of attention: x [tokens, hidden] -> same shape."""
MLP = Callable[[Tensor], Tensor]
"""An MLP, or experts in place of it: x [tokens, hidden] -> same shape."""


class PreNormLayer:
    """A layer with one norm before its mixer and one before its MLP, as in Llama. It adds `AttentionStep.layer_input`
    to its result.

    Args:
        norm_kind: kind of both norms.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        place: str,
        kernels: Kernels,
        mixer: Mixer,
        mlp: MLP,
        norm_kind: NormKind = NormKind.ROUNDED,
    ) -> None:
        size, eps = config.hidden_size, config.norm_eps
        self.norm = RMSNorm(weights, f"{place}.input_layernorm", size, eps, kernels, norm_kind)
        self._mixer = mixer
        self._mlp_norm = RMSNorm(weights, f"{place}.post_attention_layernorm", size, eps, kernels, norm_kind)
        self._mlp = mlp

    def __call__(
        self, x: Tensor, normed: Tensor, next_norm: RMSNorm, cache: AnyCache, step: AttentionStep
    ) -> tuple[Tensor, Tensor]:
        x, normed = self._mlp_norm.of_sum(x, self._mixer(normed, cache, step))
        x, normed = next_norm.of_sum(x, self._mlp(normed))
        return (x, normed) if step.layer_input is None else next_norm.of_sum(x, step.layer_input)


def run_layers(
    layers: Sequence[Layer],
    last_norm: RMSNorm,
    x: Tensor,
    caches: Sequence[AnyCache],
    steps: Sequence[AttentionStep],
    taps: Taps | None,
    begin: int = 0,
) -> Tensor:
    """Run layers one after another and return [tokens, hidden] after `last_norm`.

    One pass over memory adds the output of a layer to the residual stream and applies the next layer's norm.

    Args:
        x: [tokens, hidden], the embedded tokens, or the residual stream after `begin` layers.
        caches: one for each layer.
        steps: the attention inputs of each layer.
        taps: receives the hidden states after chosen layers; None if there are no taps.
        begin: number of the model's layers before `layers`.
    """
    taps = taps or Taps()
    taps.see(begin, x)
    norms = [*(layer.norm for layer in layers[1:]), last_norm]
    normed = layers[0].norm(x)
    for depth, (layer, next_norm, cache, step) in enumerate(zip(layers, norms, caches, steps), begin + 1):
        x, normed = layer(x, normed, next_norm, cache, step)
        taps.see(depth, x)
    return normed

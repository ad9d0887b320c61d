"""Building blocks of layers with experts. A model file makes a `Router` and `ExpertWeights` from its checkpoint, and a
`MixtureOfExperts` of both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.experts import Routing
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import Kernels
from paceline.kernels.packed_weight import PackedWeight
from paceline.models.base import FusedExperts, Weights
from paceline.models.blocks import GatedMLP, Linear
from paceline.models.model_config import Experts, ModelConfig


class Router:
    """Chooses each token's experts. Its matrix is never quantized, because a small error could change the choice.

    Args:
        weight: [experts, hidden], packed.
        bias: [experts], in the model's dtype.
        correction, scales: the arguments of `ExpertKernels.choose_experts`.
    """

    def __init__(
        self,
        weight: PackedWeight,
        routing: Routing,
        kernels: Kernels,
        bias: Tensor | None = None,
        correction: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> None:
        self._weight = weight
        self._routing = routing
        self._kernels = kernels
        self._bias = bias
        self._correction = correction
        self._scales = scales

    @classmethod
    def take(
        cls,
        config: ModelConfig,
        weights: Weights,
        place: str,
        kernels: Kernels,
        correction: Tensor | None = None,
        scales: Tensor | None = None,
    ) -> Router:
        """Take the router's matrix from a checkpoint, and its bias if the experts have biases."""
        sizes = experts_of(config)
        weight = kernels.pack(weights.take(f"{place}.weight", sizes.count, config.hidden_size))
        bias = weights.take(f"{place}.bias", sizes.count) if sizes.bias else None
        return cls(weight, sizes.routing, kernels, bias, correction, scales)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of x [tokens, hidden] and their weights; see `ExpertKernels.choose_experts`."""
        logits = self._kernels.router_logits(x, self._weight, self._bias)
        return self._kernels.choose_experts(logits, self._routing, self._correction, self._scales)


def experts_of(config: ModelConfig) -> Experts:
    """Return the sizes of the experts of a model, which must have experts."""
    assert config.experts is not None
    return config.experts


def separate_experts(
    config: ModelConfig,
    weights: Weights,
    place: str,
    kernels: Kernels,
    names: Sequence[str] = ("gate_proj", "up_proj", "down_proj"),
) -> ExpertWeights:
    """Take experts whose matrices are tensors of their own, such as `PLACE.7.gate_proj.weight`.

    Args:
        names: the names of gate, up and down.
    """
    sizes, hidden = experts_of(config), config.hidden_size
    shapes = ((sizes.inner_size, hidden), (sizes.inner_size, hidden), (hidden, sizes.inner_size))
    # All matrices of one expert after another, which is the order in which a pass reads them.
    packed = [
        [weights.take_packed(f"{place}.{expert}.{name}.weight", *shape) for name, shape in zip(names, shapes)]
        for expert in range(sizes.count)
    ]
    gate, up, down = zip(*packed)
    return kernels.index_experts(ExpertWeights(gate, up, down, sizes.activation))


def fused_experts(
    config: ModelConfig,
    weights: Weights,
    gate_up: str,
    down: str,
    kernels: Kernels,
    transposed: bool = False,
    interleaved: bool = False,
) -> ExpertWeights:
    """Take experts that share two tensors: `gate_up`, which holds gate and up, and `down`.

    Biases, if there are some, are [experts, outputs] and named like these tensors with `_bias` after them.

    Args:
        transposed, interleaved: the fields of `FusedExperts`. Only gate and up can be interleaved.
    """
    sizes, hidden = experts_of(config), config.hidden_size
    inner = sizes.inner_size
    outer = FusedExperts(sizes.count, (inner, inner), hidden, transposed, interleaved)
    gates, ups = weights.take_packed_experts(gate_up, outer)
    (downs,) = weights.take_packed_experts(down, FusedExperts(sizes.count, (hidden,), inner, transposed))
    if not sizes.bias:
        return kernels.index_experts(ExpertWeights(gates, ups, downs, sizes.activation))
    both = weights.take(f"{gate_up}_bias", sizes.count, 2 * inner)
    biases = (both[:, ::2], both[:, 1::2]) if interleaved else torch.split(both, inner, dim=1)
    gate_bias, up_bias = (bias.contiguous() for bias in biases)
    down_bias = weights.take(f"{down}_bias", sizes.count, hidden)
    return kernels.index_experts(ExpertWeights(gates, ups, downs, sizes.activation, gate_bias, up_bias, down_bias))


def stored_experts(config: ModelConfig, weights: Weights, place: str, kernels: Kernels) -> ExpertWeights:
    """Take experts that share the tensors `PLACE.gate_up_proj` and `PLACE.down_proj`, or else have tensors of their
    own.
    """
    if weights.has(f"{place}.gate_up_proj"):
        return fused_experts(config, weights, f"{place}.gate_up_proj", f"{place}.down_proj", kernels)
    return separate_experts(config, weights, place, kernels)


class MixtureOfExperts:
    """A layer's experts, in place of an MLP, with an optional shared expert beside them.

    Args:
        shared: an expert that computes all tokens; None if there is none.
        shared_gate: a layer with one output, whose sigmoid is a factor on the shared expert's result.
    """

    def __init__(
        self,
        router: Router,
        experts: ExpertWeights,
        kernels: Kernels,
        shared: GatedMLP | None = None,
        shared_gate: Linear | None = None,
    ) -> None:
        self._router = router
        self._experts = experts
        self._kernels = kernels
        self._shared = shared
        self._shared_gate = shared_gate

    def __call__(self, x: Tensor) -> Tensor:
        ids, weights = self._router(x)
        found = self._kernels.experts(x, ids, weights, self._experts)
        if self._shared is None:
            return found
        if self._shared_gate is None:
            return self._kernels.add(found, self._shared(x))
        return self._kernels.add_gated(found, self._shared(x), self._shared_gate(x))

"""The rule by which a layer with experts chooses some of them for each token. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ExpertActivation = Literal["silu", "gelu_tanh", "clamped_swiglu"]
"""act(gate, up) of an expert: silu(gate) * up; gelu(gate) * up in gelu's tanh form; or GPT-OSS's
gate * sigmoid(1.702 * gate) * (up + 1), with gate bounded above by 7 and up by -7 and 7."""


@dataclass(frozen=True, slots=True)
class Routing:
    """The rule by which a token's experts and their weights follow from its router logits.

    A softmax over the logits of the chosen experts, as in Mixtral, Granite and GPT-OSS, is the same as a softmax over
    all logits with `normalize`.
    """

    top_k: int
    """Number of experts that compute each token."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function from logits to scores, which are the weights of experts."""
    normalize: bool = False
    """Whether the weights of the chosen experts are divided by their sum."""
    groups: int = 1
    """Number of equal groups into which the experts are divided, in order. Only experts of the `top_groups` best groups
    can be chosen.
    """
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """The score of a group: the score of its best expert, or the sum of the scores of its two best experts."""
    factor: float = 1.0
    """Factor by which the weights of all chosen experts are multiplied."""

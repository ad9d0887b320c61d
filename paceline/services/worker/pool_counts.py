"""What a worker has pooled since its start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.core.metrics import Family, Sample

POOLED_INPUTS = Family("pooled_inputs", "Inputs whose vectors, scores or labels were computed")
POOLED_TOKENS = Family("pooled_tokens", "Tokens of these inputs")


@dataclass(slots=True)
class PoolCounts:
    """Inputs with results, and their tokens."""

    inputs: int = 0
    tokens: int = 0

    def add(self, inputs: int, tokens: int) -> None:
        self.inputs += inputs
        self.tokens += tokens

    def samples(self) -> Iterator[Sample]:
        yield Sample("pooled_inputs", self.inputs, POOLED_INPUTS)
        yield Sample("pooled_tokens", self.tokens, POOLED_TOKENS)

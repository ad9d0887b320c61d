"""Inputs of pooling that go to one worker together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from paceline.core.pooling import PoolTask
from paceline.proto import common_pb2

TASKS: dict[PoolTask, common_pb2.PoolTask.ValueType] = {
    "embed": common_pb2.POOL_TASK_EMBED,
    "token_embed": common_pb2.POOL_TASK_TOKEN_EMBED,
    "classify": common_pb2.POOL_TASK_CLASSIFY,
    "token_classify": common_pb2.POOL_TASK_TOKEN_CLASSIFY,
    "score": common_pb2.POOL_TASK_SCORE,
    "sparse": common_pb2.POOL_TASK_SPARSE,
}

PoolRole: TypeAlias = Literal["query", "document"]
ROLES: dict[PoolRole | None, common_pb2.PoolRole.ValueType] = {
    None: common_pb2.POOL_ROLE_UNKNOWN,
    "query": common_pb2.POOL_ROLE_QUERY,
    "document": common_pb2.POOL_ROLE_DOCUMENT,
}
FLOAT_BYTES = 4
"""Bytes of a value in the rows of a pooled input."""


@dataclass(frozen=True, slots=True)
class PoolInput:
    """One input as a worker computes it."""

    token_ids: Sequence[int]
    second_start: int = 0
    """Number of tokens before the second text of a pair; 0 if the input is a single text."""
    prompt_tokens: int = 0
    """Number of tokens at the front that are an instruction."""


@dataclass(frozen=True, slots=True)
class PoolBundle:
    """Inputs that go to one worker in one call. None takes the model's own setting."""

    task: PoolTask
    inputs: Sequence[PoolInput]
    dimensions: int = 0
    """Length to which vectors are cut; 0 for the model's own."""
    normalize: bool | None = None
    activation: bool | None = None
    role: PoolRole | None = None
    """Whether the inputs are queries or documents, for models whose vectors of tokens differ between the two."""

    def work(self, indices: Iterable[int]) -> common_pb2.PoolWork:
        """Return the message for the inputs with these indices, in this order."""
        work = common_pb2.PoolWork(
            task=TASKS[self.task],
            dimensions=self.dimensions,
            normalize=self.normalize,
            activation=self.activation,
            role=ROLES[self.role],
        )
        for index in indices:
            own = self.inputs[index]
            work.inputs.add(token_ids=own.token_ids, second_start=own.second_start, prompt_tokens=own.prompt_tokens)
        return work

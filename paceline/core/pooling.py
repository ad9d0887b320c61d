"""What can be computed from the hidden states of an input: the tasks of models for embeddings, ranking and labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

PoolTask: TypeAlias = Literal["embed", "token_embed", "classify", "token_classify", "score", "sparse"]
"""A task of pooling.

embed: one vector of the whole input. token_embed: a vector of each token that the model keeps. classify: a number for
each label. token_classify: a number for each label and token. score: one number that says how well two texts fit
together. sparse: one weight of each token of the input, 0 for tokens that do not count.
"""
PoolRole: TypeAlias = Literal["query", "document"]
POOL_TASKS: tuple[PoolTask, ...] = get_args(PoolTask)

ROW_TASKS: frozenset[PoolTask] = frozenset({"token_embed", "token_classify", "sparse"})
"""Tasks whose result has a row for each token. The result of the other tasks is one row."""


@dataclass(frozen=True, slots=True)
class PoolWish:
    """What to compute from inputs. None takes what the checkpoint says."""

    task: PoolTask
    dimensions: int | None = None
    """Length to which vectors are cut before they get the length 1."""
    normalize: bool | None = None
    """Whether vectors get the length 1."""
    activation: bool | None = None
    """Whether numbers of labels become probabilities; None for yes."""
    role: PoolRole | None = None
    """What inputs are, for models whose vectors of tokens differ between the two; None for documents."""

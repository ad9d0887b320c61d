"""What can be computed from the hidden states of an input: the tasks of models for embeddings, ranking and labels."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

PoolTask: TypeAlias = Literal["embed", "token_embed", "classify", "token_classify", "score", "sparse"]
"""A task of pooling.

embed: one vector of the whole input. token_embed: a vector of each token that the model keeps. classify: a number for
each label. token_classify: a number for each label and token. score: one number that says how well two texts fit
together. sparse: one weight of each token of the input, 0 for tokens that do not count.
"""
POOL_TASKS: tuple[PoolTask, ...] = get_args(PoolTask)

ROW_TASKS: frozenset[PoolTask] = frozenset({"token_embed", "token_classify", "sparse"})
"""Tasks whose result has a row for each token. The result of the other tasks is one row."""

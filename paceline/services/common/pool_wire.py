"""Conversion between what clients wish of pooling and protobuf messages."""

from __future__ import annotations

from paceline.core.errors import InvalidRequestError
from paceline.core.pooling import PoolRole, PoolTask, PoolWish
from paceline.proto import common_pb2 as pb

FLOAT_BYTES = 4
"""Bytes of a value in `Pooled.data`."""

_TASKS: dict[PoolTask, pb.PoolTask.ValueType] = {
    "embed": pb.POOL_TASK_EMBED,
    "token_embed": pb.POOL_TASK_TOKEN_EMBED,
    "classify": pb.POOL_TASK_CLASSIFY,
    "token_classify": pb.POOL_TASK_TOKEN_CLASSIFY,
    "score": pb.POOL_TASK_SCORE,
    "sparse": pb.POOL_TASK_SPARSE,
}
_ROLES: dict[PoolRole | None, pb.PoolRole.ValueType] = {
    None: pb.POOL_ROLE_UNKNOWN,
    "query": pb.POOL_ROLE_QUERY,
    "document": pb.POOL_ROLE_DOCUMENT,
}


def wish_to_pb(wish: PoolWish) -> pb.PoolWork:
    """Return work without inputs."""
    return pb.PoolWork(
        task=_TASKS[wish.task],
        dimensions=wish.dimensions or 0,
        normalize=wish.normalize,
        activation=wish.activation,
        role=_ROLES[wish.role],
    )


def wish_from_pb(work: pb.PoolWork) -> PoolWish:
    """Return what some work computes. Raises InvalidRequestError if this release does not know its task."""
    task = next((ours for ours, theirs in _TASKS.items() if theirs == work.task), None)
    if task is None:
        raise InvalidRequestError(f"this worker does not know the task {work.task} of pooling")
    return PoolWish(
        task,
        dimensions=work.dimensions or None,
        normalize=work.normalize if work.HasField("normalize") else None,
        activation=work.activation if work.HasField("activation") else None,
        role=next((ours for ours, theirs in _ROLES.items() if theirs == work.role), None),
    )

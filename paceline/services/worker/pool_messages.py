"""Messages with the results of work of the kind POOL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.models.pooling.model import PoolResult
from paceline.proto import worker_pb2

MESSAGE_BYTES = 16 << 20
"""Size of results, in bytes, from which a message is full. A message has at least one input."""


def to_messages(first: int, results: Sequence[PoolResult]) -> Iterator[worker_pb2.Pooled]:
    """Yield messages with the results of inputs from index `first` on."""
    message, parts, size = worker_pb2.Pooled(first=first), list[torch.Tensor](), 0
    for index, result in enumerate(results, start=first):
        bytes_ = 0 if result.values is None else result.values.nbytes
        if message.rows and size + bytes_ > MESSAGE_BYTES:
            message.data = _bytes_of(parts)
            yield message
            message, parts, size = worker_pb2.Pooled(first=index), [], 0
        if result.values is None:
            message.rows.append(0)
            message.errors.add(input=index, message=result.error)
            continue
        message.rows.append(len(result.values))
        message.dim = result.values.shape[1]
        parts.append(result.values)
        size += bytes_
    message.data = _bytes_of(parts)
    yield message


def _bytes_of(parts: Sequence[torch.Tensor]) -> bytes:
    """Return fp32 rows as bytes, little endian, in C order."""
    return torch.cat(list(parts)).numpy().astype("<f4", copy=False).tobytes() if parts else b""

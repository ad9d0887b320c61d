"""Redis streams of hints: members' beats, and block events. Others may write to Redis, so no entry must stop a stream.

Ids of entries are times on the clock of Redis. Redis adds no entry after one with the largest possible id. Then the
next writer removes the stream, which begins again, and readers notice that its newest id is smaller than what they have
read.
"""

from __future__ import annotations

from typing import cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

Entry = tuple[bytes, dict[bytes, bytes]]
"""An entry of a stream: its id and its fields."""

_UNUSABLE = ("equal or smaller than", "exhausted", "WRONGTYPE")
"""Parts of the errors of Redis for a write to a key that can never succeed."""


async def newest_id(client: Redis, stream: str) -> bytes:
    """Return the id of a stream's newest entry; "0-0" if there is none. Raises RedisError."""
    entries = cast(list[Entry], await client.xrevrange(stream, count=1))
    return entries[0][0] if entries else b"0-0"


def comes_before(one: bytes, other: bytes) -> bool:
    """Return whether the entry with the id `one` comes before that with the id `other`."""
    return _place(one) < _place(other)


def _place(entry: bytes) -> tuple[int, ...]:
    """Return the id of an entry as numbers, which compare in the order of the stream."""
    return tuple(map(int, entry.split(b"-")))


def oldest_kept(newest: bytes, seconds: float) -> str | None:
    """Return the least id of entries that are at most `seconds` older than the entry `newest`; older ones are trimmed.

    A fixed number of entries would cover hours in a small fleet, and too few seconds in a large one. Ids are times on
    the clock of Redis, so clocks of the writers do not matter. Returns None, which trims nothing, if `newest` is empty.
    """
    return str(max(0, _place(newest)[0] - int(seconds * 1000))) if newest else None


async def remove_unusable(client: Redis, key: str, error: ResponseError) -> None:
    """Remove a key to which nothing can be written any more, so that the next write succeeds. Raises RedisError.

    The content is lost, but it consists of hints. If two writers remove the key, some new hints are lost as well.

    Args:
        error: the error of a write to the key. After other errors, the key stays as it is.
    """
    if any(part in str(error) for part in _UNUSABLE):
        await client.delete(key)

"""Redis streams of hints: members' beats, and block events. Others may write to Redis, so no entry must stop a stream.

Ids of entries are times on the clock of Redis. Redis adds no entry after one with the largest possible id. Then the
next writer removes the stream, which begins again, and readers notice that its newest id is smaller than what they have
read.

Block events are only a hint: the stream may be lost at any time, and no service depends on it. Events of one pool are
numbered without gaps, so a reader notices when it has missed events. If the cluster has a secret, an entry has a keyed
hash of its content, so that others who can write to Redis do not mislead the routing. An entry that is written again is
of no use to them, because its events are known.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from paceline.core.block_pool import BlockEvent
from paceline.core.context import HASH_BYTES
from paceline.services.common.secret import Secret, is_one_of

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


_EVENT = struct.Struct(f"<BB{HASH_BYTES}s")
"""Binary format of an event: 1 if the block was stored or 0 if it was removed, the block's group, the block's hash."""


def blocks_stream(cluster: str) -> str:
    """Return the Redis key of a cluster's stream. Its entries are made by `BlockBatch.to_entry`."""
    return f"paceline:{cluster}:blocks"


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Consecutive block events of one host."""

    host_id: str
    pool: str
    """Id of the pool of memory that contains the blocks. A new pool is empty, and its events are numbered from 0."""
    first: int
    """Number of the batch's first event in its pool."""
    events: tuple[BlockEvent, ...]

    def to_entry(self, key: bytes = b"") -> dict[str, str | int | bytes]:
        """Return the batch as an entry of the stream.

        Args:
            key: the key of the entry's hash; empty to write none.
        """
        packed = b"".join(_EVENT.pack(event.op == "stored", event.group, event.hash) for event in self.events)
        hashed: dict[str, str | int | bytes] = {"mac": self._mac(key, packed)} if key else {}
        return {"host": self.host_id, "pool": self.pool, "first": self.first, "events": packed, **hashed}

    @staticmethod
    def from_entry(entry: Mapping[bytes, bytes], keys: Sequence[bytes] = ()) -> BlockBatch | None:
        """Decode an entry of the stream; None if another program has written it.

        Args:
            keys: keys with which the hash of the entry may be made; none if entries need no hash.
        """
        try:
            packed = entry[b"events"]
            events = tuple(
                BlockEvent("stored" if stored else "removed", group, digest)
                for stored, group, digest in _EVENT.iter_unpack(packed)
            )
            batch = BlockBatch(entry[b"host"].decode(), entry[b"pool"].decode(), int(entry[b"first"]), events)
        except (LookupError, ValueError, struct.error):
            return None
        is_ours = not keys or is_one_of(entry.get(b"mac", b""), (batch._mac(key, packed) for key in keys))
        return batch if is_ours else None

    def _mac(self, key: bytes, packed: bytes) -> bytes:
        # The lengths of the parts are in the text, so that no two batches have the same text.
        host, pool = self.host_id.encode(), self.pool.encode()
        return hmac.digest(key, b"%d %d %d\0%s%s%s" % (len(host), len(pool), self.first, host, pool, packed), "sha256")


def block_keys(secret: Secret, cluster: str) -> tuple[bytes, ...]:
    """Return the keys of entries in a cluster's stream, own ones first; none if the cluster has no secret."""
    return secret.keys(f"block events of {cluster}") if secret else ()

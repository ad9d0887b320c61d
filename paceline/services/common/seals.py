"""Seals on single values in Redis, so that write access to Redis is not enough to make or change one.

A sealed value has the time at which it was written, and a keyed hash (HMAC-SHA-256) of its key in Redis, of this time
and of the value. So it is of no use at another key. A seal does not show that a value is the newest one, because others
can write back what was there before. So readers compare the times of what they have read.

Values are plain strings of Redis and are read with MGET, which takes a key of another type for an empty one. So no
type of a key stops a reader.
"""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Iterable
from typing import NamedTuple, cast

from redis.asyncio import Redis

from paceline.services.common.secret import Secret, is_one_of

_MOST_DIGITS = 19
"""Largest number of digits of a time in nanoseconds since 1970."""
_NO_HASH = b"-"

log = logging.getLogger(__name__)


async def read_values(client: Redis, keys: Iterable[str]) -> list[bytes | None]:
    """Return what Redis has at these keys; None where it has no string. Raises RedisError."""
    return cast(list[bytes | None], await client.mget(list(keys)))


class Opened(NamedTuple):
    """A value whose seal is right."""

    value: bytes
    stamp: int
    """Time at which it was written, in nanoseconds since 1970 on the writer's clock."""

    @property
    def age_seconds(self) -> float:
        """Seconds since it was written; negative if the writer's clock is ahead of ours."""
        return (time.time_ns() - self.stamp) / 1e9


class Seal:
    """Seals values that services of a cluster write to Redis for each other, and opens those that it reads.

    Without a secret, values only get the time, and every value with a time is taken.
    """

    def __init__(self, secret: Secret) -> None:
        self._keys = secret.keys("values in Redis") if secret else ()
        """Keys of accepted hashes. Own hashes are made with the first one. There are none without a secret."""
        self._has_told = False

    def close(self, key: str, value: bytes, after: int = 0) -> bytes:
        """Return a value with its seal.

        Args:
            key: the key in Redis at which the value will be.
            after: a time in nanoseconds since 1970. The time of the value will be later, whatever the clock says.
        """
        stamp = max(time.time_ns(), after + 1)
        mac = self._mac(self._keys[0], key, value, stamp) if self._keys else _NO_HASH
        return b"%s %d %s" % (value, stamp, mac)

    def open(self, key: str, sealed: bytes | None) -> Opened | None:
        """Return the value that a key in Redis has; None if it has none that a service of this cluster has written."""
        if sealed is None:
            return None
        parts = sealed.rsplit(b" ", 2)
        if len(parts) == 3 and parts[1].isdigit() and len(parts[1]) <= _MOST_DIGITS:
            opened = Opened(parts[0], int(parts[1]))
            if not self._keys or is_one_of(parts[2], (self._mac(each, key, *opened) for each in self._keys)):
                return opened
        if not self._has_told:
            self._has_told = True
            log.warning(
                "what Redis has at %s is ignored, because it is not sealed with the secret of this cluster. If a "
                "service of this cluster has written it, give it the same --auth-token-file. If not, others can write "
                "to this Redis: give it a password (--redis-password-file). Further ones are not told",
                key[:100],
            )
        return None

    @staticmethod
    def _mac(secret: bytes, key: str, value: bytes, stamp: int) -> bytes:
        return hmac.digest(secret, b"%20d%s\0%s" % (stamp, key.encode(), value), "sha256").hex().encode()

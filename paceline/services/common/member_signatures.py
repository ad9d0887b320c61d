"""Signatures of members in Redis, so that write access to Redis is not enough to add, change or bring back a member.

A member is written with a *mark*: the time at which it is written, and a keyed hash (HMAC-SHA-256) of this time, the
member's version, its cluster and its name. So a mark is useless for another value, name or cluster. The time of a
member's marks must grow: a reader ignores marks that are older than one that it has read, and accepts the same mark
only for the TTL of a member in Redis. A reader that has just started checks the time against its own clock.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from paceline.services.common.auth import CLOCK_SECONDS
from paceline.services.common.secret import Secret, is_one_of

TTL_SECONDS = 5.0
"""Time after which a member expires in Redis unless it is written again, in seconds."""

_MARK = struct.Struct(">Q32s")
"""Binary format of a mark: nanoseconds since 1970, and the keyed hash."""
_FIELD = bytes((0xE2, 0x01, _MARK.size))
"""First bytes of the field `mark` of a protobuf Member. It is the last field of a signed value."""
_VERSION_BYTES = 16
_FRESH_SECONDS = TTL_SECONDS + CLOCK_SECONDS
"""Largest age of the first mark of a member that a reader accepts, in seconds by the reader's own clock."""

log = logging.getLogger(__name__)


def version_of(member: bytes) -> bytes:
    """Return the version of a serialized member, which is a digest of it."""
    return hashlib.blake2b(member, digest_size=_VERSION_BYTES).digest()


class _Newest(NamedTuple):
    stamp: int
    """The time in a member's newest mark, in nanoseconds since 1970 on the writer's clock."""
    since: float
    """Instant at which this mark was first read, on time.monotonic()."""


class MemberSignatures:
    """Signs the members that one service writes, and checks the members that it reads.

    Without a secret, members are not signed, and all members are accepted.

    Args:
        count_ignored: called for each value and beat that is ignored.
    """

    def __init__(self, secret: Secret, cluster: str, count_ignored: Callable[[], object] = lambda: None) -> None:
        self._keys = secret.keys("members in Redis") if secret else ()
        """Keys of accepted marks. Own marks are made with the first one. There are none without a secret."""
        self._cluster = cluster.encode()
        self._stamp = 0
        """The time in the newest mark that this service has written."""
        self._newest: dict[str, _Newest] = {}
        self._sweep_at = time.monotonic()
        """Next instant at which marks of members that are no longer read are dropped, on time.monotonic()."""
        self._told: set[str] = set()
        """Kinds of signature faults that have been logged already."""
        self._count_ignored = count_ignored

    def sign(self, name: str, member: bytes) -> tuple[bytes, bytes]:
        """Sign a member. Return its value for Redis, and the text of its beat.

        Args:
            member: the member as a protobuf message.
        """
        version = version_of(member)
        if not self._keys:
            return member, version
        self._stamp = max(self._stamp + 1, time.time_ns())
        mark = _MARK.pack(self._stamp, self._mac(self._keys[0], name, version, self._stamp))
        return member + _FIELD + mark, version + mark

    def open(self, name: str, value: bytes) -> bytes | None:
        """Check a value from Redis and return the member in it; None if its mark is missing, wrong or too old."""
        if not self._keys:
            return value
        end = len(value) - _MARK.size
        is_signed = value[max(0, end - len(_FIELD)) : max(0, end)] == _FIELD
        member, mark = (value[: end - len(_FIELD)], value[end:]) if is_signed else (value, b"")
        return member if self._is_taken(name, version_of(member), mark) else None

    def version(self, name: str, beat: bytes) -> bytes | None:
        """Check a beat and return the version of the member's value in it; None if its mark is wrong or too old."""
        version, mark = beat[:_VERSION_BYTES], beat[_VERSION_BYTES:]
        return version if not self._keys or self._is_taken(name, version, mark) else None

    def _mac(self, key: bytes, name: str, version: bytes, stamp: int) -> bytes:
        # The parts before the name have a fixed length, or are this cluster's own.
        text = b"%16s%20d%s\0%s" % (version, stamp, self._cluster, name.encode())
        return hmac.digest(key, text, "sha256")

    def _is_taken(self, name: str, version: bytes, mark: bytes) -> bool:
        if len(mark) != _MARK.size:
            return self._ignore(name, "it is not signed")
        stamp, mac = _MARK.unpack(mark)
        if not is_one_of(mac, (self._mac(key, name, version, stamp) for key in self._keys)):
            return self._ignore(name, "it is not signed with the secret of this cluster")
        if not self._is_fresh(name, stamp):
            return self._ignore(name, "its signature is old, or was made by a clock that differs from ours")
        return True

    def _is_fresh(self, name: str, stamp: int) -> bool:
        """Return whether a member's mark is new enough, and remember the newest mark.

        Args:
            stamp: the time in the mark, in nanoseconds since 1970.
        """
        now = time.monotonic()
        newest = self._newest.get(name, _Newest(0, now))
        if stamp <= newest.stamp:
            return stamp == newest.stamp and now - newest.since < TTL_SECONDS
        if abs(time.time_ns() - stamp) > _FRESH_SECONDS * 1e9:
            return False
        if now >= self._sweep_at:
            # Marks of forgotten members are refused only by the clock, and their clocks may be ahead of ours.
            kept = now - 2 * _FRESH_SECONDS
            self._newest = {other: known for other, known in self._newest.items() if known.since >= kept}
            self._sweep_at = now + 2 * _FRESH_SECONDS
        self._newest[name] = _Newest(stamp, now)
        return True

    def _ignore(self, name: str, reason: str) -> bool:
        self._count_ignored()
        if reason not in self._told:
            self._told.add(reason)
            log.warning(
                "what Redis says of %r is ignored, because %s. If it is a service of this cluster, give it the same "
                "--auth-token-file, set its clock, and update it if it is of an earlier release. If not, others can "
                "write to this Redis: give it a password (--redis-password-file). Further ones are only counted",
                name[:100],
                reason,
            )
        return False


UNSIGNED = MemberSignatures(Secret(), "")
"""Signs nothing and accepts everything, as in a cluster without a secret."""

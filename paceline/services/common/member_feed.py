"""News of a cluster's members: which members have sent a heartbeat, which are silent, and which have new figures.

The cost of a reading grows with the news, not with the number of members. A beat contains the version of a member's
value, and only values with a new version are read. A lost beat does no harm, because the next beat has the same
content. Members of earlier releases write no beats, so their values are read each time. Values and beats that no
service of this cluster has signed are ignored. A member's notice that it leaves needs no signature: if the notice is
forged, the member still answers health checks and stays.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

from redis.asyncio import Redis

from paceline.services.common.member_signatures import TTL_SECONDS, MemberSignatures, version_of
from paceline.services.common.registry import (
    HEARTBEAT_SECONDS,
    LEFT,
    Member,
    beats_key,
    member_key,
    names_key,
    read_values,
)
from paceline.services.common.streams import Entry, comes_before, newest_id

SILENT_SECONDS = TTL_SECONDS - HEARTBEAT_SECONDS
"""Time without a heartbeat after which a member is no longer listed, in seconds. It is shorter than the TTL, so that
there is time to find the reason of the silence before the member's value expires."""
_SCAN_SECONDS = 5.0
"""Interval between two searches for members of earlier releases while no such member is known, in seconds."""
_ANSWER_SECONDS = 1.0
_MOST = 200
"""Largest number of beats or values in one answer of Redis, so that reading the answer does not delay other tasks."""

T = TypeVar("T")


@dataclass(slots=True)
class News:
    """Changes of members since the last reading, or a part of these changes."""

    changed: list[Member] = field(default_factory=list)
    """Members that are new, and members with new figures."""
    heard: list[str] = field(default_factory=list)
    """Names of members that have sent a heartbeat."""
    unlisted: list[str] = field(default_factory=list)
    """Names of members that have removed themselves from Redis, or that have been silent for too long."""


class MemberFeed:
    """Reads the news of one cluster's members. `read` must not be called twice at the same time."""

    def __init__(self, client: Redis, cluster: str, signatures: MemberSignatures) -> None:
        self._client = client
        self._cluster = cluster
        self._signatures = signatures
        self._last = b""
        """Id of the newest beat that was read."""
        self._versions: dict[str, bytes] = {}
        """Version of each member's value as it was last read."""
        self._heard: dict[str, float] = {}
        """Time of the last heartbeat of each listed member, on time.monotonic()."""
        self._mute: set[str] = set()
        """Names of members that write no beats."""
        self._ended: set[str] = set()
        """Names of members that have ended and have sent no heartbeat since. Redis keeps the value of a killed process
        for a while. This value must not count as news, so these members' versions are kept until the value is gone.
        """
        self._scan_at = 0.0
        """Instant at which the set of names has to be read again, on time.monotonic()."""
        self._answers_since: float | None = None
        """Instant since which Redis has answered each request; None if it did not answer the last one."""

    def forget(self, name: str) -> None:
        """Forget a member that has ended, so that it is new if it sends a heartbeat again."""
        self._heard.pop(name, None)
        if name in self._mute:
            self._mute.discard(name)
            self._forget_value(name)
        elif name in self._versions:
            self._ended.add(name)

    async def read(self, take: Callable[[News], object]) -> None:
        """Read all news since the last call, and call `take` with each part of it. The first call reads all members.

        Raises RedisError, OSError or TimeoutError if Redis does not answer. Parts that `take` has already received are
        not repeated.
        """
        try:
            await self._read(take)
        except BaseException:
            self._answers_since = None
            raise
        now = time.monotonic()
        self._answers_since = self._answers_since or now
        if now - self._answers_since >= SILENT_SECONDS:
            silent = [name for name, heard in self._heard.items() if now - heard >= SILENT_SECONDS]
            take(self._noted(News(unlisted=silent)))

    async def _read(self, take: Callable[[News], object]) -> None:
        if not self._last:
            self._last = await self._newest()
        while beats := await self._next_beats():
            take(self._noted(await self._news(beats)))
            self._last = beats[-1][0]
            if len(beats) < _MOST:
                break
        if self._mute or time.monotonic() >= self._scan_at:
            await self._scan(take)
            self._scan_at = time.monotonic() + _SCAN_SECONDS * random.uniform(0.8, 1.2)

    def _noted(self, news: News) -> News:
        """Remember which members have sent a heartbeat in this news. Return the news unchanged."""
        self._heard.update(dict.fromkeys(news.heard, time.monotonic()))
        for name in news.unlisted:
            self._heard.pop(name, None)
        return news

    def _forget_value(self, name: str) -> None:
        self._ended.discard(name)
        self._versions.pop(name, None)

    # ---- beats

    async def _newest(self) -> bytes:
        """Return the id of the newest beat in the stream."""
        return await _answer(newest_id(self._client, beats_key(self._cluster)))

    async def _next_beats(self) -> list[Entry]:
        reply = await _answer(self._client.xread({beats_key(self._cluster): self._last}, count=_MOST))
        streams = cast(list[tuple[bytes, list[Entry]]], reply or [])
        return [entry for _, entries in streams for entry in entries]

    async def _news(self, beats: Iterable[Entry]) -> News:
        versions: dict[str, bytes] = {}
        for name, beat in ((_name(raw), beat) for _, fields in beats for raw, beat in fields.items()):
            if (version := LEFT if beat == LEFT else self._signatures.version(name, beat)) is not None:
                versions[name] = version
        news = News(
            heard=[name for name, version in versions.items() if version != LEFT],
            unlisted=[name for name, version in versions.items() if version == LEFT],
        )
        for name in self._ended.intersection(news.heard):
            self._forget_value(name)
        await self._read_values([name for name in news.heard if self._versions.get(name) != versions[name]], news)
        return news

    # ---- values

    async def _read_values(self, names: Sequence[str], news: News) -> list[str]:
        """Read the values of members, and add members whose value has a new version to `news.changed`.

        Returns the names of members without a value.
        """
        if not names:
            return []
        keys = [member_key(self._cluster, name) for name in names]
        values = await _answer(read_values(self._client, keys))
        for name, value in zip(names, values):
            message = None if value is None else self._signatures.open(name, value)
            if message is None or (version := version_of(message)) == self._versions.get(name):
                continue
            if (member := Member.from_bytes(message)) is not None:
                self._versions[name] = version
                self._ended.discard(name)
                news.changed.append(member)
                (self._mute.discard if member.beats else self._mute.add)(name)
        return [name for name, value in zip(names, values) if value is None]

    async def _scan(self, take: Callable[[News], object]) -> None:
        """Read the values of listed members that have sent no heartbeat lately, or that write no beats."""
        # If Redis was started again with a clock that is behind, or others have written an entry of a later time, the
        # ids of new beats are smaller.
        if comes_before(newest := await self._newest(), self._last):
            self._last = newest
        listed = await _answer(cast(Awaitable[set[bytes]], self._client.smembers(names_key(self._cluster))))
        for name in self._ended.difference(map(_name, listed)):
            self._forget_value(name)
        # A silent member is read, too: a process of an earlier release may have taken its name.
        names = sorted(self._mute | (set(map(_name, listed)) - self._heard.keys()))
        for start in range(0, len(names), _MOST):
            part, news = names[start : start + _MOST], News()
            gone = await self._read_values(part, news)
            new = {member.worker_id for member in news.changed}
            news.heard = [name for name in part if name in new or (name in self._mute and name not in gone)]
            news.unlisted = [name for name in gone if name in self._heard]
            take(self._noted(news))
            if gone:
                await _answer(self._client.srem(names_key(self._cluster), *gone))


async def _answer(answer: Awaitable[T]) -> T:
    async with asyncio.timeout(_ANSWER_SECONDS):
        return await answer


def _name(raw: bytes) -> str:
    return raw.decode(errors="replace")

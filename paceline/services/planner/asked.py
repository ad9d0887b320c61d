"""The numbers of workers that a cluster's planners have asked the platform for, in Redis, so that the next planner
knows them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping
from typing import Any, NamedTuple, cast

from redis.asyncio import Redis

from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.pins import is_count
from paceline.services.platforms.platform import PlatformState

KEPT_SECONDS = 3600.0
"""Seconds for which the time of a change is remembered. No rule of the planner looks back so far."""


class Changes(NamedTuple):
    """Seconds since planners last made a role larger (`grown`) and smaller (`shrunk`); None if not within
    KEPT_SECONDS.
    """

    grown: float | None = None
    shrunk: float | None = None


class Asked:
    """The numbers of workers that planners have asked for. All other numbers were set by a person."""

    def __init__(self, client: Redis, cluster: str) -> None:
        self._client = client
        self._key = f"paceline:{cluster}:planner:asked"
        self._numbers: dict[Role, set[int]] = {}
        """Numbers of workers that may be the platform's targets, by role. After a failed call, the target may be the
        old or the new number.
        """
        self._given_up: dict[Role, int] = {}
        """`PlatformRole.given_up` of each role when the platform's state was last read."""

    async def read(self) -> bool:
        """Take over the numbers that the previous planner has asked for. Raises RedisError.

        Returns whether Redis had any numbers; it has none before the first decision, or after it has lost its data.
        """
        found = await cast(Awaitable[dict[bytes, bytes]], self._client.hgetall(self._key))
        lists = {role: found.get(role.encode(), b"").split(b",") for role in ROLES}
        numbers = {role: {int(each) for each in lists[role] if is_count(each)} for role in ROLES}
        self._numbers = {role: counts for role, counts in numbers.items() if counts}
        return bool(self._numbers)

    async def note(self, before: Mapping[Role, int], after: Mapping[Role, int], pinned: Collection[Role]) -> None:
        """Remember the numbers that a planner is about to ask for. Raises RedisError.

        Args:
            before: numbers of workers before the change.
            after: numbers of workers after it, for the roles that change.
            pinned: roles whose number a person has set. A change of their numbers does not count as the planner's.
        """
        for role, count in after.items():
            self._numbers[role] = self._numbers.get(role, set()) | {before.get(role, 0), count}
        numbers: dict[Any, Any] = {role: ",".join(map(str, sorted(counts))) for role, counts in self._numbers.items()}
        async with self._client.pipeline(transaction=False) as pipeline:
            pipeline.hset(self._key, mapping=numbers)
            for role, count in after.items():
                if role not in pinned and count != before.get(role, 0):
                    name = "grown" if count > before.get(role, 0) else "shrunk"
                    pipeline.set(f"{self._key}:{name}:{role}", 1, px=int(KEPT_SECONDS * 1000))
            await pipeline.execute()

    def edits(self, state: PlatformState) -> dict[Role, int]:
        """Return the numbers of workers that people have set at the platform itself, and remember the present numbers.
        A platform that has given up a worker has a lower target, but that was not set by a person.
        """
        edits: dict[Role, int] = {}
        for role, counts in state.roles.items():
            lost = max(0, counts.given_up - self._given_up.get(role, counts.given_up))
            asked = self._numbers.get(role, {counts.wanted})
            if not any(number - lost <= counts.wanted <= number for number in asked):
                edits[role] = counts.wanted
        self._numbers = {role: {counts.wanted} for role, counts in state.roles.items()}
        self._given_up = {role: counts.given_up for role, counts in state.roles.items()}
        return edits

    async def changes(self) -> dict[Role, Changes]:
        """Return, for each role, the seconds since planners last changed its number of workers. Raises RedisError."""
        async with self._client.pipeline(transaction=False) as pipeline:
            for role in ROLES:
                pipeline.pttl(f"{self._key}:grown:{role}")
                pipeline.pttl(f"{self._key}:shrunk:{role}")
            left: list[int] = await pipeline.execute()
        ages = [KEPT_SECONDS - milliseconds / 1000 if milliseconds > 0 else None for milliseconds in left]
        return {role: Changes(*ages[2 * place : 2 * place + 2]) for place, role in enumerate(ROLES)}

"""The numbers of workers that a cluster's planners have asked the platform for, in Redis, so that the next planner
knows them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from redis.asyncio import Redis

from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.pins import is_count
from paceline.services.common.seals import Seal, read_values
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

    def __init__(self, client: Redis, cluster: str, seal: Seal) -> None:
        self._client = client
        self._cluster = cluster
        self._seal = seal
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
        keys = [asked_key(self._cluster, "numbers", role) for role in ROLES]
        self._numbers = {}
        for role, key, sealed in zip(ROLES, keys, await read_values(self._client, keys), strict=True):
            opened = self._seal.open(key, sealed)
            if opened and (counts := {int(each) for each in opened.value.split(b",") if is_count(each)}):
                self._numbers[role] = counts
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
        async with self._client.pipeline(transaction=False) as pipeline:
            for role, counts in self._numbers.items():
                key = asked_key(self._cluster, "numbers", role)
                pipeline.set(key, self._seal.close(key, ",".join(map(str, sorted(counts))).encode()))
            for role, count in after.items():
                if role not in pinned and count != before.get(role, 0):
                    key = asked_key(self._cluster, "grown" if count > before.get(role, 0) else "shrunk", role)
                    pipeline.set(key, self._seal.close(key, b""), px=int(KEPT_SECONDS * 1000))
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
        keys = [asked_key(self._cluster, name, role) for role in ROLES for name in Changes._fields]
        ages: list[float | None] = []
        for key, sealed in zip(keys, await read_values(self._client, keys), strict=True):
            opened = self._seal.open(key, sealed)
            age = None if opened is None else max(0.0, opened.age_seconds)
            ages.append(age if age is not None and age < KEPT_SECONDS else None)
        return {role: Changes(*ages[2 * place : 2 * place + 2]) for place, role in enumerate(ROLES)}


def asked_key(cluster: str, what: str, role: Role) -> str:
    """Return the Redis key of the numbers that planners have asked for (`what` is "numbers"), or of the time at which
    they last changed a role ("grown", "shrunk").
    """
    return f"paceline:{cluster}:planner:{what}:{role}"

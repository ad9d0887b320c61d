"""The roles of workers, for platforms that know neither the workers' roles nor their addresses."""

from __future__ import annotations

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.errors import BusyError, InvalidRequestError, StaleError, UnavailableError
from paceline.core.planner.reports import Role
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.registry import Member, read_members
from paceline.services.common.rpc import open_channel
from paceline.services.common.set_role import set_role
from paceline.services.platforms.platform import KnownWorker


class RoleTeller:
    """Finds workers in Redis, and calls them to change their roles."""

    def __init__(self, client: Redis, cluster: str, credentials: Credentials, signatures: MemberSignatures) -> None:
        self._client = client
        self._cluster = cluster
        self._credentials = credentials
        self._signatures = signatures

    async def tell(self, worker_id: str, role: Role) -> None:
        """Give a running worker a role. A worker that has the role already does nothing.

        Raises UnavailableError if the worker is not known, does not answer, or cannot take the role now.
        """
        members = await self._members()
        address = next((each.address for each in members if each.worker_id == worker_id), "")
        if not address:
            raise UnavailableError(f"the worker {worker_id} is not in Redis yet, or has ended")
        channel = open_channel(address, self._credentials)
        try:
            await set_role(channel, worker_id, role)
        except (InvalidRequestError, StaleError, BusyError) as error:
            raise UnavailableError(f"{worker_id} does not become a {role} worker: {error}") from error
        finally:
            await channel.close(None)

    async def workers(self) -> dict[str, KnownWorker]:
        """Return all workers by id, in the order of their starts. Raises UnavailableError if Redis does not answer."""
        members = sorted(await self._members(), key=lambda each: each.epoch)
        return {
            each.worker_id: KnownWorker(each.role, each.state == "draining", each.state == "ready") for each in members
        }

    async def _members(self) -> list[Member]:
        try:
            return await read_members(self._client, self._cluster, self._signatures)
        except (TimeoutError, RedisError, OSError) as error:
            raise UnavailableError(f"Redis does not answer ({error}), so nobody knows the workers") from error

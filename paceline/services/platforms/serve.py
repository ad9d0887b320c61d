"""The platform of `paceline serve`: workers are child processes of its supervisor."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.supervisor import ask_supervisor
from paceline.services.platforms.platform import Ability, PlatformState, RoleState


class ServePlatform:
    """The fleet of one supervisor. What people change comes through the gateway, so there are no `edits`.

    Args:
        socket: path of the supervisor's Unix socket.
    """

    name = "serve"
    abilities: frozenset[Ability] = frozenset()

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def state(self) -> PlatformState:
        answer = await ask_supervisor(self._socket, {})
        # A process that has ended is started again, so all that are wanted run, or nearly so.
        return PlatformState(
            {role: RoleState(own["wanted"], own["wanted"], own["draining"]) for role in ROLES if (own := answer[role])}
        )

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        await self._ask({role: wanted})

    async def flip(self, worker_id: str, role: Role) -> None:
        raise UnavailableError("this platform flips no workers")

    async def close(self) -> None:
        pass

    async def _ask(self, request: dict[str, int]) -> None:
        try:
            await ask_supervisor(self._socket, request)
        except InvalidRequestError as error:
            raise UnavailableError(f"the supervisor refuses: {error}") from error

"""The platform of `paceline serve`: workers are child processes of its supervisor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.core.planner.reports import ROLES, Role
from paceline.services.common.supervisor import ask_supervisor
from paceline.services.platforms.platform import Ability, PlatformRole, PlatformState


class ServePlatform:
    """The fleet of one supervisor.

    Args:
        socket: path of the supervisor's Unix socket.
    """

    name = "serve"
    abilities: frozenset[Ability] = frozenset({"choose", "flip"})

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def take_over(self) -> None:
        """Do nothing, because the supervisor itself knows which workers drain."""

    async def state(self) -> PlatformState:
        """Return the numbers of workers, as the supervisor counts them, by the roles that the model may have."""
        answer = await ask_supervisor(self._socket, {})
        # A process that has ended is started again, so nearly all wanted workers are running.
        return PlatformState(
            {
                role: PlatformRole(counts["wanted"], counts["wanted"], counts["draining"], counts["given_up"])
                for role in ROLES
                if (counts := answer.get(role))
            }
        )

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        """Ask the supervisor to keep `wanted` workers of a role, and to end `victims` first if there are too many."""
        await self._ask({role: wanted, "victims": list(victims)})

    async def flip(self, worker_id: str, role: Role) -> None:
        """Ask the supervisor to give a worker another role."""
        await self._ask({"flip": {worker_id: role}})

    async def close(self) -> None:
        """Do nothing, because each call has a connection of its own."""

    async def _ask(self, request: Mapping[str, Any]) -> None:
        try:
            await ask_supervisor(self._socket, request)
        except InvalidRequestError as error:
            raise UnavailableError(f"the supervisor refuses: {error}") from error

"""The Unix socket on which the gateway passes scaling requests to the supervisor: one line of JSON each way."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, get_args

from paceline.core.errors import ConfigError, PacelineError
from paceline.services.serve.worker_fleet import Role, WorkerFleet

REQUEST_SECONDS = 5.0
"""Longest time from a connection to its request, in seconds."""


class ScalingSocket:
    """The server of scaling requests for one fleet.

    A request is an object of roles and numbers of workers, e.g. `{"prefill": 3}`; an empty one changes nothing. The
    answer is the fleet's state, or `{"error": "..."}`.
    """

    def __init__(self, path: Path, fleet: WorkerFleet) -> None:
        self.path = path
        self._fleet = fleet
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=1 << 16)
        os.chmod(self.path, 0o600)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                line = await reader.readline()
            writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
            await writer.drain()
        except (OSError, TimeoutError, ValueError):
            pass  # the client has gone, or sends no line
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            await self._fleet.scale(_targets(line))
        except PacelineError as error:
            return {"error": str(error)}
        return self._fleet.state()


def _targets(line: bytes) -> dict[Role, int]:
    try:
        wanted = json.loads(line)
    except ValueError:
        wanted = None
    if not isinstance(wanted, dict) or not all(type(count) is int for count in wanted.values()):
        raise ConfigError('a scaling request is a JSON object like {"prefill": 3, "decode": 1}')
    roles: tuple[Role, ...] = get_args(Role)
    if unknown := sorted(set(wanted) - set(roles)):
        raise ConfigError(f"there are no {', '.join(unknown)} workers; scale {' or '.join(roles)}")
    return {role: wanted[role] for role in roles if role in wanted}

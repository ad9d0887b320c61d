"""The Unix socket on which the gateway passes scaling requests to the supervisor: one line of JSON each way."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from paceline.core.errors import ConfigError, PacelineError
from paceline.services.serve.worker_fleet import Role, WorkerFleet

REQUEST_SECONDS = 5.0
"""Longest time from a connection to its request, in seconds."""

_ADVICE = 'a scaling request is a JSON object like {"prefill": 3, "decode": 1}'


@dataclass(frozen=True, slots=True)
class _Asked:
    """The changes of the fleet that one request asks for."""

    targets: dict[Role, int]
    victims: list[str]
    drain: list[str]
    flip: dict[str, Role]


class ScalingSocket:
    """The server of scaling requests for one fleet.

    A request is an object; an empty one changes nothing. The answer is the fleet's state, or `{"error": "..."}`.

        {"prefill": 3, "victims": ["prefill-0"]}    numbers of workers, and which ones end first if there are too many
        {"drain": ["decode-1"]}                     workers that shall end
        {"flip": {"prefill-2": "decode"}}           workers that shall take another role
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
            pass  # the client has left, or sends no line
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            asked = _parse(line)
            await self._fleet.flip(asked.flip)
            await self._fleet.drain(asked.drain)
            await self._fleet.scale(asked.targets, asked.victims)
        except PacelineError as error:
            return {"error": str(error)}
        return self._fleet.state()


def _parse(line: bytes) -> _Asked:
    """Return the changes that a line of JSON asks for. Raises ConfigError if the line is no valid request."""
    try:
        asked = json.loads(line)
    except ValueError:
        asked = None
    if not isinstance(asked, dict):
        raise ConfigError(_ADVICE)
    drain, victims, flip = asked.pop("drain", []), asked.pop("victims", []), asked.pop("flip", {})
    if not (_are_names(drain) and _are_names(victims) and isinstance(flip, dict) and _are_names([*flip.values()])):
        raise ConfigError(_ADVICE)
    if not all(type(count) is int for count in asked.values()):
        raise ConfigError(_ADVICE)
    roles: tuple[Role, ...] = get_args(Role)
    if unknown := sorted({*asked, *flip.values()} - set(roles)):
        raise ConfigError(f"there are no {', '.join(unknown)} workers; scale {' or '.join(roles)}")
    return _Asked({role: asked[role] for role in roles if role in asked}, victims, drain, flip)


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)

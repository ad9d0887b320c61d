"""Requests to the supervisor of `paceline serve`, which starts and drains workers: one line of JSON each way."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from paceline.core.errors import InvalidRequestError, UnavailableError

ANSWER_SECONDS = 30.0
"""Deadline of the supervisor's answer, in seconds. The supervisor starts processes before it answers, but does not wait
until they are ready."""


async def ask_supervisor(socket: str, request: Mapping[str, Any]) -> dict[str, Any]:
    """Send a request and return the state of the fleet after the supervisor has begun to carry out the request.

    Args:
        socket: path of the supervisor's Unix socket.
        request: the JSON object of the request, in the format that `ScalingSocket` describes; {} changes nothing.

    Raises:
        InvalidRequestError: the supervisor refuses the request.
        UnavailableError: the supervisor does not answer.
    """
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(json.dumps(request).encode() + b"\n")
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
    except (OSError, ValueError, TimeoutError) as error:
        raise UnavailableError(
            f"the supervisor does not answer ({error or 'no answer in time'}); try again later"
        ) from error
    if "error" in answer:
        raise InvalidRequestError(answer["error"], "decode")
    return dict(answer)

"""The endpoint that adds and removes workers. It asks the supervisor of this machine's stack (`paceline serve`)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fastapi import APIRouter
from pydantic import Field

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.services.gateway.answer_format import Body
from paceline.services.gateway.api_schema import answers
from paceline.services.gateway.errors import ApiError
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.operation_bodies import Scale

ANSWER_SECONDS = 30.0
"""Deadline of the supervisor's answer. It starts processes in this time; it does not wait until they are ready."""


class ScaleRequest(Body):
    """The numbers of workers to have. A role that is left out does not change."""

    prefill: int | None = Field(None, ge=0, le=64)
    decode: int | None = Field(None, ge=1, le=64)
    encode: int | None = Field(None, ge=0, le=64)


def make_scaling(gateway: Gateway) -> APIRouter:
    """Return the routes GET and POST /fleet/scale."""
    router = APIRouter()

    @router.get("/fleet/scale", response_model=None, responses=answers(Scale))
    async def state() -> dict[str, Any]:
        return await _ask_supervisor(gateway.config.supervisor_socket, {})

    @router.post("/fleet/scale", response_model=None, responses=answers(Scale))
    async def scale(body: ScaleRequest) -> dict[str, Any]:
        wanted = (("prefill", body.prefill), ("decode", body.decode), ("encode", body.encode))
        targets = {role: count for role, count in wanted if count is not None}
        if not targets:
            raise InvalidRequestError("say how many workers there should be: prefill, decode, encode", "decode")
        return await _ask_supervisor(gateway.config.supervisor_socket, targets)

    return router


async def _ask_supervisor(socket: str, targets: dict[str, int]) -> dict[str, Any]:
    """Return the fleet's state after the supervisor has begun to reach `targets`."""
    if not socket:
        raise ApiError(
            409,
            "this gateway has no supervisor: scale with docker compose, Kubernetes or whatever started the services",
            code="no_supervisor",
        )
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(json.dumps(targets).encode() + b"\n")
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

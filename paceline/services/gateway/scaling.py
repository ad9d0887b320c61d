"""The endpoint that adds and removes workers. It asks the supervisor of this machine's stack (`paceline serve`)."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import Field

from paceline.core.errors import InvalidRequestError
from paceline.services.common.supervisor import ask_supervisor
from paceline.services.gateway.answer_format import Body
from paceline.services.gateway.api_schema import answers
from paceline.services.gateway.errors import ApiError
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.operation_bodies import Scale


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
        return await ask_supervisor(_socket(gateway), {})

    @router.post("/fleet/scale", response_model=None, responses=answers(Scale))
    async def scale(body: ScaleRequest) -> dict[str, Any]:
        wanted = (("prefill", body.prefill), ("decode", body.decode), ("encode", body.encode))
        targets = {role: count for role, count in wanted if count is not None}
        if not targets:
            raise InvalidRequestError("say how many workers there should be: prefill, decode, encode", "decode")
        return await ask_supervisor(_socket(gateway), targets)

    return router


def _socket(gateway: Gateway) -> str:
    """Return the path of the supervisor's socket. Raises ApiError if there is no supervisor."""
    if not gateway.config.supervisor_socket:
        raise ApiError(
            409,
            "this gateway has no supervisor: scale with docker compose, Kubernetes or whatever started the services",
            code="no_supervisor",
        )
    return gateway.config.supervisor_socket

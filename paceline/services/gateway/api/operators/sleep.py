"""The endpoints that let a model's workers sleep and wake, as in vLLM, and as in SGLang."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from fastapi.responses import Response
from pydantic import Field

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.operators.bodies import SleepState
from paceline.services.gateway.fleet.sleep_keeper import ReplacedSleepError, SleepKeeper
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.request_body import Body

Mode = Literal["abort", "wait", "keep"]

WEIGHTS, KV_CACHE = "weights", "kv_cache"
_PARTS = frozenset((WEIGHTS, KV_CACHE))
_NOTHING = frozenset(("cuda_graph",))
"""Tags of parts that SGLang has and these workers do not have."""


class MemoryRequest(Body):
    """The parts of a model's memory that shall be given back, or be had again."""

    tags: list[str] | None = Field(None, max_length=8)
    """weights, kv_cache, or both; default: both."""
    model: str | None = None
    """The model whose workers are meant; a gateway with one model needs no name."""


def add_sleep(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes of vLLM and SGLang for sleeping models to a router."""
    api = SleepApi(gateway)
    router.post("/sleep", response_class=Response)(api.sleep)
    router.post("/wake_up", response_class=Response)(api.wake_up)
    router.get("/is_sleeping", response_model=None, responses=answers(SleepState))(api.is_sleeping)
    router.post("/release_memory_occupation", response_class=Response)(api.release)
    router.post("/resume_memory_occupation", response_class=Response)(api.resume)


class SleepApi:
    """The routes for sleeping models. Each answers when all workers of the model have done it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def sleep(
        self, level: Annotated[int, Query(ge=1, le=2)] = 1, mode: Mode = "abort", model: str | None = None
    ) -> Response:
        """Let a model's workers sleep.

        Args:
            level: 1 leaves the weights in files that the system caches; 2 drops them from its cache, too.
            mode: what happens to running requests. abort: they end with what they have. wait: they go on to their end,
                and the workers sleep after that. keep: they go on after the sleep.
            model: the model; a gateway with one model needs no name.
        """
        await _want(self._gateway.find(model).sleep, level, kv_cache=True, mode=mode)
        return Response()

    async def wake_up(
        self, tags: Annotated[list[str] | None, Query(max_length=8)] = None, model: str | None = None
    ) -> Response:
        """Wake a model's workers, or bring back parts of their memory. They take requests when they have all of it."""
        await self._resume(model, None if tags is None else [tag for each in tags for tag in each.split(",")])
        return Response()

    async def is_sleeping(self, model: str | None = None) -> dict[str, Any]:
        return {"is_sleeping": self._gateway.find(model).sleep.is_asleep}

    async def release(self, body: MemoryRequest) -> Response:
        """Give parts of the memory back, as level 1 of /sleep does, when running requests have ended."""
        sleep, parts = self._gateway.find(body.model).sleep, _parts(body.tags)
        weights = max(sleep.book.wish.weights, int(WEIGHTS in parts))
        await _want(sleep, weights, sleep.book.wish.kv_cache or KV_CACHE in parts, "wait")
        return Response()

    async def resume(self, body: MemoryRequest) -> Response:
        await self._resume(body.model, body.tags)
        return Response()

    async def _resume(self, model: str | None, tags: Iterable[str] | None) -> None:
        sleep, parts = self._gateway.find(model).sleep, _parts(tags)
        wish = sleep.book.wish
        weights = 0 if WEIGHTS in parts else wish.weights
        # Never the mode of the sleep: the requests that wait for the model to wake must not be aborted.
        await _want(sleep, weights, wish.kv_cache and KV_CACHE not in parts, "wait")


async def _want(sleep: SleepKeeper, weights: int, kv_cache: bool, mode: str) -> None:
    """Let a model sleep or wake, and wait until it has. Raises ApiError if a newer wish came, else as `want`."""
    try:
        await sleep.want(weights, kv_cache, mode)
    except ReplacedSleepError as error:
        raise ApiError(409, str(error), code="sleep_replaced") from error


def _parts(tags: Iterable[str] | None) -> frozenset[str]:
    """Return the parts that tags name; all of them if there are no tags. Raises InvalidRequestError."""
    if tags is None:
        return _PARTS
    named = frozenset(tags)
    if unknown := sorted(named - _PARTS - _NOTHING):
        raise InvalidRequestError(f"there is no part {unknown[0]!r} of the memory; name weights or kv_cache", "tags")
    return named & _PARTS

"""The endpoint that adds and removes workers, and gives them other roles.

Workers are started and ended by the supervisor of this machine's stack (`paceline serve`). A fleet without a supervisor
is scaled by its planner, which reads the numbers from Redis, or else by its orchestrator; then this endpoint only
changes roles.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import Field

from paceline.core.errors import BusyError, InvalidRequestError, StaleError
from paceline.core.planner.reports import ROLES, Role
from paceline.core.victims import Standing, tokens_only_here, victims
from paceline.services.common.set_role import set_role
from paceline.services.common.supervisor import ask_supervisor
from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.operators.bodies import Scale
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.request_body import Body

NewRole = Literal["prefill", "decode", "standby"]


class ScaleRequest(Body):
    """The wanted fleet. A role or a worker that is left out does not change."""

    model: str | None = None
    """The model whose fleet is meant; a gateway with one model needs no name."""
    prefill: int | None = Field(None, ge=0, le=64)
    """Wanted number of prefill workers. Of too many workers, those whose end loses the least work end."""
    decode: int | None = Field(None, ge=0, le=64)
    encode: int | None = Field(None, ge=0, le=64)
    pool: int | None = Field(None, ge=0, le=64)
    drain: list[str] = Field(default_factory=list, max_length=64)
    """Ids of workers that shall end after their requests."""
    flip: dict[str, NewRole] = Field(default_factory=dict, max_length=64)
    """New roles of running workers, by worker id."""
    release: list[Role] = Field(default_factory=list, max_length=4)
    """Roles that the planner may scale again, after a client has set their number of workers."""


def add_scaling(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes GET and POST /fleet/scale to a router."""
    api = ScalingApi(gateway)
    router.get("/fleet/scale", response_model=None, responses=answers(Scale))(api.state)
    router.post("/fleet/scale", response_model=None, responses=answers(Scale))(api.scale)


class ScalingApi:
    """The routes GET and POST /fleet/scale."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def state(self, model: str | None = None) -> dict[str, Any]:
        scaled = self._gateway.find(model)
        socket = scaled.config.supervisor_socket
        return await ask_supervisor(socket, {}) if socket else _state_of(scaled.fleet)

    async def scale(self, body: ScaleRequest) -> dict[str, Any]:
        asked = body.model_dump(exclude_none=True, exclude_defaults=True, exclude={"model"})
        if not asked:
            raise InvalidRequestError("say how many workers there should be: prefill, decode, encode, pool", "decode")
        model = self._gateway.find(body.model)
        socket = model.config.supervisor_socket
        release = asked.pop("release", [])
        numbers = {role: asked[role] for role in ROLES if role in asked}
        has_planner = model.fleet.has_planner
        if not socket and (body.drain or (numbers and not has_planner)):
            raise _no_supervisor()
        if release or (numbers and has_planner):
            await model.pin(numbers, release)
        if not socket:
            await _flip(model.fleet, body.flip)
            return _state_of(model.fleet)
        if numbers:
            asked["victims"] = least_loss_first(model)
        return await ask_supervisor(socket, asked)


async def _flip(fleet: Fleet, flips: Mapping[str, NewRole]) -> None:
    """Give workers other roles, without a supervisor. Return when the workers have begun to drain for the change.

    Raises InvalidRequestError if a worker is unknown or no decode worker would be left, and the error of a worker.
    """
    workers = {worker.member.worker_id: worker for worker in fleet.workers() if worker.member.state == "ready"}
    if unknown := sorted(flips.keys() - workers.keys()):
        raise InvalidRequestError(f"no ready worker has the id {unknown[0]!r}; GET /fleet names all workers", "flip")
    decode = {name for name, worker in workers.items() if worker.member.role == "decode"}
    if decode and decode <= {name for name, role in flips.items() if role != "decode"}:
        raise InvalidRequestError("no decode worker would be left during the change; add one first", "flip")
    for name, role in flips.items():
        try:
            await set_role(workers[name].channel, name, role, workers[name].member.epoch)
        except (StaleError, BusyError) as error:
            raise ApiError(409, f"{name} cannot become {role} now: {error}", code="role_changes") from error


def _state_of(fleet: Fleet) -> dict[str, Any]:
    """Return, for each role, the numbers of wanted, ready and draining workers that this gateway sees."""
    states = {role: [each.state for each in fleet.workers() if each.member.role == role] for role in ROLES}
    return {
        role: {
            "wanted": len(own) - own.count("draining"),
            "ready": own.count("ready"),
            "draining": own.count("draining"),
            "given_up": 0,
        }
        for role, own in states.items()
    }


def _no_supervisor() -> ApiError:
    return ApiError(
        409,
        "this gateway has no supervisor: scale with docker compose, Kubernetes or whatever started the services; here "
        "only roles can be changed, with flip alone, and numbers of workers if there is a planner",
        code="no_supervisor",
    )


def least_loss_first(model: ModelFleet) -> list[str]:
    """Return the ids of a model's workers that do not drain: for each role in the order in which they should leave."""
    workers = [each for each in model.fleet.workers() if each.member.role in ROLES and each.member.state != "draining"]
    standing = [_standing(worker) for worker in workers]
    cached = tokens_only_here(model.cached_blocks())
    return [name for role in ROLES for name in victims(standing, role, len(standing), cached)]


def _standing(worker: RemoteWorker) -> Standing:
    member = worker.member
    # The figures are up to a second old, and the worker's own calls of this gateway are newer.
    running = max(worker.in_flight, member.load.running + member.load.waiting)
    return Standing(
        member.worker_id,
        member.role,
        member.host_id,
        member.epoch,
        member.state == "ready",
        running,
        member.load.queued_tokens,
        member.numerics,
    )

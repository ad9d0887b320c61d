"""Endpoints for operators: health, load, metrics, the fleet, and traces of requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from google.protobuf.json_format import MessageToDict
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

import paceline
from paceline.core.config import GatewayConfig
from paceline.core.errors import UnavailableError
from paceline.core.options import secrets_of
from paceline.proto import kvtransfer_pb2
from paceline.services.common.registry import Member
from paceline.services.gateway.api.api_schema import answers, text_of
from paceline.services.gateway.api.operators.bodies import FleetState, Load, ServerInfo, Trace, Version
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.error_responses import ErrorResponse
from paceline.services.gateway.http.errors import ApiError, to_api_error
from paceline.services.gateway.http.request_scope import scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.telemetry.feed import rate, read_ledger
from paceline.services.gateway.telemetry.metrics import figures
from paceline.services.gateway.telemetry.trace_book import KEPT
from paceline.services.gateway.telemetry.trace_json import describe

LEASES = 100
"""Number of leases of each host that /fleet shows by default. A client may ask for up to MOST_LEASES."""
MOST_LEASES = 5000


def add_operations(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes for health, metrics, the fleet and traces to a router."""
    api = OperatorsApi(gateway)
    router.get("/health", response_class=Response)(api.health)
    # One route for each method, because each operation needs an id of its own in /openapi.json.
    router.post("/ping", response_class=Response)(api.ping)
    router.get("/ping", response_class=Response)(api.ping)
    router.get("/version", response_model=None, responses=answers(Version))(api.version)
    router.get("/server_info", response_model=None, responses=answers(ServerInfo))(api.server_info)
    router.get("/load", response_model=None, responses=answers(Load))(api.load)
    router.get("/metrics", response_class=Response, responses=text_of())(api.metrics)
    router.get("/fleet", response_model=None, responses=answers(FleetState))(api.fleet)
    router.get("/trace/{request_id:path}", response_model=None, responses=answers(Trace))(api.trace)


class OperatorsApi:
    """The routes for health, metrics, the fleet and traces."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def health(self, model: str | None = None) -> Response:
        try:
            self._gateway.check_ready(model)
        except UnavailableError as error:
            return ErrorResponse(to_api_error(error))  # not logged, because probes ask again and again
        return Response()

    async def ping(self) -> Response:
        return Response()

    async def version(self) -> dict[str, str]:
        return {"version": paceline.__version__}

    async def server_info(self, model: str | None = None) -> dict[str, Any]:
        found = self._gateway.find(model)
        members = [worker.member for worker in found.fleet.workers() if worker.available]
        roles = Counter(member.role for member in members)
        return {
            "version": paceline.__version__,
            "model": found.name,
            "tasks": found.abilities,
            "max_model_len": found.fleet.max_model_len(),
            "started": self._gateway.started,
            "members": dict(roles),
            "numerics": sorted({str(member.numerics) for member in members if member.numerics}),
            "weight_bytes": _weight_bytes(members),
            "options": found.config.model_dump(exclude=secrets_of(GatewayConfig)),
        }

    async def load(self) -> dict[str, int]:
        return {"server_load": self._gateway.running_sequences()}

    async def metrics(self) -> Response:
        await asyncio.gather(*(_read_kv_usage(model) for model in self._gateway.models.values()))
        return Response(self._gateway.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def fleet(
        self,
        leases: Annotated[int, Query(ge=1, le=MOST_LEASES)] = LEASES,
        holds: Annotated[int | None, Query(ge=1, le=MOST_LEASES, deprecated=True)] = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """Return the workers, hosts and planners of all models, or of the model that is named."""
        models = self._gateway.named(model)
        leases = holds or leases  # `holds` was the name in earlier releases
        fleets = await asyncio.gather(*(_describe_fleet(each, leases) for each in models))
        return {
            **{part: [entry for fleet in fleets for entry in fleet[part]] for part in fleets[0]},
            "waiting": sum(each.runner.waiting for each in models),
        }

    async def trace(self, request_id: str, request: Request) -> dict[str, Any]:
        may_see = scope_of(request).caller.may_see
        known = self._gateway.traces.find(request_id, may_see)
        if known is None:
            message = (
                f"this gateway does not know the request {request_id[:128]!r}: ask the one that served it; or it was "
                f"refused before it began, {KEPT} newer ones have ended since, or another key sent it"
            )
            raise ApiError(404, message, code="unknown_request")
        return describe(known, self._gateway.traces.earlier(known, may_see), time.monotonic())


async def _read_kv_usage(model: ModelFleet) -> None:
    """Ask a model's hosts how many of their blocks are in use now, for the metrics."""
    hosts = [host for host in model.fleet.hosts() if host.available]
    ledgers = await asyncio.gather(*(_ledger(host, 1) for host in hosts))
    kv_usage = {
        host.member.worker_id: (ledger["held"] + ledger["in_flight"]) / ledger["total"]
        for host, ledger in zip(hosts, ledgers)
        if ledger.get("total")
    }
    model.metrics.set_kv_usage(kv_usage)


async def _describe_fleet(model: ModelFleet, most_leases: int) -> dict[str, list[dict[str, Any]]]:
    """Return the workers, hosts and planners of a model. Each entry has the model's name."""
    workers, hosts = model.fleet.workers(), model.fleet.hosts()
    ledgers = await asyncio.gather(*(_ledger(host, most_leases) for host in hosts))
    name = {"model_name": model.name}
    return {
        "workers": [name | _describe(worker) for worker in workers],
        "hosts": [
            name | {"worker_id": host.member.worker_id, "address": host.member.address, **ledger}
            for host, ledger in zip(hosts, ledgers)
        ],
        "adapters": [name | each for each in model.adapter_use.describe()],
        "planners": [name | _plan(worker) for worker in workers if worker.member.role == "planner"],
    }


def _describe(worker: RemoteWorker) -> dict[str, Any]:
    member = worker.member
    return {
        "worker_id": member.worker_id,
        "role": member.role,
        "epoch": member.epoch,
        "address": member.address,
        "host_id": member.host_id,
        "state": worker.state,
        "model": member.model,
        "max_model_len": member.max_model_len,
        "max_seqs": member.max_seqs,
        "numerics": member.numerics and str(member.numerics),
        "release": member.release,
        "wire": str(member.wire),
        "running": member.load.running,
        "waiting": member.load.waiting,
        "in_flight": worker.in_flight,
        "stats": figures(member.metrics),
    }


def _weight_bytes(members: Sequence[Member]) -> dict[str, int]:
    """Return the bytes of the weights of the worker that has most of them, by format."""
    prefix = "weight_bytes_"
    stats = [figures(member.metrics) for member in members]
    found = [
        {name.removeprefix(prefix): int(value) for name, value in own.items() if name.startswith(prefix)}
        for own in stats
    ]
    return max(found, key=lambda sizes: sum(sizes.values()), default={})


def _plan(worker: RemoteWorker) -> dict[str, Any]:
    """Return a planner's decisions, the newest last. Their ages in seconds are as of the planner's last report."""
    plan = worker.member.plan
    return {
        "worker_id": worker.member.worker_id,
        "leads": plan.leads,
        "advisory": plan.advisory,
        "pinned": dict(plan.pinned),
        "decisions": [
            {"age_seconds": round(each.age_seconds, 1), "decision": each.line, "acted": each.acted}
            for each in plan.decisions
        ],
    }


async def _ledger(host: RemoteWorker, most_leases: int) -> dict[str, Any]:
    """Ask a host for its block ledger. Return the ledger, or an entry with the error if the host does not answer."""
    try:
        reply = await read_ledger(host, kvtransfer_pb2.LedgerRequest(with_leases=True, max_leases=most_leases))
    except UnavailableError as error:
        return {"host_id": host.member.host_id, "error": str(error)}
    owned = sum(lease.blocks - lease.shared_blocks for lease in reply.leases) + reply.blocks_left_out
    return {
        "host_id": reply.host_id,
        "hit_rate": rate(reply.prefix_hits_tokens, reply.prefix_queries_tokens),
        "encoding_hit_rate": rate(reply.encoding_hits_rows, reply.encoding_queries_rows),
        **{field.name: getattr(reply, field.name) for field in reply.DESCRIPTOR.fields if not field.is_repeated},
        "used_by_group": dict(reply.used_by_group),
        "cached_by_group": dict(reply.cached_by_group),
        # Every block is free, cached or owned by a lease. These sums check `balanced` without trusting the host.
        "blocks_of_leases": owned,
        "adds_up": reply.total == reply.free + reply.cached + owned and owned == reply.held + reply.in_flight,
        "owners": [{"owner": each.owner, "state": each.state, "blocks": each.blocks} for each in reply.owners],
        "leases": [_lease(lease) for lease in reply.leases],
    }


def _lease(lease: kvtransfer_pb2.LeaseInfo) -> dict[str, Any]:
    fields = MessageToDict(lease, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    # Protobuf's JSON format writes 64-bit numbers as strings.
    return {**fields, "age_ms": lease.age_ms, "expires_in_ms": lease.expires_in_ms}

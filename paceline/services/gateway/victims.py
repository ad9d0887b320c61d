"""The order in which workers leave, from what this gateway knows of its fleet."""

from __future__ import annotations

from paceline.core.victims import Standing, tokens_only_here, victims
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.remote_worker import RemoteWorker

ROLES = ("prefill", "decode", "encode")


def least_loss_first(model: ModelFleet) -> list[str]:
    """Return the ids of a model's workers that do not drain. If a role has too many, its first ones should leave."""
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

"""Facts about a whole fleet that change seldom, so that no request has to look at all members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from paceline.services.common.registry import Member
from paceline.services.gateway.fleet.remote_worker import RemoteWorker


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The facts. Workers are those of the gateway's model."""

    max_model_len: int
    """The longest context that a ready decode worker takes, even if it is set aside; 0 if none is ready."""
    max_computing_len: int
    """Longest context in tokens for work that needs no decoding: that of prefill workers, or of decode workers if there
    is no prefill worker."""
    has_prefill_worker: bool
    """Whether a prefill worker is ready and not set aside."""
    has_decode_worker: bool
    """The same for a decode worker."""
    has_planner: bool
    """Whether a planner scales this fleet, or shows how it would."""
    may_be_empty: bool
    """Whether a planner scales this fleet that starts decode workers when requests come, and may leave none."""

    @staticmethod
    def of(members: Iterable[RemoteWorker], model: str) -> FleetSummary:
        """Return the facts about these members.

        Args:
            model: the digest of the gateway's model.
        """
        longest = {"prefill": 0, "decode": 0}
        available: set[str] = set()
        has_planner = may_be_empty = False
        for worker in members:
            member = worker.member
            if serves(worker, model):
                longest[member.role] = max(longest[member.role], member.max_model_len)
                if worker.available:
                    available.add(member.role)
            elif member.role == "planner" and worker.available:
                has_planner, plan = True, member.plan
                may_be_empty |= plan.leads and not plan.advisory and "decode" in plan.may_be_empty
        return FleetSummary(
            max_model_len=longest["decode"],
            max_computing_len=longest["prefill"] or longest["decode"],
            has_prefill_worker="prefill" in available,
            has_decode_worker="decode" in available,
            has_planner=has_planner,
            may_be_empty=may_be_empty,
        )


def serves(worker: RemoteWorker, model: str) -> bool:
    """Return whether this is a prefill or decode worker of a model that is ready and not shut out."""
    member = worker.member
    has_role = member.role == "decode" or member.role == "prefill"
    return has_role and member.model == model and member.state == "ready" and not worker.is_shut_out


def facts_of(member: Member) -> tuple[object, ...]:
    """Return those parts of a heartbeat that the summary depends on."""
    return member.state, member.max_model_len, member.plan if member.role == "planner" else None

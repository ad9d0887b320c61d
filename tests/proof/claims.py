"""A restart of kvtransfer, after which workers claim their leases: services/worker/kv_client.py and claims."""

from __future__ import annotations

from paceline.core.kv_layout import NO_SLOT
from paceline.services.kvtransfer.ledger.claim import Claim
from tests.proof import worker
from tests.proof.parties import DECODE, PREFILL, Job
from tests.proof.world import World


def come_back(world: World, session: int) -> None:
    """Let a worker claim the blocks that its engine may touch, and give up the leases that it cannot claim."""
    at = world.hosts[world.host_of(session)]
    assert at.claims is not None
    claims = []
    for job in [job for job in world.jobs.values() if job.session == session]:
        claims += claims_of(world, job)
        if job.encoding:
            world.jobs[job.id] = job._replace(lost=True)  # nobody is told; its user releases the blocks later
        elif job.waits:
            worker.learn_of_loss(world, job.id)
        elif job.role == PREFILL and job.phase == "writing":
            world.put(job, phase="stopping", lost=True)
    at.claims[session] = tuple(claims)


def claims_of(world: World, job: Job) -> list[Claim]:
    """Return the claims of a job, if its engine may touch blocks. Only a decode worker can go on with them."""
    if not job.touches:
        return []
    groups = world.layout(job).groups
    names = [
        [_name(world, job, group, block, slot) for block, slot in enumerate(table)]
        for group, table in enumerate(job.tables)
    ]
    tokens = min(len(table) * group.block_tokens for group, table in zip(groups, job.tables))
    active = job.role == DECODE and not job.lost
    tables = [list(table) for table in job.tables]
    return [Claim(job.session, job.key, tokens, 0, tables, names, active, job.encoding)]


def _name(world: World, job: Job, group: int, block: int, slot: int) -> bytes:
    """Return the block's hash as the worker knows it: sealed when it got the block, or sealed by itself since then."""
    if slot == NO_SLOT:
        return b""
    known = world.hosts[job.host].ledger._pool.name(slot)
    if known is not None:
        return known[1]
    word = world.word(job, group, block)
    return word[1] if not world.may_write(job, group, block) and isinstance(word[1], bytes) else b""

"""kvtransfer comes back without its memory, and workers say what they hold: services/worker/kv_client.py and claims."""

from __future__ import annotations

from paceline.core.kv_layout import NO_SLOT
from paceline.services.kvtransfer.claim import Claim
from tests.proof import worker
from tests.proof.parties import DECODE, PREFILL, Job
from tests.proof.world import World


def come_back(world: World, session: int) -> None:
    """A worker claims what its engine may touch, and gives up what it cannot claim."""
    at = world.hosts[world.host_of(session)]
    assert at.claims is not None
    claims = []
    for job in [job for job in world.jobs.values() if job.session == session]:
        claims += claims_of(world, job)
        if job.waits:
            worker.learn_of_loss(world, job.id)
        elif job.role == PREFILL and job.phase == "writing":
            world.put(job, phase="stopping", lost=True)
    at.claims[session] = tuple(claims)


def claims_of(world: World, job: Job) -> list[Claim]:
    """What may be touched is claimed; only a decode worker can go on in it."""
    if not job.touches:
        return []
    groups = world.setup.layout.groups
    names = [
        [_name(world, job, group, block, slot) for block, slot in enumerate(table)]
        for group, table in enumerate(job.tables)
    ]
    tokens = min(len(table) * group.block_tokens for group, table in zip(groups, job.tables))
    active = job.role == DECODE and not job.lost
    return [Claim(job.session, job.key, tokens, 0, [list(table) for table in job.tables], names, active)]


def _name(world: World, job: Job, group: int, block: int, slot: int) -> bytes:
    """As the worker knows it: what was sealed when it got the blocks, and what it has sealed since."""
    if slot == NO_SLOT:
        return b""
    known = world.hosts[job.host].ledger._pool.name(slot)
    if known is not None:
        return known[1]
    word = world.word(job, group, block)
    return word[1] if not world.may_write(job, group, block) and isinstance(word[1], bytes) else b""

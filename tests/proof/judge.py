"""Properties that must hold in every world."""

from __future__ import annotations

from collections import defaultdict

from paceline.core.kv_layout import NO_SLOT
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import NOBODY, TRANSFER, Lease, State
from paceline.services.kvtransfer.ledger.ledger import Ledger
from tests.proof.ledger_copy import copy_ledger
from tests.proof.parties import Job, Op, Transfer
from tests.proof.world import Host, Violation, World, blocks_of, is_prefix

Holders = defaultdict[int, list[Lease]]
"""Leases that have a slot, by slot."""


def without(table: tuple[int, ...], kept: int) -> tuple[int, ...]:
    """Return the table of a job that has given back the blocks before `kept`."""
    return (NO_SLOT,) * min(kept, len(table)) + table[kept:]


def check(world: World) -> None:
    """Check a world: each ledger is consistent, jobs touch only blocks of their own leases, and every block that others
    may find has the content of its name. Raises Violation."""
    holders = [_check_host(host) for host in world.hosts]
    for job in (*world.jobs.values(), *world.ghosts):
        if job.touches:
            _check_touched(world, job, holders[job.host])
    for transfer in world.transfers.values():
        if transfer.reader == "reading":
            _check_read(world, transfer, holders[transfer.here])
    for number, host in enumerate(world.hosts):
        if not host.away:
            _check_prefixes(world, number)


def _check_host(host: Host) -> Holders:
    if wrong := host.ledger.check():
        raise Violation("; ".join(wrong))
    for slot, name in enumerate(host.ledger._pool._names):
        if name is not None and host.memory[slot] != name:
            raise Violation(f"block {slot} is published as {name} and contains {host.memory[slot]}")
    holders: Holders = defaultdict(list)
    for lease in host.ledger.leases():
        for slot in lease.slots():
            holders[slot].append(lease)
    return holders


def _check_touched(world: World, job: Job, holders: Holders) -> None:
    """Check the blocks of a job: a step may be reading all of them, and writing to those that are not settled."""
    for group, block, slot in blocks_of(job.tables):
        _check_block(slot, job.key, job.session, holders[slot], world.may_write(job, group, block))


def _check_read(world: World, transfer: Transfer, holders: Holders) -> None:
    """Check the blocks of a reader: it may be writing to all that were not here and have not arrived yet."""
    for group, block, slot in blocks_of(transfer.tables):
        first = transfer.filled_tokens // world.setup.layout.groups[group].block_tokens
        writes = block >= first and (group, block) not in transfer.come
        _check_block(slot, transfer.key, TRANSFER, holders[slot], writes)


def _check_prefixes(world: World, number: int) -> None:
    """Check that every lease of a prefix belongs to a transfer, and that no link is brought twice at the same time."""
    moved: set[Key] = set()
    links: set[bytes] = set()
    for transfer in world.transfers.values():
        if not transfer.prefix:
            continue
        if transfer.there == number and transfer.source == "exporting" and transfer.adopted is not None:
            moved.add(transfer.adopted)
            _check_named(world, transfer)
        if transfer.here == number and transfer.reader == "reading":
            moved.add(transfer.key)
            own = set(_links_to_come(world, transfer))
            if own & links:
                raise Violation(f"the prefix of {transfer.key} is brought twice at a time")
            links |= own
    left = [
        lease.key for lease in world.hosts[number].ledger.leases() if is_prefix(lease.key) and lease.key not in moved
    ]
    if left:
        raise Violation(f"{left} have leases of prefixes, and no transfer uses them")


def _links_to_come(world: World, transfer: Transfer) -> list[bytes]:
    """Return the links that a transfer still brings. A context is reused up to a block boundary of every group."""
    request, links = world.request(transfer.request), world.setup.layout.alignment // 16
    return request.hashes[transfer.filled_tokens // 16 : request.reusable // links * links]


def _check_named(world: World, transfer: Transfer) -> None:
    """Check that blocks that the source has named are not overwritten before they are read."""
    memory = world.hosts[transfer.there].memory
    for message in transfer.stream:
        if any(memory[block.slot] != block.digest for block in message.blocks):
            raise Violation(f"a block that is read for {transfer.key} has changed since it was named")


def _check_block(slot: int, key: Key, session: int, holders: list[Lease], writes: bool) -> None:
    own = [lease for lease in holders if lease.key == key]
    if not own:
        raise Violation(f"session {session} touches block {slot} of {key}, which its lease does not have")
    if writes and (own[0].writer != session or len(holders) > 1):
        raise Violation(f"session {session} writes to block {slot} of {key}, which others may use")


def check_content(world: World, job: Job) -> None:
    """Check that computed and adopted blocks have the content that this attempt's prefill wrote, or that was published
    under their hashes."""
    context, memory = world.request(job.request).context, world.hosts[job.host].memory
    for number, block, slot in blocks_of(job.tables):
        group = world.setup.layout.groups[number]
        computed = block * group.block_tokens < context
        if job.fetch:  # blocks that no query reads were not fetched
            computed = computed and block >= group.first_needed_block(context)
        if computed and memory[slot] != world.word(job, number, block):
            raise Violation(f"block {slot} of {job.key} contains {memory[slot]}")


def check_rows(world: World, job: Job) -> None:
    """Check that a prefill worker computes a prompt with the rows of the encoding that the prompt has."""
    wanted = [
        (world.setup.layout.part(encoding=True).first_group, name) for name in world.request(job.request).media_hashes
    ]
    found = [world.hosts[job.host].memory[slot] for slot in job.rows]
    if found != wanted:
        raise Violation(f"{job.key} reads rows {found} instead of {wanted}")


def right_to(ledger: Ledger, op: Op, now: float) -> bool:
    """Return whether the sender may do this: on a live lease that is its own, with the newest generation.

    The writer of a draining lease may seal.
    """
    if op.kind in ("reserve", "pin", "release"):
        return True
    if op.kind == "seal" and any((lease.key, lease.writer) == (op.key, op.session) for lease in ledger.leases()):
        return True
    lease = next((lease for lease in ledger.leases() if lease.key[:2] == op.key[:2] and lives(lease, now)), None)
    if op.kind == "adopt" and op.session != TRANSFER:  # by the key of the reservation
        return lease is not None and lease.state is State.FILLED and lease.owner == op.session
    if lease is None or lease.key.generation != op.key.generation:
        return False
    if op.kind in ("open", "adopt"):
        return lease.state is (State.RESERVED if op.kind == "open" else State.FILLED)
    return lease.writer == op.session


def lives(lease: Lease, now: float) -> bool:
    """Return whether a lease lives. It ends at its deadline, not at the next sweep."""
    return lease.state is not State.DRAINING and lease.deadline > now


def standing(ledger: Ledger, now: float) -> object:
    """Return the state that operations may change, without deadlines and without leases that are over."""
    swept = copy_ledger(ledger)
    swept.expire(now)
    leases = {lease.key: (lease.state, lease.owner, lease.writer, lease.tables) for lease in swept.leases()}
    return leases, swept.counts()


def check_leases(world: World, renewed: set[tuple[int, str, int]]) -> None:
    """Check, after the time of a lease, that only renewed leases live.

    Args:
        renewed: (host, request id, attempt) of each renewed lease.
    """
    for number, host in enumerate(world.hosts):
        for lease in host.ledger.leases():
            if lives(lease, world.now) and (number, *lease.key[:2]) not in renewed:
                raise Violation(f"lease {lease.key} outlives its deadline")


def check_swept(world: World, host: int) -> None:
    for lease in world.hosts[host].ledger.leases():
        if lease.deadline <= world.now:
            raise Violation(f"lease {lease.key}, {lease.state.value}, outlives a sweep")


def check_exported(world: World) -> None:
    """Check, after the time of a lease, that a source still has the lease that it adopted, while it is being read."""
    for transfer in world.transfers.values():
        renews = transfer.named_all or not transfer.prefix
        if transfer.source == "exporting" and transfer.adopted is not None and renews:
            leases = world.hosts[transfer.there].ledger.leases()
            if not any(lease.key == transfer.adopted and lives(lease, world.now) for lease in leases):
                raise Violation(f"the lease of {transfer.adopted} ended while it was being read")


def check_quiet(world: World) -> None:
    """Check a world in which nothing can happen any more: every request has ended, and every block has come back."""
    unended = [index for index, asked in enumerate(world.asked) if asked.phase not in ("done", "failed")]
    if unended:
        raise Violation(f"requests {unended} never end: {[world.asked[index].phase for index in unended]}")
    if world.jobs or world.transfers:
        raise Violation(f"jobs {list(world.jobs)} and transfers {list(world.transfers)} never end")
    for host in world.hosts:
        counts = host.ledger.counts()
        if host.ledger.leases() or counts.free + counts.cached != counts.total:
            leases = [
                f"{lease.key} {lease.state.value} writer {lease.writer or NOBODY}" for lease in host.ledger.leases()
            ]
            raise Violation(f"blocks never come back: {counts}, leases {leases}")

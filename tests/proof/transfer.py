"""Transfers of a prompt or a prefix between hosts: kvtransfer's fetches.py is the reader, exports.py the source.

For a prompt, the reader is to its ledger like a prefill worker on one host, and the source like a decode worker; for a
prefix see `prefix`. Each end learns at a time of its own that the other end is gone. A read copies the present content
of the source's blocks, even if another request has them by then. Only the digests reveal this.
"""

from __future__ import annotations

from paceline.core.errors import PacelineError
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, State
from paceline.services.kvtransfer.transfers.arrivals import Arrivals, check_names
from paceline.services.kvtransfer.transfers.exports import Cursor
from tests.proof import worker
from tests.proof.calls import Answer, carry_out
from tests.proof.judge import lives
from tests.proof.parties import Block, Job, Named, Op, Transfer
from tests.proof.world import Host, World, tables_of

Id = tuple[str, int]


def put(world: World, transfer: Transfer, **changes: object) -> Transfer:
    """Store the changed transfer, or remove it if it is over at both ends."""
    transfer = transfer._replace(**changes)  # type: ignore[arg-type]
    world.transfers[transfer.id] = transfer
    if transfer.reader == transfer.source == "gone":
        del world.transfers[transfer.id]
    return transfer


def waiting_job(world: World, transfer: Transfer) -> Job | None:
    """Return the job that waits for this transfer, or None."""
    job = world.jobs.get(transfer.caller)
    if job is None or job.session != transfer.session:
        return None
    waits = job.phase == "fetching prefix" if transfer.prefix else job.fetch == "called"
    return job if waits else None


# ---- the reader


def begin(world: World, name: Id) -> None:
    """Handle the call of the decode worker: the reader opens its lease, and calls the source."""
    transfer = world.transfers[name]
    try:
        world.hosts[transfer.here].ledger.renew(transfer.session, transfer.key, world.now)
    except PacelineError:
        put(world, transfer, reader="gone")
        return
    lease = do(world, "open", transfer.here, transfer.key)
    if not isinstance(lease, Lease):
        put(world, transfer, reader="gone")
        return
    first = tuple(lease.filled_tokens // group.block_tokens for group in world.setup.layout.groups)
    put(
        world,
        transfer,
        reader="reading",
        source="exporting",
        key=lease.key,
        tables=tables_of(lease),
        filled_tokens=lease.filled_tokens,
        named=first,
    )


def read(world: World, name: Id) -> None:
    """Read the blocks of one message and publish those that have a name. The last message completes the lease."""
    transfer = world.transfers[name]
    here, there = world.hosts[transfer.here], world.hosts[transfer.there]
    (blocks, last, filled_tokens, context_hash), *stream = transfer.stream
    groups = world.setup.layout.groups
    arrivals = Arrivals(groups, transfer)  # type: ignore[arg-type]
    arrivals._come = [{block for of, block in transfer.come if of == g} for g in range(len(transfer.tables))]
    if transfer.prefix:
        check_names(groups, blocks, world.request(transfer.request).hashes)  # type: ignore[arg-type]
    places = arrivals.places(blocks)  # type: ignore[arg-type]
    for block, place in zip(blocks, places):
        here.memory[place] = there.memory[block.slot]
    try:
        if damaged(here, blocks, places):
            raise PacelineError("the content of a block is not the named one")
        for block in blocks:
            if block.hash:
                here.ledger.seal(TRANSFER, transfer.key, block.group, block.index, [block.hash], world.now)
        if last:
            arrivals.check_all(filled_tokens)
    except PacelineError:
        stop_reading(world, name)
        return
    come = transfer.come | {(block.group, block.index) for block in blocks}
    transfer = put(world, transfer, come=come, stream=tuple(stream))
    if last and transfer.prefix:
        do(world, "release", transfer.here, transfer.key)
        end_flight(world, put(world, transfer, reader="filled"))
    elif last:
        if any(group.shape.window for group in world.setup.layout.groups):
            do(world, "trim", transfer.here, transfer.key)  # blocks that no query sees have not come
        if isinstance(do(world, "fill", transfer.here, transfer.key, context_hash), Lease):
            put(world, transfer, reader="filled")
        else:
            stop_reading(world, name)


def damaged(here: Host, blocks: tuple[Block, ...], places: list[int]) -> bool:
    return any(here.memory[place] != block.digest for block, place in zip(blocks, places))


def stop_reading(world: World, name: Id) -> None:
    """End the reader, because the transfer failed or nobody waits for it. It releases its lease and writes no more."""
    transfer = world.transfers[name]
    if transfer.reader == "reading":
        do(world, "release", transfer.here, transfer.key)
    transfer = put(world, transfer, reader="gone", stream=())
    if transfer.prefix:
        end_flight(world, transfer)


def end_flight(world: World, transfer: Transfer) -> None:
    """End the flight of a prefix that has arrived or failed. Transfers that wait for it look for the prefix again."""
    for name in world.hosts[transfer.here].flights.end(transfer.id):
        put(world, world.transfers[name], reader="called")


def run_out_of_time(world: World, name: Id) -> None:
    """Give up a prefix that takes too long, whichever side is slow."""
    stop_reading(world, name)


def answer(world: World, name: Id) -> None:
    """Tell the worker that all blocks are here."""
    transfer = world.transfers[name]
    job = waiting_job(world, transfer)
    assert job is not None
    put(world, transfer, reader="gone")
    if transfer.prefix:
        worker.leave_prefix(world, job.id)
    else:
        world.put(job, fetch="answered")


# ---- the source


def take_over(world: World, name: Id) -> None:
    """Let the source adopt the lease of a complete prompt, so that the lease stays until all blocks are read."""
    transfer = world.transfers[name]
    taken = do(world, "adopt", transfer.there, transfer.source_key)
    if isinstance(taken, Lease):
        put(world, transfer, adopted=taken.key)
    else:
        stop_exporting(world, name)


def tell(world: World, name: Id) -> None:
    """Let the source name the blocks that have become complete."""
    transfer = world.transfers[name]
    lease = exported(world, transfer)
    assert lease is not None
    blocks, named = complete(world, transfer, lease)
    last = transfer.adopted is not None
    message = Named(blocks, last, lease.filled_tokens if last else 0, lease.context_hash if last else b"")
    put(world, transfer, stream=(*transfer.stream, message), named=named, named_all=message.last)


def stop_exporting(world: World, name: Id) -> None:
    """End the source, because its lease has ended or the reader is gone or done."""
    transfer = world.transfers[name]
    if transfer.adopted is not None:
        do(world, "release", transfer.there, transfer.adopted)
    put(world, transfer, source="gone")


def keep(world: World, transfer: Transfer, now: float) -> bool:
    """Do the source's regular work: renew its lease, or adopt the lease once it is filled. Return whether the source
    then owns the lease."""
    ledger = world.hosts[transfer.there].ledger
    if transfer.prefix and not transfer.named_all:
        return False  # the source of a prefix renews nothing until it has named all blocks
    try:
        if transfer.adopted is not None:
            ledger.renew(TRANSFER, transfer.adopted, now)
            return True
        lease = ledger.find(transfer.source_key, now)
        if lease.state is State.FILLED:
            put(world, transfer, adopted=ledger.adopt(TRANSFER, lease.key, now).key)
            return True
    except PacelineError:
        pass  # the source meets this error again at its next look
    return False


def exported(world: World, transfer: Transfer) -> Lease | None:
    """Return the lease at the source, or None if it does not live any more."""
    key = transfer.adopted or transfer.source_key
    for lease in world.hosts[transfer.there].ledger.leases():
        if lives(lease, world.now) and lease.key[:2] == key[:2]:
            return lease if lease.first_generation <= key.generation <= lease.key.generation else None
    return None


def complete(world: World, transfer: Transfer, lease: Lease) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Return the blocks of the source's lease that can be named now and were not, and the new value of `named`."""
    host = world.hosts[transfer.there]
    cursor = Cursor(world.setup.layout.groups, transfer.filled_tokens)
    cursor._next = list(transfer.named)
    take = cursor.sealed if transfer.adopted is None else cursor.rest
    blocks = [Block(b.group, b.index, b.slot, b.hash, host.memory[b.slot]) for b in take(lease, host.ledger.hash_of)]
    return tuple(blocks), tuple(cursor._next)


def do(world: World, kind: str, host: int, key: Key, context_hash: bytes = b"") -> Answer:
    return carry_out(world, Op(kind, host, TRANSFER, key, context_hash=context_hash))

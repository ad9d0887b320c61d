"""A prompt comes from another host: kvtransfer's fetches.py, which reads, and exports.py, the source.

To its ledger the reader is what a prefill worker is on one host, and the source what a decode worker is. That the other
end is gone each learns in its own time. A read copies what is in the blocks of the source at that moment, whosever they
are by then: nothing but the digests tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.core.errors import PacelineError
from paceline.core.types import Key
from paceline.services.kvtransfer.exports import Cursor
from paceline.services.kvtransfer.fetches import Arrivals
from paceline.services.kvtransfer.hold import TRANSFER, Hold, State
from tests.proof.calls import Answer, carry_out
from tests.proof.judge import lives
from tests.proof.parties import DECODE, Block, Job, Named, Op, Transfer
from tests.proof.world import Host, World, tables_of

Id = tuple[str, int]


def put(world: World, transfer: Transfer, **changes: object) -> Transfer:
    """Stores a transfer as it is now, until it is over at both ends."""
    transfer = transfer._replace(**changes)  # type: ignore[arg-type]
    world.transfers[transfer.id] = transfer
    if transfer.reader == transfer.source == "gone":
        del world.transfers[transfer.id]
    return transfer


def waiting_job(world: World, transfer: Transfer) -> Job | None:
    """The decode worker's, while it waits for this transfer."""
    job = world.jobs.get((DECODE, *transfer.id))
    return job if job is not None and job.fetch == "called" and job.session == transfer.session else None


# ---- the reader


def begin(world: World, name: Id) -> None:
    """The call of the decode worker has come: the reader opens its hold, and calls the source."""
    transfer = world.transfers[name]
    try:
        world.hosts[transfer.here].ledger.renew(transfer.session, transfer.key, world.now)
    except PacelineError:
        put(world, transfer, reader="gone")
        return
    hold = _do(world, "open", transfer.here, transfer.key)
    if not isinstance(hold, Hold):
        put(world, transfer, reader="gone")
        return
    first = tuple(hold.filled_tokens // group.block_tokens for group in world.setup.layout.groups)
    put(
        world,
        transfer,
        reader="reading",
        source="exporting",
        key=hold.key,
        tables=tables_of(hold),
        filled_tokens=hold.filled_tokens,
        named=first,
    )


def read(world: World, name: Id) -> None:
    """Reads the blocks of one message, publishes those that have a name, and fills the hold with the last ones."""
    transfer = world.transfers[name]
    here, there = world.hosts[transfer.here], world.hosts[transfer.there]
    (blocks, last), *stream = transfer.stream
    arrivals = Arrivals(world.setup.layout.groups, transfer)  # type: ignore[arg-type]
    arrivals._come = [{block for of, block in transfer.come if of == g} for g in range(len(transfer.tables))]
    places = arrivals.places(blocks)  # type: ignore[arg-type]
    for block, place in zip(blocks, places):
        here.memory[place] = there.memory[block.slot]
    try:
        if damaged(here, blocks, places):
            raise PacelineError("what came is not what was named")
        for block in blocks:
            if block.hash:
                here.ledger.seal(TRANSFER, transfer.key, block.group, block.index, [block.hash], world.now)
        if last:
            arrivals.check_all(world.request(transfer.request).context)
    except PacelineError:
        stop_reading(world, name)
        return
    come = transfer.come | {(block.group, block.index) for block in blocks}
    transfer = put(world, transfer, come=come, stream=tuple(stream))
    if last:
        if any(group.shape.window for group in world.setup.layout.groups):
            _do(world, "trim", transfer.here, transfer.key)  # what no query sees has not come
        if isinstance(_do(world, "fill", transfer.here, transfer.key), Hold):
            put(world, transfer, reader="filled")
        else:
            stop_reading(world, name)


def damaged(here: Host, blocks: tuple[Block, ...], places: list[int]) -> bool:
    return any(here.memory[place] != block.digest for block, place in zip(blocks, places))


def stop_reading(world: World, name: Id) -> None:
    """The transfer failed, or nobody waits for it: the reader gives its hold back. It touches nothing any more."""
    transfer = world.transfers[name]
    if transfer.reader == "reading":
        _do(world, "release", transfer.here, transfer.key)
    put(world, transfer, reader="gone", stream=())


def answer(world: World, name: Id) -> None:
    """The decode worker learns that all is here."""
    transfer = world.transfers[name]
    job = waiting_job(world, transfer)
    assert job is not None
    world.put(job, fetch="answered")
    put(world, transfer, reader="gone")


# ---- the source


def take_over(world: World, name: Id) -> None:
    """The prompt is complete: the source adopts its hold, so that it stays until all has been read."""
    transfer = world.transfers[name]
    taken = _do(world, "adopt", transfer.there, transfer.source_key)
    if isinstance(taken, Hold):
        put(world, transfer, adopted=taken.key)
    else:
        stop_exporting(world, name)


def tell(world: World, name: Id) -> None:
    """The source names the blocks that have become complete."""
    transfer = world.transfers[name]
    blocks, named = _complete(world, transfer)
    message = Named(blocks, transfer.adopted is not None)
    put(world, transfer, stream=(*transfer.stream, message), named=named, named_all=message.last)


def stop_exporting(world: World, name: Id) -> None:
    """The hold has ended, or the reader is gone or done."""
    transfer = world.transfers[name]
    if transfer.adopted is not None:
        _do(world, "release", transfer.there, transfer.adopted)
    put(world, transfer, source="gone")


def keep(world: World, transfer: Transfer, now: float) -> bool:
    """What the source does every second: it renews, or takes over what has been filled. Whether the hold is its own."""
    ledger = world.hosts[transfer.there].ledger
    try:
        if transfer.adopted is not None:
            ledger.renew(TRANSFER, transfer.adopted, now)
            return True
        hold = ledger.find(transfer.source_key, now)
        if hold.state is State.FILLED:
            put(world, transfer, adopted=ledger.adopt(TRANSFER, hold.key, now).key)
            return True
    except PacelineError:
        pass  # which it meets again when it looks
    return False


def _exported(world: World, transfer: Transfer) -> Hold | None:
    """The hold at the source, while it lives."""
    key = transfer.adopted or transfer.source_key
    for hold in world.hosts[transfer.there].ledger.holds():
        if lives(hold) and hold.key[:2] == key[:2] and hold.first_generation <= key.generation <= hold.key.generation:
            return hold
    return None


def _complete(world: World, transfer: Transfer) -> tuple[tuple[Block, ...], tuple[int, ...]]:
    """Blocks that can be named and have not been, and how far they go."""
    host, hold = world.hosts[transfer.there], _exported(world, transfer)
    assert hold is not None
    cursor = Cursor(world.setup.layout.groups, transfer.filled_tokens)
    cursor._next = list(transfer.named)
    take = cursor.sealed if transfer.adopted is None else cursor.rest
    blocks = [Block(b.group, b.index, b.slot, b.hash, host.memory[b.slot]) for b in take(hold, host.ledger.hash_of)]
    return tuple(blocks), tuple(cursor._next)


def _do(world: World, kind: str, host: int, key: Key) -> Answer:
    return carry_out(world, Op(kind, host, TRANSFER, key))


# ---- when


def progress(world: World, transfer: Transfer) -> Iterator[Callable[[World, Id], None]]:
    """What the two ends do when nothing goes wrong. A service that is away does nothing."""
    if transfer.reader != "gone" and not world.hosts[transfer.here].away:
        yield from _of_reader(transfer, waiting_job(world, transfer) is not None)
    if transfer.source != "gone" and not world.hosts[transfer.there].away:
        yield from _of_source(world, transfer)


def _of_reader(transfer: Transfer, awaited: bool) -> Iterator[Callable[[World, Id], None]]:
    if transfer.reader == "called":
        yield begin
    elif transfer.reader == "filled":
        if awaited:
            yield answer
    elif transfer.stream:
        yield read
    if not awaited or (transfer.reader == "reading" and (transfer.cut or transfer.source == "gone")):
        yield stop_reading


def _of_source(world: World, transfer: Transfer) -> Iterator[Callable[[World, Id], None]]:
    hold = _exported(world, transfer)
    if hold is None or transfer.reader != "reading" or transfer.cut:
        yield stop_exporting
    if hold is None:
        return
    if transfer.adopted is None and hold.state is State.FILLED:
        yield take_over
    elif not transfer.named_all and (transfer.adopted is not None or _complete(world, transfer)[0]):
        yield tell

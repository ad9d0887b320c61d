"""The next moves of the two ends of a transfer if nothing goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from paceline.services.kvtransfer.ledger.lease import State
from tests.proof import prefix, transfer
from tests.proof.parties import Transfer
from tests.proof.transfer import Id
from tests.proof.world import World

Acts = Iterator[Callable[[World, Id], None]]


def progress(world: World, each: Transfer) -> Acts:
    """Yield the next moves of both ends. A service that is away does nothing."""
    if each.reader != "gone" and not world.hosts[each.here].away:
        yield from _of_reader(each, transfer.waiting_job(world, each) is not None)
    if each.source != "gone" and not world.hosts[each.there].away:
        yield from _of_source(world, each)


def _of_reader(each: Transfer, awaited: bool) -> Acts:
    if each.reader == "called":
        yield prefix.ask if each.prefix else transfer.begin
    elif each.reader == "filled":
        if awaited:
            yield transfer.answer
    elif each.stream:
        yield transfer.read
    if not awaited or (each.reader == "reading" and (each.cut or each.source == "gone")):
        yield transfer.stop_reading


def _of_source(world: World, each: Transfer) -> Acts:
    uncalled = each.prefix and each.adopted is None
    lease = None if uncalled else transfer.exported(world, each)
    if uncalled:
        yield prefix.pin
    if (lease is None and not uncalled) or each.reader != "reading" or each.cut:
        yield transfer.stop_exporting
    if lease is None:
        return
    if each.adopted is None and lease.state is State.FILLED:
        yield transfer.take_over
    elif not each.named_all and (each.adopted is not None or transfer.complete(world, each, lease)[0]):
        yield transfer.tell

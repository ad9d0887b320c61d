"""A cached prefix comes from another host: kvtransfer's prefixes.py, and what fetches.py and exports.py do for it
alone. The rest of it is a transfer as any other.

To the ledger each of the two services is what a decode worker is that computes a context itself: it reserves a lease of
its own, the source of cached blocks alone.
"""

from __future__ import annotations

from paceline.core.prefix import lacking_links
from paceline.services.kvtransfer.lease import Lease
from tests.proof import transfer
from tests.proof.transfer import Id
from tests.proof.world import World, tables_of


def ask(world: World, name: Id) -> None:
    """The worker's call has come, or what it waited for is over. The prefix is brought, unless it is here or coming."""
    each = world.transfers[name]
    host, groups, request = world.hosts[each.here], world.setup.layout.groups, world.request(each.request)
    lacking = lacking_links(world.setup.layout, host.ledger.slot_of, request.hashes[: request.reusable])
    if not host.flights.ask(name, lacking):
        transfer.put(world, each, reader="waiting")
        return
    if not lacking:
        transfer.end_flight(world, transfer.put(world, each, reader="filled"))
        return
    lease = transfer.do(world, "reserve", each.here, each.key)
    if not isinstance(lease, Lease):
        transfer.end_flight(world, transfer.put(world, each, reader="gone"))
        return
    transfer.put(
        world,
        each,
        reader="reading",
        source="exporting",
        tables=tables_of(lease),
        filled_tokens=lease.filled_tokens,
        named=tuple(lease.filled_tokens // group.block_tokens for group in groups),
    )


def pin(world: World, name: Id) -> None:
    """The source has got the call, and holds what it has cached until all has been read."""
    each = world.transfers[name]
    lease = transfer.do(world, "pin", each.there, each.source_key)
    if not isinstance(lease, Lease):
        transfer.stop_exporting(world, name)
        return
    first = [lease.filled_tokens // group.block_tokens for group in world.setup.layout.groups]
    transfer.put(world, each, adopted=lease.key, named=tuple(map(min, each.named, first)))

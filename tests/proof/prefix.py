"""Fetches of a cached prefix from another host: kvtransfer's prefixes.py, and the parts of fetches.py and exports.py
that are for prefixes only. Everything else is like any other transfer.

To its ledger each of the two services is like a decode worker that computes a context itself: it reserves a lease of
its own. The lease of the source has only cached blocks.
"""

from __future__ import annotations

from paceline.core.prefix import lacking_links
from paceline.services.kvtransfer.ledger.lease import Lease
from tests.proof import transfer
from tests.proof.transfer import Id
from tests.proof.world import World, tables_of


def ask(world: World, name: Id) -> None:
    """Handle a worker's call, or the end of the transfer that it waited for. Bring the prefix if nobody else does."""
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
    """Let the source, which has received the call, lease its cached blocks until all are read."""
    each = world.transfers[name]
    lease = transfer.do(world, "pin", each.there, each.source_key)
    if not isinstance(lease, Lease):
        transfer.stop_exporting(world, name)
        return
    first = [lease.filled_tokens // group.block_tokens for group in world.setup.layout.groups]
    transfer.put(world, each, adopted=lease.key, named=tuple(map(min, each.named, first)))

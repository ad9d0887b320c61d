"""Who owns which blocks, as the ledger is shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from paceline.core.kv_layout import NO_SLOT, KVLayout
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_to_pb
from paceline.services.kvtransfer.hold import NOBODY, Hold


def describe_holds(
    holds: Sequence[Hold], layout: KVLayout, workers: Mapping[int, str], most: int, now: float
) -> pb.LedgerReply:
    """The part of a reply that names the owner of every block that is held or in flight.

    A block that several holds share is counted at the oldest of them, so that what is shown adds up to the counts.

    Args:
        workers: their ids by session.
        most: so many holds are shown, the oldest; the others only counted. 0 shows all.
    """
    reply = pb.LedgerReply()
    seen: set[int] = set()
    for hold in sorted(holds, key=lambda hold: hold.created):
        slots = hold.slots()
        own = len(set(slots) - seen)
        seen.update(slots)
        if most and len(reply.holds) == most:
            reply.holds_left_out += 1
            reply.blocks_left_out += own
        else:
            reply.holds.append(_describe(hold, layout, workers, len(slots) - own, now))
    return reply


def _describe(hold: Hold, layout: KVLayout, workers: Mapping[int, str], shared: int, now: float) -> pb.HoldInfo:
    info = pb.HoldInfo(
        key=key_to_pb(hold.key),
        state=hold.state.value,
        owner=workers.get(hold.owner, "gone"),
        writer="" if hold.writer == NOBODY else workers.get(hold.writer, "gone"),
        blocks=len(hold.slots()),
        age_ms=round((now - hold.created) * 1000),
        expires_in_ms=0 if math.isinf(hold.deadline) else max(0, round((hold.deadline - now) * 1000)),
        shared_blocks=shared,
        filled_tokens=hold.filled_tokens,
        token_count=hold.token_count,
    )
    for group, table in zip(layout.groups, hold.tables):
        # A draft model's group may have the name of one of the target's.
        info.blocks_by_group[group.shape.name] += len(table) - table.count(NO_SLOT)
    return info

"""The effect of an operation on the ledger that receives it."""

from __future__ import annotations

from paceline.core.errors import PacelineError, StaleError
from paceline.core.types import Key
from paceline.services.kvtransfer.ledger.lease import TRANSFER, Lease, State
from paceline.services.kvtransfer.ledger.ledger import Ledger
from tests.proof import judge
from tests.proof.parties import Op
from tests.proof.world import Violation, World, is_encoding, is_prefix, origin

Answer = Lease | PacelineError | None


def carry_out(world: World, op: Op) -> Answer:
    """Call the ledger. Return the lease or the error."""
    ledger = world.hosts[op.host].ledger
    allowed = judge.right_to(ledger, op, world.now)
    try:
        answer = _call(world, ledger, op)
    except PacelineError as error:
        return error
    if not allowed:
        raise Violation(f"{op} was carried out, but its sender had no right to it")
    return answer


def _call(world: World, ledger: Ledger, op: Op) -> Answer:
    request = world.request(int(origin(op.key.request_id).split(".")[0]))
    request = request.another if op.another else request
    session, key, now = op.session, op.key, world.now
    match op.kind:
        case "reserve" if is_encoding(key):
            tokens = 16 * len(request.media)
            return ledger.reserve(session, key, request.media_hashes, tokens, tokens, now, encoding=True)
        case "pin" if is_encoding(key):
            return ledger.pin(session, key, request.media_hashes, now, encoding=True)
        case "seal" if is_encoding(key):
            return ledger.seal(session, key, 0, op.published // 16, request.media_hashes[op.published // 16 :], now)
        case "reserve" if is_prefix(key):
            hashes = request.hashes[: request.reusable]
            return ledger.reserve(session, key, hashes, 16 * len(hashes), 16 * len(hashes), now)
        case "pin":
            return ledger.pin(session, key, request.hashes[: request.reusable], now)
        case "reserve":
            tokens = request.context + (request.growth if key.generation > 1 else 0)
            return ledger.reserve(session, key, request.hashes, tokens, max(0, request.context - 1), now)
        case "open":
            return ledger.open(session, key, now)
        case "fill":
            return ledger.fill(session, key, request.context, now, op.context_hash)
        case "adopt":
            return ledger.adopt(session, key, now) if session == TRANSFER else _adopt(ledger, session, key, now)
        case "extend":
            return ledger.extend(session, key, request.context + request.growth, now)
        case "seal":
            for index, group in enumerate(world.setup.layout.groups):
                ends = request.hashes[group.block_tokens // 16 - 1 :: group.block_tokens // 16]
                first = op.published // group.block_tokens
                ledger.seal(session, key, index, first, ends[first:], now)
        case "trim":
            for index, group in enumerate(world.setup.layout.groups):
                if group.shape.window:
                    ledger.trim(session, key, index, group.first_needed_block(request.context), now)
        case "release":
            ledger.release(session, key, now)
    return None


def _adopt(ledger: Ledger, session: int, key: Key, now: float) -> Lease:
    """Adopt a lease if it is filled, as services/kvtransfer/ledger/adoptions.py does."""
    lease = ledger.find(key, now)
    if lease.owner != session or lease.state is not State.FILLED:
        raise StaleError(f"{session} cannot adopt {key}")
    return ledger.adopt(session, lease.key, now)

"""Translation of a worker's operations, as protobuf messages, to calls of the ledger, and of the results back."""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator

from opentelemetry import trace

from paceline.core import env
from paceline.core.context import Tail
from paceline.core.errors import BusyError, InvalidRequestError, PacelineError, StaleError
from paceline.core.kv_layout import NO_SLOT
from paceline.core.telemetry import request_span
from paceline.core.types import Key
from paceline.proto import common_pb2
from paceline.proto import kvtransfer_pb2 as pb
from paceline.services.common.wire import key_from_pb, key_to_pb
from paceline.services.kvtransfer.ledger.block_tables import check_hashes
from paceline.services.kvtransfer.ledger.claim import Claim
from paceline.services.kvtransfer.ledger.lease import Lease, UnknownLeaseError
from paceline.services.kvtransfer.ledger.ledger import Ledger

log = logging.getLogger(__name__)

_MAX_REQUEST_ID = 256
_MAX_GENERATION = 1 << 31
_MAX_KEYS = 1 << 16
"""Largest number of keys of one renewal. A worker has as many leases as it runs requests."""

_CODES: tuple[tuple[type[PacelineError], pb.Code.ValueType], ...] = (
    (UnknownLeaseError, pb.CODE_UNKNOWN),
    (StaleError, pb.CODE_STALE),
    (BusyError, pb.CODE_EXHAUSTED),
    (InvalidRequestError, pb.CODE_INVALID),
)


def apply(ledger: Ledger, session: int, operation: pb.Operation, now: float) -> pb.Result:
    """Apply one operation to the ledger and return its result. An error becomes the result's code and message."""
    if operation.HasField("renew"):
        return _renew(ledger, session, operation.renew, now)
    with traced(operation) as span:
        result, lease = _carry_out(ledger, session, operation, now)
        _describe(span, result, lease)
        return result


def adopted(ledger: Ledger, operation: pb.Operation, outcome: Lease | PacelineError, began: int) -> pb.Result:
    """Return the result of an adoption that was requested at `began`, on time.time_ns()."""
    with traced(operation, began) as span:
        if isinstance(outcome, PacelineError):
            result = refused(outcome)
            _describe(span, result, None)
        else:
            result = pb.Result(adoption=adoption_to_pb(outcome, ledger))
            _describe(span, result, outcome)
        return result


@contextlib.contextmanager
def traced(operation: pb.Operation, began: int | None = None) -> Iterator[trace.Span | None]:
    """Record an operation of a traced request as a span, which is yielded. Yield None if traces are not exported.

    Args:
        began: start of the span, on time.time_ns(); None means now.
    """
    name = operation.WhichOneof("op")
    if name is None or not operation.traceparent or not env.exports_traces():
        yield None
        return
    request_id = getattr(operation, name).key.request_id
    with request_span(name, request_id, {"traceparent": operation.traceparent}, began) as span:
        yield span


def changed_leases(operations: Iterable[pb.Operation]) -> Iterator[Key]:
    """Yield the keys of leases that operations have sealed, filled or released."""
    for operation in operations:
        if (name := operation.WhichOneof("op")) in ("seal", "fill", "release"):
            yield key_from_pb(getattr(operation, name).key)


def _describe(span: trace.Span | None, result: pb.Result, lease: Lease | None) -> None:
    if span is not None:
        span.set_attribute("paceline.code", pb.Code.Name(result.code))
        if lease is not None:
            span.set_attributes({"paceline.state": lease.state.value, "paceline.blocks": len(lease.slots())})


def _carry_out(ledger: Ledger, session: int, operation: pb.Operation, now: float) -> tuple[pb.Result, Lease | None]:
    try:
        lease = _call(ledger, session, operation, now)
    except PacelineError as error:
        return refused(error), None
    if lease is None:
        return pb.Result(), None
    extra = {"request_id": lease.key.request_id}
    log.debug("%s: lease %s is %s", operation.WhichOneof("op"), lease.key, lease.state.value, extra=extra)
    if operation.HasField("fill"):
        return pb.Result(), lease  # the caller does not own the blocks any more
    # Blocks that an extension adds have no names.
    names = None if operation.HasField("extend") else ledger.names(lease)
    return pb.Result(lease=lease_to_pb(lease, names)), lease


def _call(ledger: Ledger, session: int, operation: pb.Operation, now: float) -> Lease | None:
    """Call the ledger for one operation. Return the lease if the operation's result describes it."""
    match operation.WhichOneof("op"):
        case "reserve":
            reserve = operation.reserve
            key, hashes, encoding = key_of(reserve.key), reserve.hashes, reserve.encoding
            if reserve.only_cached:
                return ledger.pin(session, key, hashes, now, encoding)
            limits = (reserve.token_count, reserve.max_cached_tokens)
            tails = [_tail(tail) for tail in reserve.tails]
            return ledger.reserve(session, key, hashes, *limits, now, reserve.priority, encoding, tails=tails)
        case "open":
            return ledger.open(session, key_of(operation.open.key), now)
        case "fill":
            fill = operation.fill
            check_hashes([fill.context_hash] if fill.context_hash else [])
            return ledger.fill(session, key_of(fill.key), fill.filled_tokens, now, fill.context_hash)
        case "extend":
            return ledger.extend(session, key_of(operation.extend.key), operation.extend.token_count, now)
        case "seal":
            seal = operation.seal
            ledger.seal(session, key_of(seal.key), seal.group, seal.first_block, seal.hashes, now)
        case "keep":
            keep = operation.keep
            copies = key_of(keep.copies) if keep.HasField("copies") else None
            ledger.keep(session, key_of(keep.key), _tail(keep.tail), now, copies)
        case "trim":
            trim = operation.trim
            ledger.trim(session, key_of(trim.key), trim.group, trim.first_kept_block, now)
        case "release":
            ledger.release(session, key_of(operation.release.key), now)
        case _:
            raise InvalidRequestError("an operation is empty or of a newer version than this service")
    return None


def _tail(message: pb.Tail) -> Tail:
    check_hashes([message.name])
    return Tail(message.length, message.name)


def _renew(ledger: Ledger, session: int, message: pb.Renew, now: float) -> pb.Result:
    """Renew leases. In the result, `lost` has the keys that cannot be renewed, and the code is that of the first of
    these.
    """
    if len(message.keys) > _MAX_KEYS:
        return refused(InvalidRequestError(f"a renewal may have {_MAX_KEYS} keys, not {len(message.keys)}"))
    result = pb.Result()
    for key in message.keys:
        try:
            ledger.renew(session, key_of(key), now)
        except PacelineError as error:
            if not result.lost:
                result.MergeFrom(refused(error))
            result.lost.append(key)
    return result


def refused(error: PacelineError) -> pb.Result:
    """Return the result of an operation that failed."""
    return pb.Result(code=next(code for kind, code in _CODES if isinstance(error, kind)), message=str(error))


def key_of(message: common_pb2.Key) -> Key:
    """Return the key that a message describes. Raises InvalidRequestError if its request id or generation is out of
    bounds.
    """
    if not 0 < len(message.request_id) <= _MAX_REQUEST_ID:
        raise InvalidRequestError(f"key.request_id must have 1 to {_MAX_REQUEST_ID} characters")
    if message.generation > _MAX_GENERATION:
        raise InvalidRequestError(f"key.generation must be at most {_MAX_GENERATION}")
    return key_from_pb(message)


def adoption_to_pb(lease: Lease, ledger: Ledger) -> pb.Adoption:
    """Return the message for an adopted lease. It uses binary search, because a handoff waits for this."""
    adoption = pb.Adoption(key=key_to_pb(lease.key), filled_tokens=lease.filled_tokens, context_hash=lease.context_hash)
    for table in lease.tables:
        trimmed = bisect_left(table, True, key=lambda slot: slot != NO_SLOT)
        adoption.trimmed_blocks.append(trimmed)
        adoption.sealed_blocks.append(bisect_left(table, True, trimmed, key=lambda slot: ledger.hash_of(slot) is None))
    return adoption


def lease_to_pb(lease: Lease, names: list[list[bytes]] | None) -> pb.Lease:
    """Return the message for a lease. `names` are the hashes of its blocks (`Ledger.names`); None leaves them out."""
    tables = [pb.BlockTable(slots=table) for table in lease.tables]
    for table, hashes in zip(tables, names or ()):
        table.hashes.extend(hashes)
    return pb.Lease(
        key=key_to_pb(lease.key),
        filled_tokens=lease.filled_tokens,
        tables=tables,
        context_hash=lease.context_hash,
        encoding=lease.encoding,
    )


def claim_from_pb(message: pb.Claim, session: int) -> Claim:
    """Return the claim of a worker with this session. Raises InvalidRequestError if its key is invalid."""
    return Claim(
        session=session,
        key=key_of(message.key),
        token_count=message.token_count,
        filled_tokens=message.filled_tokens,
        tables=[list(table.slots) for table in message.tables],
        names=[list(table.hashes) for table in message.tables],
        active=message.active,
        encoding=message.encoding,
    )

"""The JSON of traces, for `GET /trace/{id}` and for lists of requests.

Instants and durations are in milliseconds, and instants count from the request's arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.services.gateway.sequences.attempt_trace import AttemptTrace
from paceline.services.gateway.sequences.trace_facts import EncodingTrace, Gaps, WorkerName, gaps_of
from paceline.services.gateway.sequences.traces import RequestTrace, SequenceTrace

EARLIER = 10
"""Limit of the older requests with the same id that a trace names."""

Json = dict[str, Any]
Clock = Callable[[float | None], float | None]
"""A function from an instant of time.monotonic() to milliseconds; None if the instant has not come yet."""


def describe(trace: RequestTrace, earlier: Sequence[RequestTrace], now: float) -> Json:
    """Return the JSON of a request's trace. `now` is the time on time.monotonic().

    Args:
        earlier: older requests with the same id, the newest first.
    """

    def at(instant: float | None) -> float | None:
        return None if instant is None else _ms(instant - trace.arrived)

    return {
        "request_id": trace.request_id,
        "own_id": trace.own_id,
        "session_id": trace.session_id or None,
        "earlier": [each.own_id for each in earlier[:EARLIER]],
        "state": trace.outcome or "running",
        "arrived": trace.clock.isoformat(timespec="milliseconds"),
        "ms": at(now if trace.ended is None else trace.ended),
        "model": trace.model,
        "endpoint": trace.endpoint,
        "streamed": trace.streamed,
        "asked": trace.asked,
        "sequences": trace.sequences,
        "parts": [_part(trace, record, at) for record in sorted(trace.records, key=lambda record: record.index)],
        "parts_left_out": trace.left_out,
    }


def summarize(trace: RequestTrace, now: float) -> Json:
    """Return one line about a request, for a list. `now` is the time on time.monotonic()."""
    records = trace.records
    first = min((times[0] for record in records if (times := record.token_times)), default=None)
    taken = [record.workers for record in records if record.admitted is not None]
    return {
        "request_id": trace.request_id,
        "own_id": trace.own_id,
        "state": trace.outcome or "running",
        "arrived": trace.clock.isoformat(timespec="milliseconds"),
        "ms": _ms((now if trace.ended is None else trace.ended) - trace.arrived),
        "ttft_ms": None if first is None else _ms(first - trace.arrived),
        "model": trace.model,
        "endpoint": trace.endpoint,
        "streamed": trace.streamed,
        "sequences": trace.sequences,
        "prompt_tokens": sum(record.prompt_tokens for record in records),
        "cached_tokens": sum(record.cached_tokens for record in records),
        "generated_tokens": sum(attempt.tokens for record in records for attempt in record.tries),
        "attempts": sum(record.attempts for record in records),
        "workers": sorted({worker for pair in taken for worker in pair if worker}),
    }


def _part(trace: RequestTrace, record: SequenceTrace, at: Clock) -> Json:
    end = {
        "at_ms": at(record.ended),
        "reason": record.outcome,
        "why": record.why,
        "generated_tokens": record.generated_tokens,
        "attempts": record.attempts,
    }
    return {
        "index": record.index,
        "sequence_id": trace.sequence_id(record.index),
        "began_ms": at(record.arrived),
        "prompt_tokens": record.prompt_tokens,
        "max_tokens": record.max_tokens,
        "attempts": [_attempt(attempt, at) for attempt in record.tries],
        "attempts_left_out": record.left_out,
        "end": None if record.ended is None else end,
    }


def _attempt(attempt: AttemptTrace, at: Clock) -> Json:
    return {
        "attempt": attempt.number,
        "queue": {
            "began_ms": at(attempt.queued),
            "ms": None if attempt.asked is None else _ms(attempt.asked - attempt.queued),
            "ahead": attempt.ahead,
            "waited_for": dict(attempt.waited_for),
        },
        "asked": _asked(attempt, at),
        "admission": _admission(attempt, at),
        "encodings": [_encoding(encoding, at) for encoding in attempt.encodings],
        "encodings_left_out": attempt.encodings_left_out,
        "prefill": _prefill(attempt, at),
        "first_token_ms": at(attempt.token_times[0] if attempt.token_times else None),
        "handoff": _handoff(attempt, at),
        "decode": _decode(attempt, at),
        "ended_ms": at(attempt.ended),
        "outcome": attempt.outcome or None,
        "failure": _failure(attempt, at),
    }


def _asked(attempt: AttemptTrace, at: Clock) -> Json | None:
    """Return None while the attempt waits for workers that have room."""
    if attempt.asked is None:
        return None
    return {"at_ms": at(attempt.asked), "decode": _place(attempt.decode), "prefill": _place(attempt.prefill)}


def _failure(attempt: AttemptTrace, at: Clock) -> Json | None:
    """Return None unless the attempt has failed or was cancelled."""
    if attempt.outcome in ("", "finished"):
        return None
    return {"at_ms": at(attempt.ended), "reason": attempt.failure}


def _admission(attempt: AttemptTrace, at: Clock) -> Json | None:
    """Return None until workers have admitted the attempt."""
    if attempt.admitted is None:
        return None
    return {
        "asked_ms": at(attempt.asked),
        "at_ms": at(attempt.admitted),
        "decode": _place(attempt.decode),
        "prefill": _place(attempt.prefill),
        "context_tokens": attempt.context_tokens,
        "cached_tokens": attempt.cached_tokens,
        "blocks": attempt.blocks,
        "cached_blocks": attempt.cached_blocks,
        "numerics_changes": attempt.numerics_changes,
    }


def _encoding(encoding: EncodingTrace, at: Clock) -> Json:
    return {
        "began_ms": at(encoding.began),
        "ended_ms": at(encoding.ended),
        "worker": encoding.worker,
        "kind": encoding.kind,
        "tokens": encoding.tokens,
        "cached": encoding.cached,
        "queue_ms": _ms(encoding.queue_seconds),
        "encode_ms": _ms(encoding.encode_seconds),
        "bytes": encoding.bytes,
        "bytes_moved": encoding.bytes_moved,
    }


def _prefill(attempt: AttemptTrace, at: Clock) -> Json | None:
    """Describe the steps that computed the context, on either worker. Returns None if no step was reported."""
    chunks = attempt.chunks
    if not chunks.count:
        return None
    return {
        # A short step may have begun before the gateway learned that the attempt was admitted.
        "began_ms": at(max(chunks.began, attempt.admitted or 0.0)),
        "ended_ms": at(chunks.ended),
        "tokens": chunks.tokens,
        "steps": chunks.count,
        "steps_ms": _ms(chunks.step_seconds),
        "chunks": [
            {
                "at_ms": at(chunk.at),
                "worker": chunk.worker,
                "first": chunk.first,
                "tokens": chunk.tokens,
                "step_ms": _ms(chunk.step_seconds),
            }
            for chunk in chunks.kept
        ],
        "chunks_left_out": chunks.count - len(chunks.kept),
    }


def _handoff(attempt: AttemptTrace, at: Clock) -> Json | None:
    """Return None until the prefill worker has filled the blocks, and if there is no prefill worker."""
    if attempt.filled is None:
        return None
    adopted = attempt.adopted
    described: Json = {"filled_ms": at(attempt.filled), "told_ms": at(attempt.handed_over)}
    if adopted is None or attempt.handed_over is None:
        return described | {"adopted_ms": None, "ms": None, "blocks": None, "bytes_moved": None, "path": None}
    # The worker's clock differs from ours, so it reports a duration.
    done = attempt.handed_over + adopted.adopt_ms / 1000
    return described | {
        "adopted_ms": at(done),
        "ms": _ms(done - attempt.filled),
        "blocks": adopted.blocks,
        "bytes_moved": adopted.bytes_moved,
        "path": adopted.path,
    }


def _decode(attempt: AttemptTrace, at: Clock) -> Json | None:
    """Return None until the decode worker has sent a token. Steps and drafts are counts of its last report."""
    times, effort = attempt.decode_times, attempt.effort
    if not times:
        return None
    return {
        "first_token_ms": at(times[0]),
        "last_token_ms": at(times[-1]),
        "tokens": attempt.decode_tokens,
        "between_tokens": _gaps(attempt.gaps or gaps_of(times)),
        "steps": None if effort is None else effort.steps,
        "drafts": None if effort is None else effort.drafts,
        "draft_tokens": None if effort is None else effort.draft_tokens,
        "accepted_tokens": None if effort is None else effort.accepted_tokens,
        "preemptions": None if effort is None else effort.preemptions,
    }


def _gaps(gaps: Gaps | None) -> Json | None:
    """Describe the times between messages with tokens. One message has all tokens that were ready together."""
    if gaps is None:
        return None
    return {"p50_ms": _ms(gaps.p50), "p99_ms": _ms(gaps.p99), "max_ms": _ms(gaps.longest)}


def _place(place: WorkerName | None) -> Json | None:
    if place is None:
        return None
    return {"worker": place.worker, "host": place.host, "numerics": place.numerics and str(place.numerics)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)

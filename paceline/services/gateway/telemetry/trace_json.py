"""The JSON of traces, for `GET /trace/{id}` and for lists of requests.

Instants and durations are in milliseconds, and instants count from the request's arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from paceline.services.gateway.sequences.attempt_trace import AttemptTrace, EncodingTrace, Gaps, WorkerName, gaps_of
from paceline.services.gateway.sequences.traces import RequestTrace, SequenceTrace

EARLIER = 10
"""Largest number of older requests with the same id that a trace lists."""

Json = dict[str, Any]
Clock = Callable[[float | None], float | None]
"""A function that converts an instant on time.monotonic() to milliseconds since the request's arrival. It returns None
if the instant is None, because it has not come yet."""


def describe(request_trace: RequestTrace, earlier: Sequence[RequestTrace], now: float) -> Json:
    """Return the JSON of a request's trace.

    Args:
        earlier: older requests with the same id, the newest first.
        now: the present instant, on time.monotonic().
    """

    def at(instant: float | None) -> float | None:
        return None if instant is None else _ms(instant - request_trace.arrived)

    return {
        "request_id": request_trace.request_id,
        "own_id": request_trace.own_id,
        "session_id": request_trace.session_id or None,
        "earlier": [each.own_id for each in earlier[:EARLIER]],
        "state": request_trace.outcome or "running",
        "arrived": request_trace.clock.isoformat(timespec="milliseconds"),
        "ms": at(now if request_trace.ended is None else request_trace.ended),
        "model": request_trace.model,
        "endpoint": request_trace.endpoint,
        "streamed": request_trace.streamed,
        "asked": request_trace.asked,
        "sequences": request_trace.sequences,
        "parts": [
            _part(request_trace, trace, at) for trace in sorted(request_trace.traces, key=lambda trace: trace.index)
        ],
        "parts_left_out": request_trace.left_out,
    }


def summarize(request_trace: RequestTrace, now: float) -> Json:
    """Return a short JSON object about a request, for a list of requests.

    Args:
        now: the present instant, on time.monotonic().
    """
    traces = request_trace.traces
    first = min((times[0] for trace in traces if (times := trace.token_times)), default=None)
    taken = [trace.workers for trace in traces if trace.admitted is not None]
    return {
        "request_id": request_trace.request_id,
        "own_id": request_trace.own_id,
        "state": request_trace.outcome or "running",
        "arrived": request_trace.clock.isoformat(timespec="milliseconds"),
        "ms": _ms((now if request_trace.ended is None else request_trace.ended) - request_trace.arrived),
        "ttft_ms": None if first is None else _ms(first - request_trace.arrived),
        "model": request_trace.model,
        "endpoint": request_trace.endpoint,
        "streamed": request_trace.streamed,
        "sequences": request_trace.sequences,
        "prompt_tokens": sum(trace.prompt_tokens for trace in traces),
        "cached_tokens": sum(trace.cached_tokens for trace in traces),
        "generated_tokens": sum(attempt_trace.tokens for trace in traces for attempt_trace in trace.tries),
        "attempts": sum(trace.attempts for trace in traces),
        "workers": sorted({worker for pair in taken for worker in pair if worker}),
    }


def _part(request_trace: RequestTrace, trace: SequenceTrace, at: Clock) -> Json:
    end = {
        "at_ms": at(trace.ended),
        "reason": trace.outcome,
        "why": trace.why,
        "generated_tokens": trace.generated_tokens,
        "attempts": trace.attempts,
    }
    return {
        "index": trace.index,
        "sequence_id": request_trace.sequence_id(trace.index),
        "began_ms": at(trace.arrived),
        "prompt_tokens": trace.prompt_tokens,
        "max_tokens": trace.max_tokens,
        "attempts": [_attempt(attempt_trace, at) for attempt_trace in trace.tries],
        "attempts_left_out": trace.left_out,
        "end": None if trace.ended is None else end,
    }


def _attempt(attempt_trace: AttemptTrace, at: Clock) -> Json:
    return {
        "attempt": attempt_trace.number,
        "queue": {
            "began_ms": at(attempt_trace.queued),
            "ms": None if attempt_trace.asked is None else _ms(attempt_trace.asked - attempt_trace.queued),
            "ahead": attempt_trace.ahead,
            "waited_for": dict(attempt_trace.waited_for),
        },
        "asked": _asked(attempt_trace, at),
        "admission": _admission(attempt_trace, at),
        "encodings": [_encoding(encoding, at) for encoding in attempt_trace.encodings],
        "encodings_left_out": attempt_trace.encodings_left_out,
        "prefill": _prefill(attempt_trace, at),
        "first_token_ms": at(attempt_trace.token_times[0] if attempt_trace.token_times else None),
        "handoff": _handoff(attempt_trace, at),
        "decode": _decode(attempt_trace, at),
        "ended_ms": at(attempt_trace.ended),
        "outcome": attempt_trace.outcome or None,
        "failure": _failure(attempt_trace, at),
    }


def _asked(attempt_trace: AttemptTrace, at: Clock) -> Json | None:
    """Describe the workers that were asked; None while the attempt waits for workers that have room."""
    if attempt_trace.asked is None:
        return None
    return {
        "at_ms": at(attempt_trace.asked),
        "decode": _place(attempt_trace.decode),
        "prefill": _place(attempt_trace.prefill),
    }


def _failure(attempt_trace: AttemptTrace, at: Clock) -> Json | None:
    """Describe why the attempt failed or was cancelled; None if it did not fail and was not cancelled."""
    if attempt_trace.outcome in ("", "finished"):
        return None
    return {"at_ms": at(attempt_trace.ended), "reason": attempt_trace.failure}


def _admission(attempt_trace: AttemptTrace, at: Clock) -> Json | None:
    """Describe the admission of the attempt; None until workers have admitted it."""
    if attempt_trace.admitted is None:
        return None
    return {
        "asked_ms": at(attempt_trace.asked),
        "at_ms": at(attempt_trace.admitted),
        "decode": _place(attempt_trace.decode),
        "prefill": _place(attempt_trace.prefill),
        "context_tokens": attempt_trace.context_tokens,
        "cached_tokens": attempt_trace.cached_tokens,
        "blocks": attempt_trace.blocks,
        "cached_blocks": attempt_trace.cached_blocks,
        "numerics_changes": attempt_trace.numerics_changes,
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


def _prefill(attempt_trace: AttemptTrace, at: Clock) -> Json | None:
    """Describe the steps that computed the context, on whichever worker; None if no step was reported."""
    chunks = attempt_trace.chunks
    if not chunks.count:
        return None
    return {
        # A short step may have begun before the gateway learned that the attempt was admitted.
        "began_ms": at(max(chunks.began, attempt_trace.admitted or 0.0)),
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


def _handoff(attempt_trace: AttemptTrace, at: Clock) -> Json | None:
    """Describe the handoff; None until the prefill worker has filled the blocks, and if there is no prefill worker."""
    if attempt_trace.filled is None:
        return None
    adopted = attempt_trace.adopted
    described: Json = {"filled_ms": at(attempt_trace.filled), "told_ms": at(attempt_trace.handed_over)}
    if adopted is None or attempt_trace.handed_over is None:
        return described | {"adopted_ms": None, "ms": None, "blocks": None, "bytes_moved": None, "path": None}
    # The worker's clock differs from ours, so it reports a duration.
    done = attempt_trace.handed_over + adopted.adopt_ms / 1000
    return described | {
        "adopted_ms": at(done),
        "ms": _ms(done - attempt_trace.filled),
        "blocks": adopted.blocks,
        "bytes_moved": adopted.bytes_moved,
        "path": adopted.path,
    }


def _decode(attempt_trace: AttemptTrace, at: Clock) -> Json | None:
    """Describe the decoding; None until the decode worker has sent a token. Counts come from its last report."""
    times, effort = attempt_trace.decode_times, attempt_trace.effort
    if not times:
        return None
    return {
        "first_token_ms": at(times[0]),
        "last_token_ms": at(times[-1]),
        "tokens": attempt_trace.decode_tokens,
        "between_tokens": _gaps(attempt_trace.gaps or gaps_of(times)),
        "steps": None if effort is None else effort.steps,
        "drafts": None if effort is None else effort.drafts,
        "draft_tokens": None if effort is None else effort.draft_tokens,
        "accepted_tokens": None if effort is None else effort.accepted_tokens,
        "preemptions": None if effort is None else effort.preemptions,
    }


def _gaps(gaps: Gaps | None) -> Json | None:
    """Describe the gaps between messages with tokens. A message contains all tokens that were ready together."""
    if gaps is None:
        return None
    return {"p50_ms": _ms(gaps.p50), "p99_ms": _ms(gaps.p99), "max_ms": _ms(gaps.longest)}


def _place(place: WorkerName | None) -> Json | None:
    if place is None:
        return None
    return {"worker": place.worker, "host": place.host, "numerics": place.numerics and str(place.numerics)}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)

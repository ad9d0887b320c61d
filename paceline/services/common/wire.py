"""Conversion between the types of `paceline.core` and protobuf messages."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from paceline.core.adapters import Adapter
from paceline.core.context import Context
from paceline.core.errors import ConstraintError, InvalidRequestError
from paceline.core.media import DIGEST_BYTES, Grid, MediaInput, MediaKind, MediaSpan
from paceline.core.planner.distribution import Distribution
from paceline.core.step_loads import StepLoad
from paceline.core.types import Constraint, ConstraintKind, FinishReason, Key, Logprob, SamplingParams, Token
from paceline.proto import common_pb2 as pb
from paceline.proto import fleet_pb2

MESSAGE_LOGPROBS = 1 << 18
"""Approximate number of logprobs in one message, about 4 MB. A single token may have a logprob for each token of the
vocabulary."""

_REASONS = {
    None: pb.FINISH_REASON_NONE,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}

_KINDS = {
    ConstraintKind.JSON_SCHEMA: pb.CONSTRAINT_KIND_JSON_SCHEMA,
    ConstraintKind.REGEX: pb.CONSTRAINT_KIND_REGEX,
    ConstraintKind.CHOICE: pb.CONSTRAINT_KIND_CHOICE,
    ConstraintKind.GRAMMAR: pb.CONSTRAINT_KIND_GRAMMAR,
    ConstraintKind.ANSWER: pb.CONSTRAINT_KIND_ANSWER,
}

_MEDIA_KINDS = {
    MediaKind.IMAGE: pb.MEDIA_KIND_IMAGE,
    MediaKind.VIDEO_FRAME: pb.MEDIA_KIND_VIDEO_FRAME,
    MediaKind.AUDIO: pb.MEDIA_KIND_AUDIO,
}


def key_to_pb(key: Key) -> pb.Key:
    return pb.Key(request_id=key.request_id, attempt=key.attempt, generation=key.generation)


def key_from_pb(message: pb.Key) -> Key:
    return Key(message.request_id, message.attempt, message.generation)


def reason_to_pb(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    return _REASONS[reason]


def reason_from_pb(reason: pb.FinishReason.ValueType) -> FinishReason | None:
    return next(ours for ours, theirs in _REASONS.items() if theirs == reason)


def fill_token(message: pb.Token, token: Token) -> None:
    message.id = token.id
    for entry in token.logprobs:
        message.logprobs.add(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)


def token_to_pb(token: Token) -> pb.Token:
    message = pb.Token()
    fill_token(message, token)
    return message


def token_from_pb(message: pb.Token) -> Token:
    if not message.logprobs:
        return Token(message.id)
    return Token(message.id, tuple(Logprob(entry.token_id, entry.logprob, entry.rank) for entry in message.logprobs))


def sampling_to_pb(params: SamplingParams) -> pb.Sampling:
    return pb.Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        stop_token_ids=sorted(params.stop_token_ids),
        min_tokens=params.min_tokens,
        max_tokens=params.max_tokens,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        constraint=constraint_to_pb(params.constraint) if params.constraint is not None else None,
        bad_words=[pb.TokenSequence(token_ids=word) for word in params.bad_words],
        logprob_token_ids=params.logprob_token_ids,
    )


def sampling_from_pb(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        repetition_penalty=message.repetition_penalty,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=dict(message.logit_bias),
        allowed_token_ids=tuple(message.allowed_token_ids),
        stop_token_ids=frozenset(message.stop_token_ids),
        min_tokens=message.min_tokens,
        max_tokens=message.max_tokens,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
        constraint=constraint_from_pb(message.constraint) if message.HasField("constraint") else None,
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        logprob_token_ids=tuple(message.logprob_token_ids),
    )


def sampling_of(work: pb.Work) -> SamplingParams:
    """Return the sampling parameters of an attempt. Requests with different cache salts never share a compiled
    constraint, so that the time of an answer does not reveal the constraints of other clients.
    """
    params = sampling_from_pb(work.sampling)
    if params.constraint is None:
        return params
    return replace(params, constraint=replace(params.constraint, domain=work.cache_salt))


def constraint_to_pb(constraint: Constraint) -> pb.Constraint:
    ends = sorted(constraint.end_token_ids)
    kind, grammar = _KINDS[constraint.kind], constraint.grammar
    return pb.Constraint(kind=kind, text=constraint.text, end_token_ids=ends, grammar=grammar)


def constraint_from_pb(message: pb.Constraint) -> Constraint:
    """Convert a message to a constraint. Raises ConstraintError if this release does not know its kind."""
    kind = next((ours for ours, theirs in _KINDS.items() if theirs == message.kind), None)
    if kind is None:
        raise ConstraintError(f"a worker does not know constraint kind {message.kind}; it is older than the gateway")
    return Constraint(kind, message.text, frozenset(message.end_token_ids), grammar=message.grammar)


def scores_to_pb(first: int, tokens: Sequence[Token]) -> Iterator[pb.PromptLogprobs]:
    """Yield messages with the logprobs of prompt tokens: several messages if there are more than MESSAGE_LOGPROBS.

    Args:
        first: position of the first token in the prompt.
    """
    count = max(1, MESSAGE_LOGPROBS // max((len(token.logprobs) for token in tokens), default=1))
    for start in range(0, len(tokens), count):
        part = tokens[start : start + count]
        yield pb.PromptLogprobs(first=first + start, tokens=[token_to_pb(token) for token in part])


def span_to_pb(span: MediaSpan) -> pb.MediaSpan:
    kind = _MEDIA_KINDS[span.kind]
    return pb.MediaSpan(start=span.start, length=span.length, digest=span.digest, kind=kind, grid=span.grid)


def spans_from_pb(messages: Sequence[pb.MediaSpan]) -> tuple[MediaSpan, ...]:
    """Convert messages to the spans of a context. Raises InvalidRequestError if spans overlap or are not in order, or
    if the grid of a span does not have as many cells as the span has tokens."""
    spans = tuple(
        MediaSpan(
            message.start,
            message.length,
            message.digest,
            _media_kind(message.kind),
            _grid(message.grid, message.length),
        )
        for message in messages
    )
    if any(len(span.digest) != DIGEST_BYTES or span.length < 1 for span in spans):
        raise InvalidRequestError(f"a span of media has no token or a digest that is not of {DIGEST_BYTES} bytes")
    if any(after.start < before.end for before, after in pairwise(spans)):
        raise InvalidRequestError("spans of media are not in order and apart from each other")
    return spans


def _grid(sizes: Sequence[int], length: int) -> Grid | None:
    if not sizes:
        return None
    if len(sizes) != 3 or math.prod(sizes) != length:
        raise InvalidRequestError(f"a span of media with {length} tokens has the grid {list(sizes)}")
    frames, rows, columns = sizes
    return frames, rows, columns


def context_from_pb(work: pb.Work) -> Context:
    """Return the context of an attempt. Raises InvalidRequestError if its spans of media are not valid."""
    spans, adapter = spans_from_pb(work.media), work.adapter.digest
    return Context(work.token_ids, work.cache_salt, spans, shared_tokens=work.shared_tokens, adapter=adapter)


def adapter_to_pb(adapter: Adapter) -> pb.Adapter:
    return pb.Adapter(name=adapter.name, folder=adapter.folder, digest=adapter.digest)


def work_model(model: str, has_adapter: bool) -> str:
    """Return `Work.model` for a model with this digest.

    It has an ending if the work has an adapter, so that workers of releases that know no adapters refuse the work.
    Otherwise they would compute the model alone.
    """
    return f"{model} with an adapter" if has_adapter else model


def media_input_to_pb(media: MediaInput) -> pb.MediaInput:
    return pb.MediaInput(
        kind=_MEDIA_KINDS[media.kind], length=media.length, dtype=media.dtype, shape=media.shape, data=media.data
    )


def media_input_from_pb(message: pb.MediaInput) -> MediaInput:
    """Convert a message to an encoder's input. Raises InvalidRequestError if this release does not know its kind."""
    return MediaInput(_media_kind(message.kind), message.length, message.dtype, tuple(message.shape), message.data)


def _media_kind(kind: pb.MediaKind.ValueType) -> MediaKind:
    for ours, theirs in _MEDIA_KINDS.items():
        if theirs == kind:
            return ours
    raise InvalidRequestError(f"a worker does not know media of kind {kind}; it is older than the gateway")


def distribution_to_pb(values: Distribution) -> fleet_pb2.Distribution:
    """Convert a distribution to a message with consistent counts, although another thread may add values meanwhile."""
    counts = sorted(dict(values.counts).items())
    buckets = [bucket for bucket, _ in counts]
    steps = [buckets[0], *(later - earlier for earlier, later in pairwise(buckets))] if buckets else []
    return fleet_pb2.Distribution(buckets=steps, counts=[round(times) for _, times in counts], total=values.total)


def load_to_pb(load: StepLoad) -> fleet_pb2.StepLoad:
    """Convert the totals of a worker's steps to a message."""
    seconds = distribution_to_pb(load.seconds)
    return fleet_pb2.StepLoad(load=load.number, tokens=load.tokens, context=load.context, seconds=seconds)


def distribution_from_pb(message: fleet_pb2.Distribution) -> Distribution:
    """Convert a message to a distribution. Buckets without a count are left out."""
    buckets = accumulate(message.buckets)
    return Distribution({bucket: float(times) for bucket, times in zip(buckets, message.counts)}, message.total)

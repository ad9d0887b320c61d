"""Bounds of every field of an attempt's work. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.media import MediaSpan
from paceline.proto import common_pb2 as pb
from paceline.services.common.wire import spans_from_pb

MAX_ID_CHARACTERS = 256
MAX_SALT_CHARACTERS = 1024
MAX_ADDRESS_CHARACTERS = 512
MAX_GENERATION = 1 << 30
"""Largest generation that new work may have. Each change of hands adds one, so no generation exceeds 32 bits."""
MAX_BAD_WORDS = 4096
MAX_BAD_WORD_TOKENS = 4096
"""Largest number of tokens of one bad word. All of them are compared with the context at every new token."""

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    # Logits divided by a value nearer to zero would not be finite.
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
}
_MOST_BIAS = 1000.0


def check_work(work: pb.Work, max_model_len: int, vocab_size: int, has_grids: bool = False) -> None:
    """Raise InvalidRequestError for work that a worker with these limits can never do, whoever asks for it.

    Args:
        has_grids: whether each span of media needs a grid; otherwise a span must have no grid.
    """
    _check_key(work)
    length = len(work.token_ids)
    if not 0 < work.prompt_tokens <= length:
        raise InvalidRequestError("a request needs at least one prompt token", "prompt")
    if length >= max_model_len:
        raise InvalidRequestError(
            f"the context has {length} tokens; this worker takes at most {max_model_len - 1}", "prompt"
        )
    spans = _check_spans(work, work.prompt_tokens, has_grids)
    shared = work.shared_tokens
    if shared > work.prompt_tokens or shared % BASE_TOKENS or any(span.start < shared for span in spans):
        raise InvalidRequestError(
            f"shared_tokens must be a multiple of {BASE_TOKENS} at the front of the prompt without media", "prompt"
        )
    if len(work.prefix_source) > MAX_ADDRESS_CHARACTERS:
        raise InvalidRequestError(f"prefix_source may have at most {MAX_ADDRESS_CHARACTERS} characters")
    _check_sampling(work.sampling, vocab_size)
    _check_tokens(work, vocab_size)


def _check_spans(work: pb.Work, tokens: int, has_grids: bool) -> Sequence[MediaSpan]:
    """Return the spans of media among the first `tokens` tokens. Raises InvalidRequestError if they do not fit."""
    spans = spans_from_pb(work.media)
    if any(span.end > tokens for span in spans):
        raise InvalidRequestError("a span of media ends after the prompt", "prompt")
    if any((span.grid is not None) != has_grids for span in spans):
        raise InvalidRequestError(
            f"this model's spans of media {'need a' if has_grids else 'have no'} grid: gateway and workers must be of "
            "one release"
        )
    return spans


def check_encode(work: pb.Work, most_rows: int) -> None:
    """Raise InvalidRequestError for work of the kind ENCODE that a worker can never do.

    Args:
        most_rows: largest number of rows of an encoding.
    """
    _check_key(work)
    spans = spans_from_pb(work.media)
    if work.token_ids or len(spans) != 1 or spans[0].start:
        raise InvalidRequestError("work to encode has no tokens and one span, which begins at token 0")
    if spans[0].length > most_rows:
        raise InvalidRequestError(
            f"an encoding has {spans[0].length} rows; this worker takes at most {most_rows}", "prompt"
        )


def check_pool(work: pb.Work, max_model_len: int) -> None:
    """Raise InvalidRequestError for work of the kind POOL that a worker can never do. The model checks token ids.

    Args:
        max_model_len: largest number of tokens of an input.
    """
    _check_key(work)
    if work.token_ids or not work.pool.inputs:
        raise InvalidRequestError("work to pool has at least one input, and no other tokens")
    for each in work.pool.inputs:
        length = len(each.token_ids)
        if not 0 < length <= max_model_len:
            raise InvalidRequestError(f"an input has {length} tokens; this worker takes 1 to {max_model_len}", "input")
        if each.second_start >= length or each.prompt_tokens > length:
            raise InvalidRequestError("the second text and the prompt of an input must be inside of it", "input")


def check_pool_contexts(work: pb.Work, vocab_size: int, has_grids: bool = False) -> None:
    """Raise InvalidRequestError for work of the kind POOL that a decoder can never do.

    Args:
        has_grids: as in `check_work`.
    """
    for each in work.pool.inputs:
        check_token(max(each.token_ids), vocab_size)
    if work.media and len(work.pool.inputs) > 1:
        raise InvalidRequestError("work to pool that has media has one input", "input")
    _check_spans(work, len(work.pool.inputs[0].token_ids), has_grids)


def check_token(token: int, vocab_size: int) -> None:
    """Raise InvalidRequestError if `token` is not below the size of the vocabulary."""
    if token >= vocab_size:
        raise InvalidRequestError(f"token ids must be below the vocabulary's size, {vocab_size}")


def _check_key(work: pb.Work) -> None:
    if not work.key.request_id:
        raise InvalidRequestError("a request needs an id", "request_id")
    if len(work.key.request_id) > MAX_ID_CHARACTERS:
        raise InvalidRequestError(f"an id may have at most {MAX_ID_CHARACTERS} characters", "request_id")
    if work.key.generation > MAX_GENERATION:
        raise InvalidRequestError(f"key.generation must be at most {MAX_GENERATION}")
    if len(work.cache_salt) > MAX_SALT_CHARACTERS:
        raise InvalidRequestError(f"a cache_salt may have at most {MAX_SALT_CHARACTERS} characters", "cache_salt")


def _check_sampling(sampling: pb.Sampling, vocab_size: int) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequestError("max_tokens must be at least 1", "max_tokens")
    for name, (least, most) in _RANGES.items():
        if not least <= getattr(sampling, name) <= most:  # false for NaN, too
            raise InvalidRequestError(f"{name} must be from {least:g} to {most:g}", name)
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) > vocab_size:
            raise InvalidRequestError(f"{name} must be at most the size of the vocabulary, {vocab_size}", name)
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"there may be at most {MAX_BAD_WORDS} bad words", "bad_words")
    if any(not 0 < len(word.token_ids) <= MAX_BAD_WORD_TOKENS for word in sampling.bad_words):
        raise InvalidRequestError(f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens", "bad_words")
    if any(not math.fabs(bias) <= _MOST_BIAS for bias in sampling.logit_bias.values()):
        raise InvalidRequestError(f"logit_bias must be from -{_MOST_BIAS:g} to {_MOST_BIAS:g}", "logit_bias")
    if sampling.HasField("constraint") and sampling.allowed_token_ids:
        message = "allowed tokens and a constraint together may leave no token"
        raise InvalidRequestError(message, "allowed_token_ids")


def _check_tokens(work: pb.Work, vocab_size: int) -> None:
    sampling = work.sampling
    sets = (
        sampling.stop_token_ids,
        sampling.allowed_token_ids,
        sampling.logit_bias,
        sampling.constraint.end_token_ids,
        sampling.logprob_token_ids,
    )
    if any(len(tokens) > vocab_size for tokens in sets):
        raise InvalidRequestError(f"a set of tokens may have at most {vocab_size} entries, like the vocabulary")
    for tokens in (work.token_ids, *sets, *(word.token_ids for word in sampling.bad_words)):
        check_token(max(tokens, default=0), vocab_size)

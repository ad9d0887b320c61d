"""The sampling parameters of a request, with the defaults of the model and the limits of the server. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.errors import InvalidRequestError
from paceline.core.types import SamplingParams
from paceline.services.gateway.planning.schemas import GenerationRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer

T = TypeVar("T")

LEAST_TOP_P = 1e-9
"""The `top_p` that workers get instead of 0. Either value leaves only the most likely token."""


@dataclass(frozen=True, slots=True)
class LogprobRules:
    """The server's options for logprobs."""

    most: int = 20
    """Largest number of tokens for which a request may want logprobs at each position; -1 allows the whole
    vocabulary."""
    as_ids: bool = False
    """Whether logprobs name tokens by their ids if the request does not choose."""


def logprob_count(wanted: int | None, param: str, rules: LogprobRules, tokenizer: Tokenizer) -> int | None:
    """Return the number of most likely tokens to report at each position; None if no logprobs are wanted.

    Args:
        wanted: the number in the request; -1 for the whole vocabulary, None for no logprobs.
        param: the field with this number, for errors.

    Raises InvalidRequestError if the request may not have so many.
    """
    if wanted is None:
        return None
    most = tokenizer.vocab_size if rules.most < 0 else min(rules.most, tokenizer.vocab_size)
    count = tokenizer.vocab_size if wanted < 0 else wanted
    if count > most:
        message = f"{param}: this server returns logprobs of at most {most} tokens at a position (--max-logprobs)"
        raise InvalidRequestError(message, param)
    return count


def resolve_sampling(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    if request.min_tokens > max_tokens:
        raise InvalidRequestError(f"min_tokens must be at most max_tokens, which is {max_tokens}", "min_tokens")
    for name in ("stop_token_ids", "allowed_token_ids", "logprob_token_ids"):
        check_ids(getattr(request, name) or [], tokenizer.vocab_size, name)
    defaults = tokenizer.defaults
    stop_token_ids = frozenset(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_token_ids |= tokenizer.eos_token_ids
    _check_choice(request, stop_token_ids, tokenizer.vocab_size)
    bad_words = sequences_of(request.bad_words or (), tokenizer)
    if request.allowed_token_ids is not None and {(id,) for id in request.allowed_token_ids} <= {*bad_words}:
        raise InvalidRequestError("bad_words: they forbid all of allowed_token_ids; allow others", "bad_words")
    return SamplingParams(
        temperature=_either(request.temperature, defaults.temperature),
        # -1 is an older way to ask for all tokens.
        top_k=max(0, _either(request.top_k, defaults.top_k)),
        top_p=max(_either(request.top_p, defaults.top_p), LEAST_TOP_P),
        min_p=_either(request.min_p, defaults.min_p),
        seed=(request.seed or 0) % 2**64,  # without a seed of the client, the one of `derived_seed` follows
        repetition_penalty=_either(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request, tokenizer.vocab_size),
        allowed_token_ids=tuple(dict.fromkeys(request.allowed_token_ids or ())),
        stop_token_ids=stop_token_ids,
        min_tokens=request.min_tokens,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        bad_words=bad_words,
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
    )


def gives_seed(request: GenerationRequest) -> bool:
    """Return whether the client gave a seed. The value -1 counts as none."""
    return request.seed not in (None, -1)


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of a prompt whose client gave no seed. Every gateway derives the same seed.

    Args:
        seed: the number that was drawn for the request.
        index: number of the prompt in its request.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {index}".encode()).digest()[:8], "big")


def _either(value: T | None, default: T) -> T:
    return default if value is None else value


def check_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError, which names `param` and the ids, if token ids are not in the vocabulary."""
    if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
        raise InvalidRequestError(
            f"{param}: token ids {_some(outside)} are out of vocabulary, which has {vocab_size} tokens", param
        )


def check_no_media(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise InvalidRequestError if token ids belong to media, which a prompt of token ids cannot have."""
    if found := [token_id for token_id in token_ids if token_id in tokenizer.reserved_ids]:
        raise InvalidRequestError(
            f"{param}: token ids {_some(found)} belong to images, videos or audio, which a prompt of token ids cannot "
            "have; send messages to /v1/chat/completions",
            param,
        )


def _check_choice(request: GenerationRequest, stop_token_ids: frozenset[int], vocab_size: int) -> None:
    """Raise InvalidRequestError if no token may be sampled while the answer is shorter than min_tokens."""
    if request.min_tokens == 0:
        return
    if request.allowed_token_ids is not None and stop_token_ids.issuperset(request.allowed_token_ids):
        message = (
            "allowed_token_ids: all of them end the answer, which min_tokens forbids; allow others, or set it to 0"
        )
        raise InvalidRequestError(message, "allowed_token_ids")
    if len(stop_token_ids) >= vocab_size:
        message = (
            "stop_token_ids: every token ends the answer, which min_tokens forbids; leave some out, or set it to 0"
        )
        raise InvalidRequestError(message, "stop_token_ids")


def _logit_bias(request: GenerationRequest, vocab_size: int) -> dict[int, float]:
    given = request.logit_bias or {}
    if wrong := [key for key in given if not (key.isascii() and key.isdigit() and len(key) <= 20)]:
        raise InvalidRequestError(f"logit_bias: keys must be token ids, not {_some(wrong)}", "logit_bias")
    bias = {int(key): value for key, value in given.items()}
    check_ids(list(bias), vocab_size, "logit_bias")
    return bias


def _some(values: list[T]) -> str:
    """Return the first values and the number of others as text, for a message of bounded length."""
    shown = ", ".join(repr(value)[:40] for value in values[:5])
    return shown + (f" and {len(values) - 5} more" if len(values) > 5 else "")


def sequences_of(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of `bad_words`: each word at the beginning of a text, and after a space, as in vLLM.

    Other token sequences that spell a word stay possible.

    Raises:
        InvalidRequestError: a word is not valid Unicode.
    """
    texts = [text for word in words for text in (word.lstrip() or word, " " + (word.lstrip() or word))]
    found = (tuple(tokenizer.encode(text, False, "bad_words")) for text in texts)
    return tuple(dict.fromkeys(sequence for sequence in found if sequence))

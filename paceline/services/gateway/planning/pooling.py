"""Inputs of pooling: texts, pairs of texts and token ids become inputs for workers, in bundles. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaInput, MediaSpan
from paceline.core.pooling import ROW_TASKS, PoolRole, PoolTask, PoolWish
from paceline.core.pooling_config import PoolingConfig
from paceline.core.types import SamplingParams
from paceline.proto import common_pb2
from paceline.services.common.pool_wire import FLOAT_BYTES
from paceline.services.gateway.http.errors import ContextLengthError
from paceline.services.gateway.planning.batch_encoding import Encoded, EncodedText, MarkedText, encode_texts
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.pool_bundle import PoolBundle, PoolInput
from paceline.services.gateway.planning.sampling import check_ids, check_no_media
from paceline.services.gateway.planning.tokenizer import Tokenizer

Content: TypeAlias = str | Sequence[int] | tuple[str, str]
"""A text, token ids, or a pair of texts, such as a query and a document."""
Side: TypeAlias = Literal["start", "end"]

BUNDLE_TOKENS = 8192
"""Largest number of tokens of a bundle, unless a single input has more. It is some hundredths of a second of work for
a small model, and a lost worker loses no more."""
LEAST_BUNDLE_TOKENS = 1024
"""Number of tokens up to which a request is not divided among workers, because a call has a cost of its own."""
BUNDLE_INPUTS = 512
GROUP_CHARACTERS = 256 << 10
"""Number of characters of texts that are tokenized together, unless a single text has more."""
INPUT_CHARACTERS = 20
"""Number of characters whose tokenization takes as long as all else that is done for an input."""
MOST_RESULT_BYTES = 48 << 20
"""Largest size of the result of one input, in bytes: it must fit into one message."""


@dataclass(frozen=True, slots=True)
class TextInput:
    """One input, as a client sent it."""

    content: Content
    place: str
    """Field of the request's body, such as "input[3]", for errors."""
    media: tuple[MediaSpan, ...] = ()
    """Runs of placeholder tokens in `content`, which then has token ids."""
    encoder_inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolOptions:
    """What to compute from the inputs of one request. None takes the model's own setting."""

    task: PoolTask = "embed"
    dimensions: int | None = None
    """Length to which vectors are cut before they are normalized."""
    normalize: bool | None = None
    """Whether vectors get the length 1."""
    activation: bool | None = None
    """Whether numbers of labels become probabilities."""
    prompt: str = ""
    """Text to put before each input that is a text."""
    role: PoolRole | None = None
    """Whether the inputs are queries or documents, for models whose vectors of tokens differ between the two."""
    truncate: Side | None = None
    """Side at which inputs that are too long lose tokens; None refuses them."""
    max_tokens: int | None = None
    """Largest number of tokens of an input, special tokens included; None is the limit of the model."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to texts. Token ids stay as they are."""
    priority: int | None = None
    """Priority of the request; lower is more urgent."""
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The inputs of one request as workers compute them."""

    plan: Plan
    """A plan with a prompt for each bundle."""
    places: list[str]
    """Field of the body of each input, for errors."""
    token_ids: list[Sequence[int]]
    """Tokens of each input."""
    cut_tokens: list[int]
    """Number of tokens that each input has lost."""
    result_bytes: int
    """Upper bound of the size of all results, in bytes."""


def plan_pool(
    inputs: Sequence[TextInput],
    options: PoolOptions,
    config: PoolingConfig,
    tokenizer: Tokenizer,
    max_tokens: int,
    workers: int,
) -> PoolPlan:
    """Return the plan of a request that pools.

    Args:
        max_tokens: largest number of tokens of an input that the workers take.
        workers: number of workers among which the request may be divided.

    Raises:
        InvalidRequestError: an input is empty, no text or not in the vocabulary, or an option does not fit the model.
        ContextLengthError: an input is too long.
    """
    if options.dimensions is not None:
        config.check_dimensions(options.dimensions)
    most = min(max_tokens, config.limit(options.role))
    limit = most if options.max_tokens is None else min(options.max_tokens, most)
    kept = _prompt_tokens(options, config, tokenizer)
    pooled: list[PoolInput] = []
    cut_tokens: list[int] = []
    for group in _groups(inputs, len(options.prompt)):
        for text, own in zip(group, _encode(group, options, config, tokenizer), strict=True):
            fitted = _fit(own, limit, options.truncate, text)
            prompt = 0 if isinstance(text.content, list) else min(kept, len(fitted))
            ids, second = fitted.token_ids, fitted.second_start
            pooled.append(PoolInput(ids, second, prompt, text.media, text.encoder_inputs))
            cut_tokens.append(len(own) - len(fitted))
    wish = PoolWish(options.task, options.dimensions, options.normalize, options.activation, options.role)
    bundles = [PoolBundle(wish, part) for part in divide(pooled, workers)]
    sizes = [_result_bytes(own, options, config, text.place) for text, own in zip(inputs, pooled, strict=True)]
    return PoolPlan(
        plan=_plan(bundles, options),
        places=[each.place for each in inputs],
        token_ids=[each.token_ids for each in pooled],
        cut_tokens=cut_tokens,
        result_bytes=sum(sizes),
    )


def characters(content: Content) -> int:
    """Return the number of characters of a text or of both texts of a pair, or of token ids."""
    if isinstance(content, tuple) and isinstance(content[0], str):
        return sum(map(len, content))
    return len(content)


def effort(inputs: Sequence[TextInput], options: PoolOptions) -> int:
    """Return the number of characters whose tokenization takes as long as the plan of a request."""
    each_more = len(options.prompt) + INPUT_CHARACTERS
    return sum(characters(each.content) + each_more for each in inputs)


def _groups(inputs: Sequence[TextInput], prompt: int) -> Iterator[list[TextInput]]:
    """Yield inputs that are tokenized together, in order. While a text is tokenized, each token takes a hundred bytes.

    Args:
        prompt: number of characters that stand before each text.
    """
    group: list[TextInput] = []
    size = 0
    for each in inputs:
        own = characters(each.content) + prompt
        if group and size + own > GROUP_CHARACTERS:
            yield group
            group, size = [], 0
        group.append(each)
        size += own
    if group:
        yield group


def join_plans(plans: Sequence[PoolPlan]) -> PoolPlan:
    """Return one plan for the inputs of several ones, in order."""
    return PoolPlan(
        plan=replace(plans[0].plan, prompts=[prompt for each in plans for prompt in each.plan.prompts]),
        places=[place for each in plans for place in each.places],
        token_ids=[ids for each in plans for ids in each.token_ids],
        cut_tokens=[cut for each in plans for cut in each.cut_tokens],
        result_bytes=sum(each.result_bytes for each in plans),
    )


def divide(inputs: Sequence[PoolInput], workers: int) -> Iterator[list[PoolInput]]:
    """Yield bundles of inputs, in order. A request of many tokens has at least a bundle for each worker. An input with
    media is a bundle of its own, because the encodings of a bundle belong to one context.

    Args:
        workers: number of workers among which the request may be divided.
    """
    total = sum(len(each.token_ids) for each in inputs)
    most = min(BUNDLE_TOKENS, max(LEAST_BUNDLE_TOKENS, -(-total // max(1, workers))))
    bundle: list[PoolInput] = []
    tokens = 0
    for each in inputs:
        is_full = tokens + len(each.token_ids) > most or len(bundle) >= BUNDLE_INPUTS
        if bundle and (is_full or each.media or bundle[-1].media):
            yield bundle
            bundle, tokens = [], 0
        bundle.append(each)
        tokens += len(each.token_ids)
    if bundle:
        yield bundle


def _plan(bundles: Iterable[PoolBundle], options: PoolOptions) -> Plan:
    prompts = [
        PromptPlan(
            text=None,
            token_ids=[token for each in bundle.inputs for token in each.token_ids],
            sampling=SamplingParams(max_tokens=0),
            media=bundle.inputs[0].media,
            inputs=bundle.inputs[0].encoder_inputs,
            pool=bundle,
        )
        for bundle in bundles
    ]
    return Plan(
        prompts=prompts,
        n=1,
        stop=(),
        include_stop=False,
        skip_special_tokens=True,
        cache_salt=options.cache_salt,
        wanted_priority=options.priority,
        kind=common_pb2.WORK_KIND_POOL,
        has_seed=True,
    )


def _encode(
    inputs: Sequence[TextInput], options: PoolOptions, config: PoolingConfig, tokenizer: Tokenizer
) -> list[Encoded]:
    """Return the tokens of all inputs, before they are cut."""

    suffix = config.query_suffix if options.role == "query" else ""
    marker = config.marker_ids.get(options.role or "document")
    special = options.add_special_tokens and config.special_tokens

    def prepared(text: str) -> str:
        return (text.lower() if config.lower_case else text) + suffix

    texts: list[tuple[str | tuple[str, str], str]] = []
    for each in inputs:
        match each.content:
            case str(text):
                _check_filled(text, each.place)
                texts.append((prepared(options.prompt + text), each.place))
            case (str(first), str(second)):
                second = second.lower() if config.lower_case else second
                texts.append(((prepared(options.prompt + first), second), each.place))
    found = iter(encode_texts(tokenizer, texts, special))
    encoded: list[Encoded] = []
    for each in inputs:
        content = each.content
        if isinstance(content, str) or (len(content) == 2 and isinstance(content[0], str)):
            encoded.append(_marked(next(found), marker, int(special), config.dropped_ids))
        else:
            ids = [token for token in content if isinstance(token, int)]
            check_ids(ids, tokenizer.vocab_size, each.place)
            if not each.media:
                check_no_media(ids, tokenizer, each.place)
            encoded.append(EncodedText(ids))
        if not len(encoded[-1]):
            what = "has no word that the model knows" if isinstance(content, str) else "must not be empty"
            raise InvalidRequestError(f"{each.place} {what}", each.place)
    return encoded


def _marked(encoded: Encoded, marker: int | None, place: int, dropped: frozenset[int]) -> Encoded:
    """Return a text with the token at `place` that says what it is, and without tokens that the model does not get."""
    if marker is not None:
        return MarkedText(encoded, marker, place)
    if dropped.isdisjoint(encoded.token_ids):
        return encoded
    return EncodedText([token for token in encoded.token_ids if token not in dropped])


def _check_filled(text: str, place: str) -> None:
    if not text:
        raise InvalidRequestError(f"{place} must not be empty", place)


def _fit(encoded: Encoded, limit: int, truncate: Side | None, text: TextInput) -> Encoded:
    """Return an input with at most `limit` tokens. Raises ContextLengthError if it would have to be cut and may not."""
    count, place = len(encoded), text.place
    if count <= limit:
        return encoded
    if text.media:
        message = f"{place} has {count} tokens with its media, and this model takes {limit} at once: send smaller ones"
        raise ContextLengthError(message, place, count, limit)
    if truncate is None:
        message = (
            f"{place} has {count} tokens and this model takes {limit} at once: shorten it, or ask for it to be cut "
            "(truncate_prompt_tokens: -1)"
        )
        raise ContextLengthError(message, place, count, limit)
    if limit < encoded.least_tokens:
        message = f"{place}: {limit} tokens have no room for a token of the text beside the special tokens"
        raise InvalidRequestError(message, place)
    return encoded.cut(limit, truncate)


def _prompt_tokens(options: PoolOptions, config: PoolingConfig, tokenizer: Tokenizer) -> int:
    """Return the number of tokens at the front of each text that belong to the prompt, if the model leaves these out.

    As in sentence-transformers, special tokens before the prompt belong to it.
    """
    if config.include_prompt or not options.prompt:
        return 0
    text = options.prompt.lower() if config.lower_case else options.prompt
    (own,) = encode_texts(tokenizer, [(text, "prompt")], options.add_special_tokens)
    return len(own) - own.special_end


def _result_bytes(pooled: PoolInput, options: PoolOptions, config: PoolingConfig, place: str) -> int:
    """Return an upper bound of the size of an input's result. Raises InvalidRequestError if it is too large."""
    values = 2 if options.task == "sparse" else options.dimensions or config.dim
    rows = len(pooled.token_ids) if options.task in ROW_TASKS else 1
    if config.splade is not None:
        rows = config.dim
    elif config.expansion is not None and options.role == "query":
        rows = max(rows, config.expansion.length)
    size = rows * values * FLOAT_BYTES
    if size > MOST_RESULT_BYTES:
        most = MOST_RESULT_BYTES // (values * FLOAT_BYTES)
        message = f"{place} has {rows} tokens; with a result for each token, this server takes {most} at once"
        raise ContextLengthError(message, place, rows, most)
    return size

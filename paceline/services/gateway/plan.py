"""The plan of a request: prompts as token ids, and every sampling parameter resolved. Pure functions."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from paceline.core.errors import InvalidRequestError
from paceline.core.media import MediaInput, MediaSpan
from paceline.core.types import SamplingParams
from paceline.proto import common_pb2
from paceline.services.gateway.answer_format import constraint_of
from paceline.services.gateway.answer_plan import AnswerPlan, answer_constraint, plan_answer
from paceline.services.gateway.answers.registry import AnswerForms
from paceline.services.gateway.bad_words import sequences_of
from paceline.services.gateway.chat_prompt import render_chat
from paceline.services.gateway.errors import ContextLengthError, NoWorkerError
from paceline.services.gateway.fill_in_middle import fill_in_middle
from paceline.services.gateway.media.expansion import NO_ITEMS, Expansions
from paceline.services.gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest, RepetitionDetection
from paceline.services.gateway.token_schemas import TokenSampling, TokensRequest
from paceline.services.gateway.tokenizer import Tokenizer

Kind: TypeAlias = common_pb2.WorkKind.ValueType

DEFAULT_COMPLETION_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LogprobRules:
    """The server's options for logprobs."""

    most: int = 20
    """Most tokens for which a request may want logprobs at each position; -1 allows the whole vocabulary."""
    as_ids: bool = False
    """Whether tokens are named by their ids if a request does not say it."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and the parameters of its continuation."""

    text: str | None
    """None if the client sent token ids, or if the prompt was truncated."""
    token_ids: list[int]
    sampling: SamplingParams
    answer: AnswerPlan | None = None
    """How answers are read; None if they are nothing but content."""
    media: tuple[MediaSpan, ...] = ()
    """Runs of placeholder tokens, in order."""
    inputs: tuple[MediaInput, ...] = ()
    """The encoder's input for each of `media`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A whole request, with `n` choices for each prompt."""

    prompts: list[PromptPlan]
    n: int
    stop: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    cache_salt: str
    priority: int = 0
    """Lower is more urgent."""
    kind: Kind = common_pb2.WORK_KIND_GENERATE
    """SCORE if nothing is to be generated (max_tokens 0 with echo)."""
    repetition: RepetitionDetection | None = None
    """When answers that repeat themselves end; None if they go on."""
    logprobs_as_ids: bool = False
    """Whether logprobs name tokens by their ids."""
    session_id: str = ""
    """The client's name of the conversation; "" if there is none."""


def kind_of(request: GenerationRequest) -> Kind:
    """Return the kind of work that a request asks for."""
    return common_pb2.WORK_KIND_SCORE if request.max_tokens == 0 else common_pb2.WORK_KIND_GENERATE


def plan_completion(
    request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int, rules: LogprobRules = LogprobRules()
) -> Plan:
    """Return the plan of POST /v1/completions.

    Args:
        max_model_len: longest context of any worker, in tokens; 0 if there is no worker.
        rules: the server's options for logprobs.

    Raises:
        InvalidRequestError: a value is wrong in a way that the schema alone cannot check.
        ContextLengthError: the prompt, or the prompt and the answer together, is too long.
        NoWorkerError: there is no worker.
    """
    kind = kind_of(request)
    logprobs = _count(request.logprobs, "logprobs", rules, tokenizer)
    scores = _count(request.prompt_logprobs, "prompt_logprobs", rules, tokenizer)
    if request.echo and logprobs is not None:
        scores = max(logprobs, scores or 0)
    if kind == common_pb2.WORK_KIND_SCORE:
        scores = scores or 0
    prompts = []
    for index, prompt in enumerate(request.prompts):
        param = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str) and request.suffix:
            prompt = fill_in_middle(prompt, request.suffix, tokenizer.vocabulary.added_tokens)
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            _check_length(prompt, request, tokenizer, max_model_len, param)
            ids = tokenizer.encode(prompt, request.add_special_tokens, param)
        else:
            ids = list(prompt)
            _check_reserved(ids, tokenizer, param)
        wanted = 1 if kind == common_pb2.WORK_KIND_SCORE else request.max_tokens
        prompts.append(
            _plan_prompt(
                request,
                tokenizer,
                text,
                ids,
                wanted,
                DEFAULT_COMPLETION_TOKENS,
                logprobs,
                scores,
                max_model_len,
                param,
            )
        )
    return _plan(request, prompts, kind, rules)


def plan_chat(
    request: ChatRequest,
    tokenizer: Tokenizer,
    forms: AnswerForms,
    max_model_len: int,
    rules: LogprobRules = LogprobRules(),
    media: Expansions = NO_ITEMS,
) -> Plan:
    """Return the plan of POST /v1/chat/completions. Arguments and errors are as for `plan_completion`.

    Args:
        forms: how the model writes reasoning and tool calls.
        media: what stands in the prompt for each image, video or audio clip.
    """
    rendered = render_chat(request, tokenizer, forms)
    text = rendered.text
    _check_length(text, request, tokenizer, max_model_len, "messages")
    encoded = rendered.encode(media, tokenizer, request.add_special_tokens)
    if rendered.items and request.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise InvalidRequestError(f"{name}: a prompt with images, videos or audio cannot be truncated", name)
    wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = _count(request.top_logprobs or 0, "top_logprobs", rules, tokenizer) if request.logprobs else None
    prompt = _plan_prompt(
        request,
        tokenizer,
        text,
        encoded.token_ids,
        wanted,
        tokenizer.defaults.max_new_tokens or max_model_len,
        logprobs,
        _count(request.prompt_logprobs, "prompt_logprobs", rules, tokenizer),
        max_model_len,
        "messages",
    )
    constraint = answer_constraint(request, forms, tokenizer, text, prompt.sampling.constraint)
    sampling = dataclasses.replace(prompt.sampling, constraint=constraint)
    answer = plan_answer(request, forms, tokenizer, text)
    prompt = dataclasses.replace(prompt, sampling=sampling, answer=answer, media=encoded.media, inputs=encoded.inputs)
    return _plan(request, [prompt], common_pb2.WORK_KIND_GENERATE, rules)


def plan_chats(
    requests: Sequence[ChatRequest],
    tokenizer: Tokenizer,
    forms: AnswerForms,
    max_model_len: int,
    rules: LogprobRules = LogprobRules(),
    media: Expansions = NO_ITEMS,
) -> Plan:
    """Return one plan of several chats, whose fields are equal except for `messages`. Errors name `messages[i]`."""
    plans = []
    for index, request in enumerate(requests):
        with _renamed({"messages": f"messages[{index}]"}):
            plans.append(plan_chat(request, tokenizer, forms, max_model_len, rules, media))
    return dataclasses.replace(plans[0], prompts=[prompt for plan in plans for prompt in plan.prompts])


def plan_tokens(
    request: TokensRequest, tokenizer: Tokenizer, max_model_len: int, rules: LogprobRules = LogprobRules()
) -> Plan:
    """Return the plan of POST /inference/v1/generate. Arguments and errors are as for `plan_completion`."""
    params = request.sampling_params
    _check_reserved(request.token_ids, tokenizer, "token_ids")
    with _renamed({name: f"sampling_params.{name}" for name in type(params).model_fields}):
        prompt = _plan_prompt(
            params,
            tokenizer,
            None,
            list(request.token_ids),
            params.max_tokens,
            tokenizer.defaults.max_new_tokens or max_model_len,
            _count(params.logprobs, "logprobs", rules, tokenizer),
            _count(params.prompt_logprobs, "prompt_logprobs", rules, tokenizer),
            max_model_len,
            "token_ids",
        )
        plan = _plan(params, [prompt], common_pb2.WORK_KIND_GENERATE, rules)
    return dataclasses.replace(plan, cache_salt=request.cache_salt or "", priority=request.priority)


def plan_scores(prompts: Mapping[str, str], token_ids: Sequence[int], tokenizer: Tokenizer, max_model_len: int) -> Plan:
    """Return a plan for the logprobs of given tokens after each prompt. One token is generated, which does not matter.

    Args:
        prompts: the rendered text of each prompt, by the field of the request that it comes from.

    Raises the errors of `plan_completion`.
    """
    wanted = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "logprob_token_ids": list(token_ids)}
    params = TokenSampling.model_validate({**wanted, "ignore_eos": True})
    plans = []
    for param, text in prompts.items():
        _check_length(text, params, tokenizer, max_model_len, param)
        ids = tokenizer.encode(text, False, param)
        plans.append(_plan_prompt(params, tokenizer, text, ids, 1, 1, 0, None, max_model_len, param))
    return _plan(params, plans, common_pb2.WORK_KIND_GENERATE, LogprobRules(most=-1))


@contextlib.contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields that errors name, where a request has them in other places."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _count(wanted: int | None, param: str, rules: LogprobRules, tokenizer: Tokenizer) -> int | None:
    """Return the number of most likely tokens to report; None if there is nothing to report."""
    if wanted is None:
        return None
    most = tokenizer.vocab_size if rules.most < 0 else min(rules.most, tokenizer.vocab_size)
    count = tokenizer.vocab_size if wanted < 0 else wanted
    if count > most:
        message = f"{param}: this server returns logprobs of at most {most} tokens at a position (--max-logprobs)"
        raise InvalidRequestError(message, param)
    return count


def _check_length(text: str, request: GenerationRequest, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Raise ContextLengthError if a text is certainly too long, because to tokenize a large text takes seconds."""
    if request.truncate_prompt_tokens is None and len(text) > max_model_len * tokenizer.longest_token > 0:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens; {param} has {len(text)} characters, which "
            f"are more tokens than that: shorten {param}",
            param,
            -(-len(text) // tokenizer.longest_token),
            max_model_len,
        )


def _plan(request: GenerationRequest, prompts: list[PromptPlan], kind: Kind, rules: LogprobRules) -> Plan:
    if 0 <= rules.most < len(request.logprob_token_ids or ()):
        message = f"logprob_token_ids: this server returns logprobs of at most {rules.most} tokens (--max-logprobs)"
        raise InvalidRequestError(message, "logprob_token_ids")
    repetition, as_ids = request.repetition_detection, request.return_tokens_as_token_ids
    return Plan(
        prompts=prompts,
        n=request.n or 1,
        stop=tuple(request.stops),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        kind=kind,
        repetition=repetition if repetition is not None and repetition.max_pattern_size else None,
        logprobs_as_ids=rules.as_ids if as_ids is None else as_ids,
        session_id=request.session_id or "",
    )


def _plan_prompt(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    text: str | None,
    token_ids: list[int],
    max_tokens: int | None,
    default_max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    max_model_len: int,
    param: str,
) -> PromptPlan:
    if max_model_len == 0:
        raise NoWorkerError
    if (kept := request.truncate_prompt_tokens) is not None:
        kept = kept if kept > 0 else max(1, max_model_len - (max_tokens or 1))
        text = text if kept >= len(token_ids) else None
        token_ids = token_ids[-kept:] if request.truncation_side == "left" else token_ids[:kept]
    if not token_ids:
        raise InvalidRequestError(f"{param} must not be empty: it holds no token", param)
    check_ids(token_ids, tokenizer.vocab_size, param)
    left = max_model_len - len(token_ids)
    if left < 1 or (max_tokens or 1) > left:
        limit = "max_tokens" if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"
        # Clients search for the first words of this message, which are OpenAI's.
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens; {param} has {len(token_ids)} and the "
            f"answer may have {max_tokens or 1}: shorten {param} or lower {limit}",
            param if left < 1 else limit,
            len(token_ids),
            max_model_len,
        )
    if max_tokens is None:
        max_tokens = min(default_max_tokens, left)
    return PromptPlan(text, token_ids, _sampling(request, tokenizer, max_tokens, logprobs, prompt_logprobs))


def _sampling(
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
        top_p=_either(request.top_p, defaults.top_p),
        min_p=_either(request.min_p, defaults.min_p),
        # Drawn here, so that a later attempt samples the same tokens. -1 means that the client gave no seed.
        seed=random.getrandbits(64) if request.seed in (None, -1) else request.seed % 2**64,
        repetition_penalty=_either(request.repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_logit_bias(request, tokenizer.vocab_size),
        allowed_token_ids=tuple(request.allowed_token_ids or ()),
        stop_token_ids=stop_token_ids,
        min_tokens=request.min_tokens,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        constraint=constraint_of(request, tokenizer.eos_token_ids, tokenizer.vocabulary.added_tokens),
        bad_words=bad_words,
        logprob_token_ids=tuple(dict.fromkeys(request.logprob_token_ids or ())),
    )


def _either(value: T | None, default: T) -> T:
    return default if value is None else value


def check_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError, naming `param` and the ids, if ids are not in the vocabulary."""
    if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
        raise InvalidRequestError(
            f"{param}: token ids {_some(outside)} are out of vocabulary, which has {vocab_size} tokens", param
        )


def _check_reserved(token_ids: Sequence[int], tokenizer: Tokenizer, param: str) -> None:
    """Raise InvalidRequestError if ids stand for media, which a prompt of ids cannot have."""
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
    """Return the first values as text, for a message of bounded length."""
    shown = ", ".join(repr(value)[:40] for value in values[:5])
    return shown + (f" and {len(values) - 5} more" if len(values) > 5 else "")

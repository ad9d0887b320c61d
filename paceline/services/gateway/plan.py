"""The plan of a request: prompts as token ids, and every sampling parameter resolved. Pure functions."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from paceline.core.errors import InvalidRequestError
from paceline.core.types import SamplingParams
from paceline.proto import common_pb2
from paceline.services.gateway.answer_format import constraint_of
from paceline.services.gateway.answer_plan import AnswerPlan, answer_constraint, plan_answer
from paceline.services.gateway.answers.registry import AnswerForms
from paceline.services.gateway.chat_prompt import render_chat
from paceline.services.gateway.errors import ContextLengthError, NoWorkerError
from paceline.services.gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest
from paceline.services.gateway.tokenizer import Tokenizer

Kind: TypeAlias = common_pb2.WorkKind.ValueType

DEFAULT_COMPLETION_TOKENS = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """One prompt and the parameters of its continuation."""

    text: str | None
    """None if the client sent token ids, or if the prompt was truncated."""
    token_ids: list[int]
    sampling: SamplingParams


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
    answer: AnswerPlan | None = None
    """How answers are read; None if they are nothing but content."""


def kind_of(request: GenerationRequest) -> Kind:
    """Return the kind of work that a request asks for."""
    return common_pb2.WORK_KIND_SCORE if request.max_tokens == 0 else common_pb2.WORK_KIND_GENERATE


def plan_completion(request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int) -> Plan:
    """Return the plan of POST /v1/completions.

    Args:
        max_model_len: longest context of any worker, in tokens; 0 if there is no worker.

    Raises:
        InvalidRequestError: a value is wrong in a way that the schema alone cannot check.
        ContextLengthError: the prompt, or the prompt and the answer together, is too long.
        NoWorkerError: there is no worker.
    """
    kind = kind_of(request)
    scores = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        scores = max(request.logprobs, scores or 0)
    if kind == common_pb2.WORK_KIND_SCORE:
        scores = scores or 0
    prompts = []
    for index, prompt in enumerate(request.prompts):
        param = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            _check_length(prompt, request, tokenizer, max_model_len, param)
            ids = tokenizer.encode(prompt, request.add_special_tokens, param)
        else:
            ids = list(prompt)
        wanted = 1 if kind == common_pb2.WORK_KIND_SCORE else request.max_tokens
        prompts.append(
            _plan_prompt(
                request,
                tokenizer,
                text,
                ids,
                wanted,
                DEFAULT_COMPLETION_TOKENS,
                request.logprobs,
                scores,
                max_model_len,
                param,
            )
        )
    return _plan(request, prompts, kind)


def plan_chat(request: ChatRequest, tokenizer: Tokenizer, forms: AnswerForms, max_model_len: int) -> Plan:
    """Return the plan of POST /v1/chat/completions. Arguments and errors are as for `plan_completion`.

    Args:
        forms: how the model writes reasoning and tool calls.
    """
    text = render_chat(request, tokenizer, forms)
    _check_length(text, request, tokenizer, max_model_len, "messages")
    ids = tokenizer.encode(text, request.add_special_tokens, "messages")
    wanted = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    prompt = _plan_prompt(
        request,
        tokenizer,
        text,
        ids,
        wanted,
        tokenizer.defaults.max_new_tokens or max_model_len,
        logprobs,
        request.prompt_logprobs,
        max_model_len,
        "messages",
    )
    constraint = answer_constraint(request, forms, tokenizer, text, prompt.sampling.constraint)
    prompt = dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, constraint=constraint))
    answer = plan_answer(request, forms, tokenizer, text)
    return dataclasses.replace(_plan(request, [prompt], common_pb2.WORK_KIND_GENERATE), answer=answer)


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


def _plan(request: GenerationRequest, prompts: list[PromptPlan], kind: Kind) -> Plan:
    return Plan(
        prompts=prompts,
        n=request.n or 1,
        stop=tuple(request.stops),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        cache_salt=request.cache_salt or "",
        priority=request.priority,
        kind=kind,
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
    for name in ("stop_token_ids", "allowed_token_ids"):
        check_ids(getattr(request, name) or [], tokenizer.vocab_size, name)
    defaults = tokenizer.defaults
    stop_token_ids = frozenset(request.stop_token_ids or ())
    if not request.ignore_eos:
        stop_token_ids |= tokenizer.eos_token_ids
    _check_choice(request, stop_token_ids, tokenizer.vocab_size)
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
        constraint=constraint_of(request, tokenizer.eos_token_ids),
    )


def _either(value: T | None, default: T) -> T:
    return default if value is None else value


def check_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError, naming `param` and the ids, if ids are not in the vocabulary."""
    if outside := [token_id for token_id in token_ids if token_id >= vocab_size]:
        raise InvalidRequestError(
            f"{param}: token ids {_some(outside)} are out of vocabulary, which has {vocab_size} tokens", param
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

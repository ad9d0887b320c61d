"""Makes plans from the requests of each endpoint. Pure functions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from paceline.core.errors import InvalidRequestError
from paceline.proto import common_pb2
from paceline.services.gateway.http.errors import ContextLengthError, NoWorkerError
from paceline.services.gateway.planning.cache_hints import LATER_TURN, text_marks, token_marks
from paceline.services.gateway.planning.chat_prompt import dropped_tokens, render_chat
from paceline.services.gateway.planning.constraints.fields import chat_fields, completion_fields
from paceline.services.gateway.planning.fill_in_middle import fill_in_middle
from paceline.services.gateway.planning.media.items import NO_ITEMS, Expansions
from paceline.services.gateway.planning.plan import Kind, Plan, PromptPlan, ServedModel, plan_answer
from paceline.services.gateway.planning.sampling import (
    LogprobRules,
    check_ids,
    check_no_media,
    gives_seed,
    logprob_count,
    resolve_sampling,
)
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest, GenerationRequest
from paceline.services.gateway.planning.token_schemas import TokenSampling, TokensRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


def kind_of(request: GenerationRequest) -> Kind:
    """Return the kind of work that a request asks for: SCORE if `max_tokens` is 0, else GENERATE."""
    return common_pb2.WORK_KIND_SCORE if request.max_tokens == 0 else common_pb2.WORK_KIND_GENERATE


def plan_completion(request: CompletionRequest, model: ServedModel) -> Plan:
    """Return the plan of POST /v1/completions.

    Raises:
        InvalidRequestError: a value is wrong in a way that the schema alone cannot check.
        ContextLengthError: the prompt, or the prompt and the answer together, is too long.
        NoWorkerError: there is no worker.
    """
    tokenizer, rules = model.tokenizer, model.rules
    kind = kind_of(request)
    logprobs = logprob_count(request.logprobs, "logprobs", rules, tokenizer)
    scores = logprob_count(request.prompt_logprobs, "prompt_logprobs", rules, tokenizer)
    if request.echo and logprobs is not None:
        scores = max(logprobs, scores or 0)
    if kind == common_pb2.WORK_KIND_SCORE:
        scores = scores or 0
    wanted = 1 if kind == common_pb2.WORK_KIND_SCORE else request.max_tokens
    answer = _Wanted(wanted, DEFAULT_COMPLETION_TOKENS, logprobs, scores)
    prompts = []
    for index, prompt in enumerate(request.prompts):
        param = "prompt" if len(request.prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str) and request.suffix:
            prompt = fill_in_middle(prompt, request.suffix, tokenizer.vocabulary.added_tokens)
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            _check_length(prompt, request, model, param)
            ids = tokenizer.encode(prompt, request.add_special_tokens, param)
        else:
            ids = list(prompt)
            check_no_media(ids, tokenizer, param)
        prompts.append(_plan_text(request, model, param, text, ids, answer))
    return _plan(request, prompts, kind, rules)


def plan_chat(request: ChatRequest, model: ServedModel, media: Expansions = NO_ITEMS) -> Plan:
    """Return the plan of POST /v1/chat/completions. Raises the errors of `plan_completion`.

    Args:
        media: the tokens that stand in the prompt for each image, video or audio clip.
    """
    tokenizer, forms, rules = model.tokenizer, model.forms, model.rules
    rendered = render_chat(request, tokenizer, forms, model.now)
    text = rendered.text
    _check_length(text, request, model, "messages")
    encoded = rendered.encode(media, tokenizer, request.add_special_tokens)
    if rendered.items and request.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise InvalidRequestError(f"{name}: a prompt with images, videos or audio cannot be truncated", name)
    limits = _Wanted(
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens,
        tokenizer.defaults.max_new_tokens or model.max_model_len,
        logprob_count(request.top_logprobs or 0, "top_logprobs", rules, tokenizer) if request.logprobs else None,
        logprob_count(request.prompt_logprobs, "prompt_logprobs", rules, tokenizer),
    )
    prompt = _plan_prompt(request, model, "messages", text, encoded.token_ids, limits)
    fields = chat_fields(request, forms, tokenizer, text)
    wanted = None if fields is None else fields.wanted()
    answer = plan_answer(request, forms, tokenizer, text)
    dropped = dropped_tokens(request, prompt.token_ids, tokenizer)
    prompt = dataclasses.replace(prompt, answer=answer, media=encoded.media, inputs=encoded.inputs)
    prompt = dataclasses.replace(prompt, wanted=wanted, dropped_tokens=dropped)
    found = text_marks(text, request.messages, request.tools or (), request.cache_control)
    if found and request.truncate_prompt_tokens is None:
        prompt = dataclasses.replace(
            prompt, marks=token_marks(found, rendered, media, len(prompt.token_ids), tokenizer)
        )
    plan = _plan(request, [prompt], common_pb2.WORK_KIND_GENERATE, rules)
    is_later = any(message.role == "assistant" for message in request.messages)
    return dataclasses.replace(plan, rendered_at=model.now, learnt=LATER_TURN if is_later else None)


def plan_chats(requests: Sequence[ChatRequest], model: ServedModel, media: Expansions = NO_ITEMS) -> Plan:
    """Return one plan for several chats, whose fields are equal except for `messages`. Errors name `messages[i]`."""
    plans = []
    for index, request in enumerate(requests):
        with _renamed({"messages": f"messages[{index}]"}):
            plans.append(plan_chat(request, model, media))
    return dataclasses.replace(plans[0], prompts=[prompt for plan in plans for prompt in plan.prompts])


def plan_tokens(request: TokensRequest, model: ServedModel) -> Plan:
    """Return the plan of POST /inference/v1/generate. Raises the errors of `plan_completion`."""
    params, tokenizer, rules = request.sampling_params, model.tokenizer, model.rules
    check_no_media(request.token_ids, tokenizer, "token_ids")
    with in_sampling_params():
        wanted = _Wanted(
            params.max_tokens,
            tokenizer.defaults.max_new_tokens or model.max_model_len,
            logprob_count(params.logprobs, "logprobs", rules, tokenizer),
            logprob_count(params.prompt_logprobs, "prompt_logprobs", rules, tokenizer),
        )
        prompt = _plan_text(params, model, "token_ids", None, list(request.token_ids), wanted)
        plan = _plan(params, [prompt], common_pb2.WORK_KIND_GENERATE, rules)
    return dataclasses.replace(plan, cache_salt=request.cache_salt or "", wanted_priority=request.priority)


_MOST_SCORED_TOKENS = 4 << 20
"""Largest number of tokens of all pairs of a request together. Each pair repeats the query."""


def plan_scores(prompts: Iterable[tuple[str, str | list[int]]], token_ids: Sequence[int], model: ServedModel) -> Plan:
    """Return a plan that reports the logprobs of given tokens after each prompt. One token is generated and not used.

    Args:
        prompts: for each prompt, the field of the request that it comes from, and its rendered text or token ids.
        token_ids: ids of the tokens whose logprobs are wanted.

    Raises the errors of `plan_completion`, and InvalidRequestError if all prompts together are too long.
    """
    fields = {"max_tokens": 1, "temperature": 0.0, "logprobs": 0, "logprob_token_ids": list(token_ids)}
    params = TokenSampling.model_validate({**fields, "ignore_eos": True})
    plans = []
    left = _MOST_SCORED_TOKENS
    for param, prompt in prompts:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            _check_length(prompt, params, model, param)
            ids = model.tokenizer.encode(prompt, False, param)
        else:
            ids = prompt
        left -= len(ids)
        if left < 0:
            told = f"{param}: the pairs up to this one have more than {_MOST_SCORED_TOKENS} tokens; send fewer at once"
            raise InvalidRequestError(told, param)
        plans.append(_plan_prompt(params, model, param, text, ids, _Wanted(1, 1, 0, None)))
    return _plan(params, plans, common_pb2.WORK_KIND_GENERATE, LogprobRules(most=-1))


def in_sampling_params() -> contextlib.AbstractContextManager[None]:
    """Return a context in which errors name sampling parameters by their paths in POST /inference/v1/generate."""
    return _renamed({name: f"sampling_params.{name}" for name in TokenSampling.model_fields})


@contextlib.contextmanager
def _renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that are raised while the block runs.

    Args:
        names: for each field its path in the client's request.
    """
    try:
        yield
    except InvalidRequestError as error:
        error.param = names.get(error.param or "", error.param)
        raise


def _check_length(text: str, request: GenerationRequest, model: ServedModel, param: str) -> None:
    """Raise ContextLengthError if a text is certainly too long. This saves tokenizing it, which may take seconds."""
    longest_token = model.tokenizer.longest_token
    if request.truncate_prompt_tokens is None and len(text) > model.max_model_len * longest_token > 0:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens; the prompt is too long: {param} has "
            f"{len(text)} characters, which are more tokens than that; shorten it",
            param,
            -(-len(text) // longest_token),
            model.max_model_len,
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
        wanted_priority=request.priority,
        kind=kind,
        repetition=repetition if repetition is not None and repetition.max_pattern_size else None,
        logprobs_as_ids=rules.as_ids if as_ids is None else as_ids,
        session_id=request.session_id or "",
        retention=request.retention,
        cache_key=request.prompt_cache_key or "",
        has_seed=gives_seed(request),
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A request's wishes for the answers to its prompts, before the context's length limits them."""

    max_tokens: int | None
    default_max_tokens: int
    """Largest number of tokens of an answer if `max_tokens` is None, unless the context has room for fewer."""
    logprobs: int | None
    """Number of most likely tokens to report for each token of the answer; None if no logprobs are wanted."""
    prompt_logprobs: int | None
    """Number of most likely tokens to report for each token of the prompt; None if no logprobs are wanted."""


def _plan_text(
    request: GenerationRequest,
    model: ServedModel,
    param: str,
    text: str | None,
    token_ids: list[int],
    wanted: _Wanted,
) -> PromptPlan:
    """Return the plan of a prompt that is no conversation. Arguments are those of `_plan_prompt`."""
    prompt = _plan_prompt(request, model, param, text, token_ids, wanted)
    fields = completion_fields(request, model.forms, model.tokenizer, prompt.token_ids)
    return prompt if fields is None else dataclasses.replace(prompt, wanted=fields.wanted())


def _plan_prompt(
    request: GenerationRequest,
    model: ServedModel,
    param: str,
    text: str | None,
    token_ids: list[int],
    wanted: _Wanted,
) -> PromptPlan:
    """Return the plan of one prompt.

    Args:
        param: the field that holds the prompt.
        text: the text of the prompt; None if the client sent token ids.
    """
    longest, max_tokens = model.max_model_len, wanted.max_tokens
    if longest == 0:
        raise NoWorkerError
    offsets = _offsets(request, text, len(token_ids), model.tokenizer)
    if (kept := request.truncate_prompt_tokens) is not None:
        kept = kept if kept > 0 else max(1, longest - (max_tokens or 1))
        text = text if kept >= len(token_ids) else None
        part = slice(-kept, None) if request.truncation_side == "left" else slice(kept)
        token_ids, offsets = token_ids[part], offsets and offsets[part]
    if not token_ids:
        raise InvalidRequestError(f"{param} must not be empty: it holds no token", param)
    check_ids(token_ids, model.tokenizer.vocab_size, param)
    _check_room(request, param, len(token_ids), max_tokens or 1, longest)
    if max_tokens is None:
        max_tokens = min(wanted.default_max_tokens, longest - len(token_ids))
    sampling = resolve_sampling(request, model.tokenizer, max_tokens, wanted.logprobs, wanted.prompt_logprobs)
    shared = 0 if model.shared_prompts is None else model.shared_prompts.shared_tokens(token_ids, model.now)
    return PromptPlan(text, token_ids, sampling, offsets=offsets, shared_tokens=shared)


def _offsets(
    request: GenerationRequest, text: str | None, tokens: int, tokenizer: Tokenizer
) -> list[tuple[int, int]] | None:
    """Return the characters (begin, end) of each token; None if they are not wanted, or the tokens have no text."""
    if text is None or not isinstance(request, CompletionRequest | ChatRequest) or not request.return_token_offsets:
        return None
    offsets = tokenizer.offsets(text, request.add_special_tokens)
    return offsets if len(offsets) == tokens else None  # media have other tokens than the template's markers


def _check_room(request: GenerationRequest, param: str, prompt_tokens: int, max_tokens: int, longest: int) -> None:
    """Raise ContextLengthError if a prompt and its answer together are longer than the context."""
    left = longest - prompt_tokens
    if max_tokens <= left:
        return
    # Clients search for the first words, which are OpenAI's, and LangChain for "prompt is too long".
    limits = f"This model's maximum context length is {longest} tokens;"
    if left < 1:
        message = f"{limits} the prompt is too long: {param} has {prompt_tokens}, and an answer needs 1; shorten it"
        raise ContextLengthError(message, param, prompt_tokens, longest)
    limit = "max_tokens" if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"
    message = (
        f"{limits} {param} has {prompt_tokens} and the answer may have {max_tokens}: shorten {param} or lower {limit}"
    )
    raise ContextLengthError(message, limit, prompt_tokens, longest)

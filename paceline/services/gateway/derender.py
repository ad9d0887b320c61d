"""Token ids that POST /inference/v1/generate has returned, as an answer to a chat or a completion. Pure functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.types import Logprob, SamplingParams, Token
from paceline.services.gateway.attempt import Generated
from paceline.services.gateway.chat_format import ChatFormat
from paceline.services.gateway.choice import Choice, Delta
from paceline.services.gateway.completion_format import CompletionFormat
from paceline.services.gateway.plan import Plan, PromptPlan
from paceline.services.gateway.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.token_schemas import (
    ChosenLogprob,
    DerenderChatRequest,
    DerenderCompletionRequest,
    TokenLogprob,
    TokensAnswer,
    TokensChoice,
)
from paceline.services.gateway.tokenizer import Tokenizer

Json = dict[str, Any]


def derender_chat(
    body: DerenderChatRequest, plan: Plan | None, response_id: str, model: str, tokenizer: Tokenizer
) -> Json:
    """Return a chat completion.

    Args:
        plan: the plan of the chat that was rendered; None if it is unknown.
    """
    answer = body.generate_response
    prompt_ids = body.prompt_token_ids or answer.prompt_token_ids or []
    request = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user"}]})
    plan = _plan(plan or _bare_plan([prompt_ids], [answer], tokenizer), [answer])
    choices = _read([answer], plan, tokenizer)
    prompt_tokens = body.prompt_tokens if body.prompt_tokens is not None else len(prompt_ids)
    whole = ChatFormat(request, plan, response_id, model, tokenizer).whole(choices, _usage(prompt_tokens, [answer]))
    return {**whole, "prompt_logprobs": answer.prompt_logprobs}


def derender_completion(
    body: DerenderCompletionRequest, plan: Plan | None, response_id: str, model: str, tokenizer: Tokenizer
) -> Json:
    """Return a completion, whose choices are numbered over all prompts. Arguments are as for `derender_chat`.

    Raises InvalidRequestError if the rendered request has another number of prompts.
    """
    answers = body.generate_responses
    given = body.prompt_token_ids or [None] * len(answers)
    prompts = [ids or answer.prompt_token_ids or [] for ids, answer in zip(given, answers)]
    request = body.completion_request or CompletionRequest.model_validate({"prompt": ""})
    plan = plan or _bare_plan(prompts, answers, tokenizer)
    if len(plan.prompts) != len(answers):
        message = f"completion_request has {len(plan.prompts)} prompts, generate_responses has {len(answers)} answers"
        raise InvalidRequestError(message, "generate_responses")
    plan = _plan(plan, answers)
    prompt_tokens = sum(body.prompt_tokens if body.prompt_tokens is not None else map(len, prompts))
    choices = _read(answers, plan, tokenizer)
    whole = CompletionFormat(request, plan, response_id, model, tokenizer).whole(
        choices, _usage(prompt_tokens, answers)
    )
    scores = [answer.prompt_logprobs for answer in answers for _ in answer.choices]
    for choice, own in zip(whole["choices"], scores, strict=True):
        choice["prompt_logprobs"] = own
    return whole


def _bare_plan(prompts: Sequence[list[int]], answers: Iterable[TokensAnswer], tokenizer: Tokenizer) -> Plan:
    """Return a plan for answers to unknown requests: they are text up to a token that ends an answer."""
    sampling = SamplingParams(stop_token_ids=tokenizer.eos_token_ids, logprobs=_shown_logprobs(answers))
    plans = [PromptPlan(None, ids, sampling) for ids in prompts]
    return Plan(prompts=plans, n=1, stop=(), include_stop=False, skip_special_tokens=True, cache_salt="")


def _plan(plan: Plan, answers: Sequence[TokensAnswer]) -> Plan:
    """Return a plan with a prompt for each choice of the answers. Logprobs of prompts are not in answers."""
    prompts = [
        dataclasses.replace(prompt, sampling=dataclasses.replace(prompt.sampling, prompt_logprobs=None))
        for prompt, answer in zip(plan.prompts, answers, strict=True)
        for _ in answer.choices
    ]
    return dataclasses.replace(plan, prompts=prompts, n=1)


def _read(answers: Iterable[TokensAnswer], plan: Plan, tokenizer: Tokenizer) -> list[Delta]:
    """Return each choice with its text and its parts."""
    choices = [choice for answer in answers for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    return [_read_choice(choice, Choice(index, plan, tokenizer)) for index, choice in enumerate(choices)]


def _read_choice(choice: TokensChoice, reader: Choice) -> Delta:
    scores: Sequence[ChosenLogprob | None] = (choice.logprobs and choice.logprobs.content) or ()
    scores = scores if len(scores) == len(choice.token_ids) else [None] * len(choice.token_ids)
    tokens = [Token(token_id, _logprobs(score)) for token_id, score in zip(choice.token_ids, scores)]
    delta = reader.take(Generated(tokens))
    assert delta is not None
    if not reader.has_ended:
        delta.add(reader.end(choice.finish_reason or "stop"))
    delta.finish_reason = choice.finish_reason
    if choice.stop_reason is not None:
        delta.stop_reason = choice.stop_reason
    return delta


def _logprobs(score: ChosenLogprob | None) -> tuple[Logprob, ...]:
    if score is None:
        return ()
    entries: list[TokenLogprob] = [score, *score.top_logprobs]
    return tuple(Logprob(entry.token_id, entry.logprob, entry.rank or 1) for entry in entries)


def _shown_logprobs(answers: Iterable[TokensAnswer]) -> int | None:
    """Return the number of likely tokens that answers show for each token; None if they have no logprobs."""
    shown = [choice.logprobs.content for answer in answers for choice in answer.choices if choice.logprobs]
    counts = [_shown(entry) for content in shown for entry in content or ()]
    return max(counts, default=None)


def _shown(entry: ChosenLogprob) -> int:
    """Return the number of likely tokens of an entry, without the chosen token if it is none of them."""
    count = len(entry.top_logprobs)
    return max(0, count - ((entry.rank or 1) > count))


def _usage(prompt_tokens: int, answers: Iterable[TokensAnswer]) -> Json:
    generated = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
    }

"""Turns token ids from POST /inference/v1/generate into an answer to a chat or a completion. Pure functions.

A streamed answer comes one event per call. The client sends the tokens of all earlier events with each call, and they
are read again, so any gateway can take the next event.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.core.types import Logprob, SamplingParams, Token
from paceline.services.gateway.api.choice import Choice, Delta, join_deltas
from paceline.services.gateway.api.openai.formats import ChatFormat, CompletionFormat
from paceline.services.gateway.api.response_format import ResponseFormat, TextChunk
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.token_schemas import (
    ChosenLogprob,
    DerenderChatRequest,
    DerenderChatStream,
    DerenderCompletionRequest,
    DerenderCompletionStream,
    DerenderStream,
    GivenTokenLogprob,
    GivenTokensChoice,
    StreamState,
    TokensAnswer,
    TokensEvent,
    TokensUsage,
)
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.sequences.progress import Generated

Json = dict[str, Any]


def derender_chat(
    body: DerenderChatRequest, plan: Plan | None, response_id: str, model: str, tokenizer: Tokenizer
) -> Json:
    """Return the chat completion for generated token ids.

    Args:
        plan: the plan of the chat that was rendered; None if it is unknown.
    """
    answer = body.generate_response
    prompt_ids = body.prompt_token_ids or answer.prompt_token_ids or []
    request = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user"}]})
    plan = _plan(plan or _bare_plan([prompt_ids], _shown_logprobs(_scores_of([answer])), tokenizer), [answer])
    choices = _read([answer], plan, tokenizer)
    prompt_tokens = body.prompt_tokens if body.prompt_tokens is not None else len(prompt_ids)
    whole = ChatFormat(request, plan, response_id, model, tokenizer).whole(
        choices, _usage(prompt_tokens, [answer], choices)
    )
    return {**whole, "prompt_logprobs": answer.prompt_logprobs}


def derender_completion(
    body: DerenderCompletionRequest, plan: Plan | None, response_id: str, model: str, tokenizer: Tokenizer
) -> Json:
    """Return a completion, whose choices are numbered over all prompts. Arguments are those of `derender_chat`.

    Raises InvalidRequestError if the rendered request has another number of prompts.
    """
    answers = body.generate_responses
    given = body.prompt_token_ids or [None] * len(answers)
    prompts = [ids or answer.prompt_token_ids or [] for ids, answer in zip(given, answers)]
    request = body.completion_request or CompletionRequest.model_validate({"prompt": ""})
    plan = plan or _bare_plan(prompts, _shown_logprobs(_scores_of(answers)), tokenizer)
    if len(plan.prompts) != len(answers):
        message = f"completion_request has {len(plan.prompts)} prompts, generate_responses has {len(answers)} answers"
        raise InvalidRequestError(message, "generate_responses")
    plan = _plan(plan, answers)
    prompt_tokens = sum(body.prompt_tokens if body.prompt_tokens is not None else map(len, prompts))
    choices = _read(answers, plan, tokenizer)
    whole = CompletionFormat(request, plan, response_id, model, tokenizer).whole(
        choices, _usage(prompt_tokens, answers, choices)
    )
    scores = [answer.prompt_logprobs for answer in answers for _ in answer.choices]
    for choice, own in zip(whole["choices"], scores, strict=True):
        choice["prompt_logprobs"] = own
    return whole


def derender_chat_event(
    body: DerenderChatStream, plan: Plan | None, response_id: str, model: str, tokenizer: Tokenizer
) -> Json:
    """Return the chunk of a chat completion for one event, and the state for the next call; see `derender_chat`."""
    request = body.chat_request or ChatRequest.model_validate({"messages": [{"role": "user"}]})
    stream = _Stream(body, plan, tokenizer)
    return stream.read(ChatFormat(request, stream.plan, response_id, model, tokenizer))


def derender_completion_event(
    body: DerenderCompletionStream, plan: Plan | None, response_id: str, model: str, tokenizer: Tokenizer
) -> Json:
    """Return the chunk of a completion for one event, and the state for the next call; see `derender_completion`."""
    request = body.completion_request or CompletionRequest.model_validate({"prompt": ""})
    stream = _Stream(body, plan, tokenizer)
    return stream.read(CompletionFormat(request, stream.plan, response_id, model, tokenizer))


class _Stream:
    """One streamed event of a choice, read after the choice's earlier events."""

    def __init__(self, body: DerenderStream, plan: Plan | None, tokenizer: Tokenizer) -> None:
        self._body = body
        self._state = body.stream_state or StreamState()
        self._tokenizer = tokenizer
        self._call_ids: list[str] = []
        event = body.generate_chunk
        prompt_ids = body.prompt_token_ids or event.prompt_token_ids or []
        tokens, scores = _of_event(event)
        self._scores = [*self._state.pending_logprobs, *scores] if len(scores) == len(tokens) else []
        """Logprobs of the last tokens, those of this event included; [] if the event lacks them."""
        shown = _shown_logprobs(self._scores)
        plan = plan or _bare_plan([prompt_ids], shown, tokenizer)
        prompt = _without_missing_logprobs(plan.prompts[0], shown)
        if prompt.answer is not None:
            answer = prompt.answer
            self._new_call_id = answer.new_call_id
            answer = dataclasses.replace(answer, new_call_id=self._call_id)
            prompt = dataclasses.replace(prompt, answer=answer)
        # The event itself says whether it is the last one, so no token waits for its end because of a limit.
        sampling = dataclasses.replace(prompt.sampling, max_tokens=sys.maxsize)
        self.plan = dataclasses.replace(plan, prompts=[dataclasses.replace(prompt, sampling=sampling)], n=1)

    def read(self, format_: ResponseFormat) -> Json:
        """Return the chunk for the event, and the state for the next call."""
        event, state = self._body.generate_chunk, self._state
        if not event.choices:
            chunk = format_.usage_chunk(self._usage(event.usage or TokensUsage()))
            return {"chunk": chunk, "stream_state": state.model_dump()}
        reader, at = Choice(0, self.plan, self._tokenizer), 0
        if state.role_sent:
            list(format_.chunks(Delta(0)))
        before = self._before()
        for count in state.output_chunk_lens:
            tokens, at = before[at : at + count], at + count
            if not reader.has_ended and (delta := reader.take(Generated(tokens))):
                list(format_.chunks(delta))
        (choice,) = event.choices
        tokens = _tokens_of(choice)
        chunks = list(format_.chunks(_read_choice(choice, tokens, reader, is_last=choice.finish_reason is not None)))
        bodies = [format_.text_chunk(*each) if isinstance(each, TextChunk) else each for each in chunks]
        chunk = _joined(bodies) or format_.empty_chunk()
        for own in chunk["choices"]:
            own["index"] = choice.index
        if event.usage is not None:
            chunk["usage"] = self._usage(event.usage)
        after = StreamState(
            output_token_ids=[*state.output_token_ids, *choice.token_ids],
            output_chunk_lens=[*state.output_chunk_lens, *filter(None, [len(choice.token_ids)])],
            pending_logprobs=self._pending([*before, *tokens], [*reader.undecided, *format_.held_tokens(0)]),
            last_tool_call_ids=self._call_ids,
            role_sent=state.role_sent or bool(bodies),
        )
        return {"chunk": chunk, "stream_state": after.model_dump()}

    def _before(self) -> list[Token]:
        """Return the tokens of the earlier events. Those that a chunk may still show have their logprobs."""
        ids, pending = self._state.output_token_ids, self._state.pending_logprobs
        shown = len(ids) - len(pending)
        scored = (Token(token_id, _logprobs(score)) for token_id, score in zip(ids[shown:], pending, strict=True))
        return [*(Token(token_id) for token_id in ids[:shown]), *scored]

    def _pending(self, tokens: Sequence[Token], later: Iterable[Token]) -> list[ChosenLogprob]:
        """Return the logprobs of all tokens from the first one that a later chunk may show."""
        identities = set(map(id, later))
        first = next((place for place, token in enumerate(tokens) if id(token) in identities), len(tokens))
        unscored = len(tokens) - len(self._scores)
        return self._scores[max(0, first - unscored) :]

    def _call_id(self) -> str:
        """Return the id of the next tool call. Reading an event again gives a call the same id."""
        known, number = self._state.last_tool_call_ids, len(self._call_ids)
        self._call_ids.append(known[number] if number < len(known) else self._new_call_id())
        return self._call_ids[-1]

    def _usage(self, usage: TokensUsage) -> Json:
        """Return the usage of an event, with the number of the prompt's tokens that the body says, if it says one."""
        told, prompt_tokens = usage.model_dump(), self._body.prompt_tokens
        if prompt_tokens is not None:
            told["prompt_tokens"] = prompt_tokens
        if prompt_tokens is not None or "total_tokens" not in usage.model_fields_set:
            told["total_tokens"] = told["prompt_tokens"] + usage.completion_tokens
        return told


def _of_event(event: TokensEvent) -> tuple[list[int], list[ChosenLogprob]]:
    """Return the tokens of an event, and their logprobs if it has them."""
    if not event.choices:
        return [], []
    (choice,) = event.choices
    return choice.token_ids, choice.scores or []


def _joined(chunks: Sequence[Json]) -> Json | None:
    """Return several chunks of a choice as one chunk; None for no chunks."""
    if not chunks:
        return None
    (first,) = chunks[0]["choices"]
    for (later,) in (chunk["choices"] for chunk in chunks[1:]):
        delta = later.pop("delta", {})
        for name, value in delta.items():
            own = first["delta"]
            own[name] = own[name] + value if own.get(name) and name != "role" else value
        if "text" in first:
            later["text"] = first["text"] + later["text"]
        first |= later
    return chunks[0]


def _bare_plan(prompts: Sequence[list[int]], shown: int | None, tokenizer: Tokenizer) -> Plan:
    """Return a plan for answers to unknown requests, which are read as text up to a token that ends an answer.

    Args:
        shown: number of likely tokens to show for each token; None if answers have no logprobs.
    """
    sampling = SamplingParams(stop_token_ids=tokenizer.eos_token_ids, logprobs=shown)
    plans = [PromptPlan(None, ids, sampling) for ids in prompts]
    return Plan(prompts=plans, n=1, stop=(), include_stop=False, skip_special_tokens=True, cache_salt="")


def _plan(plan: Plan, answers: Sequence[TokensAnswer]) -> Plan:
    """Return a plan with a prompt for each choice of the answers, without logprobs that are not in the answers."""
    known = _shown_logprobs(_scores_of(answers))
    prompts = [
        _without_missing_logprobs(prompt, known)
        for prompt, answer in zip(plan.prompts, answers, strict=True)
        for _ in answer.choices
    ]
    return dataclasses.replace(plan, prompts=prompts, n=1)


def _without_missing_logprobs(prompt: PromptPlan, known: int | None) -> PromptPlan:
    """Return a prompt's plan without logprobs of the prompt, and without those of the answer if `known` is None."""
    shown = prompt.sampling.logprobs if known is not None else None
    return dataclasses.replace(
        prompt, sampling=dataclasses.replace(prompt.sampling, prompt_logprobs=None, logprobs=shown)
    )


def _read(answers: Iterable[TokensAnswer], plan: Plan, tokenizer: Tokenizer) -> list[Delta]:
    """Return one delta for each whole choice, with its text and its parts."""
    choices = [choice for answer in answers for choice in sorted(answer.choices, key=lambda choice: choice.index)]
    return [
        _read_choice(choice, _tokens_of(choice), Choice(index, plan, tokenizer)) for index, choice in enumerate(choices)
    ]


def _tokens_of(choice: GivenTokensChoice) -> list[Token]:
    scores: Sequence[ChosenLogprob | None] = choice.scores or [None] * len(choice.token_ids)
    return [Token(token_id, _logprobs(score)) for token_id, score in zip(choice.token_ids, scores, strict=True)]


def _read_choice(choice: GivenTokensChoice, tokens: list[Token], reader: Choice, *, is_last: bool = True) -> Delta:
    delta = Delta(0) if reader.has_ended else reader.take(Generated(tokens))
    assert delta is not None
    if is_last and not reader.has_ended:
        delta = join_deltas([delta, reader.end(choice.finish_reason or "stop")])
    delta.finish_reason = choice.finish_reason
    if choice.stop_reason is not None:
        delta.stop_reason = choice.stop_reason
    return delta


def _logprobs(score: ChosenLogprob | None) -> tuple[Logprob, ...]:
    if score is None:
        return ()
    entries: list[GivenTokenLogprob] = [score, *score.top_logprobs]
    return tuple(Logprob(entry.token_id, entry.logprob, entry.rank or 1) for entry in entries)


def _scores_of(answers: Iterable[TokensAnswer]) -> Iterator[ChosenLogprob]:
    """Yield the logprobs of all tokens of all answers."""
    for answer in answers:
        for choice in answer.choices:
            yield from choice.scores or ()


def _shown_logprobs(scores: Iterable[ChosenLogprob]) -> int | None:
    """Return the number of likely tokens that answers show for each token; None if they have no logprobs."""
    return max(map(_shown, scores), default=None)


def _shown(entry: ChosenLogprob) -> int:
    """Return the number of likely tokens of an entry. The chosen token counts only if it is among the likely ones."""
    count = len(entry.top_logprobs)
    return max(0, count - ((entry.rank or 1) > count))


def _usage(prompt_tokens: int, answers: Iterable[TokensAnswer], choices: Iterable[Delta]) -> Json:
    generated = sum(len(choice.token_ids) for answer in answers for choice in answer.choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens_details": {"reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)},
    }

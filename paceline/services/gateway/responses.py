"""Bodies of responses and stream chunks in the format of the OpenAI API."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.core.types import Token
from paceline.services.gateway.answers.parts import CallArguments, CallBegin, Content, Reasoning, calls_of
from paceline.services.gateway.chat_schemas import NamedTool
from paceline.services.gateway.choice import Delta
from paceline.services.gateway.logprobs import LogprobFormat
from paceline.services.gateway.plan import Plan, PromptPlan
from paceline.services.gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest
from paceline.services.gateway.tokenizer import Tokenizer

Json = dict[str, Any]


class TextChunk(NamedTuple):
    """A stream chunk with nothing but text. `ResponseFormat.text_chunk` makes its body."""

    choice: int
    text: str
    place: str | int = "content"
    """The text is "content", "reasoning", or arguments of the call with this index."""


class ResponseFormat(ABC):
    """The format of one kind of response: turns deltas into its body or its stream chunks."""

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        request: GenerationRequest,
        plan: Plan,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        sampling, vocabulary, as_ids = plan.prompts[0].sampling, tokenizer.vocabulary, plan.logprobs_as_ids
        names_tokens = bool(sampling.logprob_token_ids)
        own = None if sampling.logprobs is None else LogprobFormat(vocabulary, sampling.logprobs, as_ids, names_tokens)
        self._format = own
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._prompt_format = LogprobFormat(vocabulary, sampling.prompt_logprobs or 0, as_ids)
        self._returns_ids = bool(request.return_token_ids)
        self._head = {
            "id": response_id,
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._begun: set[int] = set()
        self._sent_tokens = 0
        self._counts = Counter[int]()
        self._held: dict[int, Delta] = {}

    @abstractmethod
    def whole(self, choices: list[Delta], usage: Json) -> Json:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    def text_chunk(self, index: int, text: str, place: str | int) -> Json:
        """Return the body of a `TextChunk`."""

    def chunks(self, delta: Delta) -> Iterator[Json | TextChunk]:
        """Return the stream chunks of a delta; none if the delta changes nothing for the client yet."""
        if (complete := self._with_end(delta)) is not None:
            yield from self._chunks(complete)

    @abstractmethod
    def _chunks(self, delta: Delta) -> Iterator[Json | TextChunk]: ...

    def _with_end(self, delta: Delta) -> Delta | None:
        """Keep a choice's last tokens until its end comes, which is soon, because clients expect both in one chunk.

        Returns the delta to send, joined with the kept one if there is one; None if the delta is kept.
        """
        self._counts[delta.index] += len(delta.tokens)
        if (held := self._held.pop(delta.index, None)) is not None:
            held.add(delta)
            delta = held
        sampling = self._prompt(delta).sampling
        count = self._counts[delta.index]
        ends = bool(delta.tokens) and sampling.ends(delta.tokens[-1].id, count)
        if delta.finish_reason is None and (ends or count >= sampling.max_tokens):
            self._held[delta.index] = delta
            return None
        return delta

    def usage_so_far(self, usage: Json) -> Json:
        """Return the `usage` of the latest chunk, from that of all generated tokens; some may not be sent yet."""
        sent = self._sent_tokens
        return usage | {"completion_tokens": sent, "total_tokens": usage["prompt_tokens"] + sent}

    def usage_chunk(self, usage: Json) -> Json:
        """Return the last chunk of a stream with `include_usage`."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _prompt(self, delta: Delta) -> PromptPlan:
        return self._plan.prompts[delta.index // self._plan.n]

    def _begins(self, delta: Delta) -> bool:
        """Return whether this is the choice's first delta."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        return first

    def _about_prompt(self, delta: Delta) -> Json:
        """Return vLLM's fields about the prompt in a whole response. Fields that were not requested are null."""
        scores = delta.prompt_scores if self._wants_prompt_logprobs else None
        return {
            "prompt_logprobs": self._prompt_format.prompt(scores) if scores is not None else None,
            "prompt_token_ids": self._prompt(delta).token_ids if self._returns_ids else None,
        }

    def _token_ids(self, delta: Delta) -> list[int] | None:
        return [token.id for token in self._shown_tokens(delta)] if self._returns_ids else None

    def _shown_tokens(self, delta: Delta) -> list[Token]:
        """Return the tokens that a response may list."""
        return delta.tokens

    def _says_only_text(self, delta: Delta) -> bool:
        return self._format is None and delta.finish_reason is None and not self._returns_ids

    def _says_something(self, delta: Delta) -> bool:
        # A token may have no text yet: half a character, or the possible start of a stop string. As in vLLM, it gets a
        # chunk, so that the client sees progress.
        return bool(delta.text or delta.tokens or delta.finish_reason)


class ChatFormat(ResponseFormat):
    """Responses of POST /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(request, plan, response_id, model, tokenizer)
        last = request.messages[-1]
        self._echo = last.text or "" if request.echo and last.role == "assistant" else ""
        self._shows_reasoning = request.include_reasoning
        self._is_parsed = any(prompt.answer is not None for prompt in plan.prompts)
        self._stop_for_calls = "stop" if isinstance(request.tool_choice, NamedTool) else "tool_calls"
        self._has_calls: set[int] = set()
        """Choices with tool calls."""

    def whole(self, choices: list[Delta], usage: Json) -> Json:
        formatted = [self._choice(choice) for choice in choices]
        head = {**self._head, "object": self.whole_object}
        return {**head, "choices": formatted, "usage": usage, **self._about_prompt(choices[0])}

    def text_chunk(self, index: int, text: str, place: str | int) -> Json:
        return self._chunk([self._delta_choice(index, _text_fields(text, place))])

    def _chunks(self, delta: Delta) -> Iterator[Json | TextChunk]:
        index = delta.index
        if self._begins(delta):
            first = self._chunk([self._delta_choice(index, {"role": "assistant", "content": self._echo})])
            yield first | ({"prompt_token_ids": self._prompt(delta).token_ids} if self._returns_ids else {})
        self._sent_tokens += len(delta.tokens)
        if not self._says_something(delta):
            return
        pieces = self._pieces(delta)
        # A delta with more than text has a last chunk, for the fields that are not text.
        last = None if self._says_only_text(delta) else pieces.pop() if pieces else {}
        for piece in pieces:
            yield piece if isinstance(piece, TextChunk) else self._chunk([self._delta_choice(index, piece)])
        if last is None:
            return
        fields = _text_fields(last.text, last.place) if isinstance(last, TextChunk) else last
        choice = self._delta_choice(index, fields)
        if self._format is not None:
            choice["logprobs"] = self._format.chat(self._shown_tokens(delta))
        if delta.finish_reason is not None:
            choice |= {"finish_reason": self._finish_reason(delta), "stop_reason": delta.stop_reason}
        if self._returns_ids:
            choice["token_ids"] = self._token_ids(delta)
        yield self._chunk([choice])

    def _pieces(self, delta: Delta) -> list[Json | TextChunk]:
        """Return what clients see of a delta's parts: texts, and `delta` objects with the heads of calls."""
        if not delta.parts:
            # A parser holds back what may be a marker. Then an empty text would end a client's view of the reasoning.
            return [TextChunk(delta.index, delta.text)] if delta.text or not self._is_parsed else []
        pieces: list[Json | TextChunk] = []
        for part in delta.parts:
            if isinstance(part, Content):
                pieces.append(TextChunk(delta.index, part.text))
            elif isinstance(part, CallArguments):
                pieces.append(TextChunk(delta.index, part.text, part.index))
            elif isinstance(part, CallBegin):
                self._has_calls.add(delta.index)
                begun = {"name": part.name, "arguments": ""}
                pieces.append(
                    {"tool_calls": [{"index": part.index, "id": part.id, "type": "function", "function": begun}]}
                )
            elif self._shows_reasoning:
                pieces.append(TextChunk(delta.index, part.text, "reasoning"))
        return pieces

    def _shown_tokens(self, delta: Delta) -> list[Token]:
        # The tokens of reasoning would show what the client does not want.
        return delta.tokens if self._shows_reasoning or not self._is_parsed else delta.answer_tokens

    def _finish_reason(self, delta: Delta) -> str | None:
        # A stop string may end an answer within a call, which cannot be carried out then.
        calls = delta.index in self._has_calls and delta.finish_reason == "stop" and not delta.has_open_call
        return self._stop_for_calls if calls else delta.finish_reason

    def _message(self, choice: Delta) -> Json:
        reasoning = "".join(part.text for part in choice.parts if isinstance(part, Reasoning))
        calls = calls_of(choice.parts)
        if calls:
            self._has_calls.add(choice.index)
        text = self._echo + choice.text
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        if not text and (calls or reasoning):
            message["content"] = None
        if reasoning and self._shows_reasoning:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in calls
            ]
        return message

    def _choice(self, choice: Delta) -> Json:
        message = self._message(choice)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._format.chat(self._shown_tokens(choice)) if self._format is not None else None,
            "finish_reason": self._finish_reason(choice),
            "stop_reason": choice.stop_reason,
            "token_ids": self._token_ids(choice),
        }

    @staticmethod
    def _delta_choice(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _text_fields(text: str, place: str | int) -> Json:
    """Return the `delta` object of a `TextChunk`."""
    if isinstance(place, int):
        return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
    return {"content": text} if place == "content" else {"reasoning": text, "reasoning_content": text}


class CompletionFormat(ResponseFormat):
    """Responses of POST /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, plan, response_id, model, tokenizer)
        self._echo = bool(request.echo)
        self._offsets: dict[int, int] = {}

    def whole(self, choices: list[Delta], usage: Json) -> Json:
        formatted = [
            {**self._choice(choice, self._echo), "token_ids": self._token_ids(choice), **self._about_prompt(choice)}
            for choice in choices
        ]
        return {**self._head, "object": self.whole_object, "choices": formatted, "usage": usage}

    def text_chunk(self, index: int, text: str, place: str | int) -> Json:
        return self._chunk([self._choice(Delta(index, text), echoed=False)])

    def _chunks(self, delta: Delta) -> Iterator[Json | TextChunk]:
        first = self._begins(delta)
        self._sent_tokens += len(delta.tokens)
        if self._says_only_text(delta) and not (first and self._echo):
            if self._says_something(delta):
                yield TextChunk(delta.index, delta.text)
        elif self._says_something(delta) or (first and (self._echo or self._returns_ids)):
            choice = self._choice(delta, first and self._echo)
            if self._returns_ids:
                choice["token_ids"] = self._token_ids(delta)
            if first and self._returns_ids:
                choice["prompt_token_ids"] = self._prompt(delta).token_ids
            yield self._chunk([choice])

    def _choice(self, delta: Delta, echoed: bool) -> Json:
        return {
            "index": delta.index,
            "text": self._prompt_text(delta) + delta.text if echoed else delta.text,
            "logprobs": self._logprobs(delta, echoed),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _prompt_text(self, delta: Delta) -> str:
        prompt = self._prompt(delta)
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)

    def _logprobs(self, delta: Delta, echoed: bool) -> Json | None:
        if self._format is None:
            return None
        prompt_ids = self._prompt(delta).token_ids if echoed else []
        scores = (delta.prompt_scores or [None] * len(prompt_ids)) if echoed else []
        token_ids = [*prompt_ids, *(token.id for token in delta.tokens)]
        offset = self._offsets.get(delta.index, 0)
        fields, self._offsets[delta.index] = self._format.completion([*scores, *delta.tokens], token_ids, offset)
        return fields

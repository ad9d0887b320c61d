"""Bodies of responses and of stream chunks, as the OpenAI API has them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from paceline.services.gateway.generation import Delta
from paceline.services.gateway.logprobs import LogprobFormat
from paceline.services.gateway.plan import Plan
from paceline.services.gateway.schemas import ChatRequest, CompletionRequest, GenerationRequest
from paceline.services.gateway.tokenizer import Tokenizer

Json = dict[str, Any]


class ResponseFormat(ABC):
    """Turns deltas into one kind of response."""

    whole_object: str
    chunk_object: str

    def __init__(
        self,
        request: GenerationRequest,
        plan: Plan,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        logprobs: int | None,
    ) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._as_ids = bool(request.return_tokens_as_token_ids)
        self._format = LogprobFormat(tokenizer.vocabulary, logprobs, self._as_ids) if logprobs is not None else None
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._prompt_format = LogprobFormat(tokenizer.vocabulary, request.prompt_logprobs or 0, self._as_ids)
        self._returns_ids = bool(request.return_token_ids)
        self._head = {
            "id": response_id,
            "object": "",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": None,
        }
        self._begun: set[int] = set()

    @abstractmethod
    def whole(self, choices: list[Delta], usage: Json) -> Json:
        """The body of a response that is not streamed."""

    @abstractmethod
    def chunks(self, delta: Delta) -> Iterator[Json]:
        """The stream chunks of a delta; none where it has nothing to say."""

    def usage_chunk(self, usage: Json) -> Json:
        """The chunk that ends a stream with `include_usage`."""
        return self._chunk([]) | {"usage": usage}

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _prompt_ids(self, delta: Delta) -> list[int]:
        return self._plan.prompts[delta.index // self._plan.n].token_ids

    def _begins(self, delta: Delta) -> bool:
        """Whether this is the choice's first delta."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        return first

    def _prompt_logprobs(self, delta: Delta) -> Json:
        if not self._wants_prompt_logprobs or delta.prompt_scores is None:
            return {}
        return {"prompt_logprobs": self._prompt_format.prompt(delta.prompt_scores)}

    def _token_ids(self, delta: Delta) -> Json:
        return {"token_ids": [token.id for token in delta.tokens]} if self._returns_ids else {}

    def _says_something(self, delta: Delta) -> bool:
        # Half a character or the possible start of a stop string has no text yet, but its tokens may be asked for.
        return bool(delta.text or (delta.tokens and (self._format or self._returns_ids)))


class ChatFormat(ResponseFormat):
    """POST /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer) -> None:
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        super().__init__(request, plan, response_id, model, tokenizer, logprobs)

    def whole(self, choices: list[Delta], usage: Json) -> Json:
        body = {**self._head, "object": self.whole_object, "choices": [self._choice(choice) for choice in choices]}
        body["usage"] = usage
        if self._returns_ids:
            body["prompt_token_ids"] = self._prompt_ids(choices[0])
        return body | self._prompt_logprobs(choices[0])

    def chunks(self, delta: Delta) -> Iterator[Json]:
        if self._begins(delta):
            first = self._chunk([self._delta_choice(delta.index, {"role": "assistant", "content": ""})])
            yield first | ({"prompt_token_ids": self._prompt_ids(delta)} if self._returns_ids else {})
        if self._says_something(delta):
            choice = self._delta_choice(delta.index, {"content": delta.text})
            if self._format is not None:
                choice["logprobs"] = self._format.chat(delta.tokens)
            yield self._chunk([choice | self._token_ids(delta)])
        if delta.finish_reason is not None:
            end = self._delta_choice(delta.index, {})
            end |= {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            yield self._chunk([end])

    def _choice(self, choice: Delta) -> Json:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._format.chat(choice.tokens) if self._format is not None else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._token_ids(choice),
        }

    @staticmethod
    def _delta_choice(index: int, delta: Json) -> Json:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


class CompletionFormat(ResponseFormat):
    """POST /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, plan, response_id, model, tokenizer, request.logprobs)
        self._echo = bool(request.echo)
        self._offsets: dict[int, int] = {}

    def whole(self, choices: list[Delta], usage: Json) -> Json:
        formatted = [self._choice(choice, self._begins(choice)) for choice in choices]
        return {**self._head, "object": self.whole_object, "choices": formatted, "usage": usage}

    def chunks(self, delta: Delta) -> Iterator[Json]:
        first = self._begins(delta)
        finish_reason, stop_reason = delta.finish_reason, delta.stop_reason
        delta.finish_reason = delta.stop_reason = None
        if self._says_something(delta) or (first and (self._echo or self._returns_ids)):
            yield self._chunk([self._choice(delta, first)])
        if finish_reason is not None:
            yield self._chunk([self._choice(Delta(delta.index, "", [], finish_reason, stop_reason), False)])

    def _choice(self, delta: Delta, first: bool) -> Json:
        echoed = first and self._echo
        choice: Json = {
            "index": delta.index,
            "text": self._prompt_text(delta) + delta.text if echoed else delta.text,
            "logprobs": self._logprobs(delta, echoed),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._token_ids(delta),
            **self._prompt_logprobs(delta),
        }
        if first and self._returns_ids:
            choice["prompt_token_ids"] = self._prompt_ids(delta)
        return choice

    def _prompt_text(self, delta: Delta) -> str:
        prompt = self._plan.prompts[delta.index // self._plan.n]
        return prompt.text if prompt.text is not None else self._tokenizer.decode(prompt.token_ids)

    def _logprobs(self, delta: Delta, echoed: bool) -> Json | None:
        if self._format is None or not (delta.tokens or echoed):
            return None
        prompt_ids = self._prompt_ids(delta) if echoed else []
        scores = (delta.prompt_scores or [None] * len(prompt_ids)) if echoed else []
        token_ids = [*prompt_ids, *(token.id for token in delta.tokens)]
        offset = self._offsets.get(delta.index, 0)
        fields, self._offsets[delta.index] = self._format.completion([*scores, *delta.tokens], token_ids, offset)
        return fields

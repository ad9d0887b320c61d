"""Formats answers of POST /inference/v1/generate: choices as token ids, with their text if the client wants it."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.response_format import Json, ResponseFormat, TextChunk
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.planning.token_schemas import TokensRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer


class TokensFormat(ResponseFormat):
    """Formats deltas as responses of POST /inference/v1/generate."""

    def __init__(self, request: TokensRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(request.sampling_params, plan, response_id, model, tokenizer)
        self._returns_ids = bool(request.return_token_ids)
        self._has_text = request.output_mode == "text"
        self._head = {
            "request_id": response_id,
            "model": model,
            "created": self._head["created"],
            "output_mode": request.output_mode,
        }

    def whole(self, choices: list[Delta], usage: Json) -> Json:
        body = self._chunk([self._choice(choice) for choice in choices])
        return {**body, "usage": usage, **self._about_prompt(choices[0]), "kv_transfer_params": None}

    def text_chunk(self, index: int, text: str, place: str | int) -> Json:
        return self._chunk([self._choice(Delta(index, text))])

    def _chunks(self, delta: Delta) -> Iterator[Json | TextChunk]:
        first = self._begins(delta)
        self._sent_tokens += len(delta.tokens)
        if self._says_something(delta):
            prompt = {"prompt_token_ids": self._prompt(delta).token_ids} if first and self._returns_ids else {}
            yield self._chunk([self._choice(delta)]) | prompt

    def _chunk(self, choices: list[Json]) -> Json:
        return {**self._head, "choices": choices}

    def _choice(self, delta: Delta) -> Json:
        choice = {
            "index": delta.index,
            "token_ids": [token.id for token in delta.tokens],
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        return choice | {"text": delta.text} if self._has_text else choice

    def _logprobs(self, delta: Delta) -> Json | None:
        if self._format is None:
            return None
        return self._format.chat(delta.tokens) if self._has_text else self._format.ids(delta.tokens)

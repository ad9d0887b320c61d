"""Bodies and stream chunks of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.logprobs import TextOffsets
from paceline.services.gateway.api.response_format import Json, ResponseFormat, TextChunk
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.planning.schemas import CompletionRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer


class CompletionFormat(ResponseFormat):
    """Formats deltas as responses of POST /v1/completions."""

    whole_object = chunk_object = "text_completion"

    def __init__(
        self, request: CompletionRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer
    ) -> None:
        super().__init__(request, plan, response_id, model, tokenizer)
        self._echo = bool(request.echo)
        self._offsets: dict[int, TextOffsets] = {}
        self._hidden = tokenizer.vocabulary.special_ids if request.skip_special_tokens else frozenset()

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
        if (text := self._offsets.get(delta.index)) is None:
            text = self._offsets[delta.index] = TextOffsets(-self._surplus(delta) if echoed else 0)
        spell = self._tokenizer.vocabulary.token_bytes
        offsets = [text.push(spell(own)) for own in prompt_ids]
        offsets += [text.push(b"" if token.id in self._hidden else spell(token.id)) for token in delta.tokens]
        return self._format.completion([*scores, *delta.tokens], token_ids, offsets)

    def _surplus(self, delta: Delta) -> int:
        """Return the number of characters that the prompt's tokens have in front of the client's text.

        Some tokenizers write a token or a space before a text.
        """
        prompt, vocabulary = self._prompt(delta), self._tokenizer.vocabulary
        spelled = b"".join(map(vocabulary.token_bytes, prompt.token_ids)).decode(errors="replace")
        return 0 if prompt.text is None else max(0, spelled.find(prompt.text))

"""The base class of the OpenAI API's formats, which turn deltas into a body or into stream chunks.

Also the reader of the input of custom tools, which models call like functions with one argument.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from paceline.core.types import Token
from paceline.services.gateway.api.choice import Delta, join_deltas
from paceline.services.gateway.api.logprobs import LogprobFormat
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.schemas import GenerationRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer

_JSON_STRING = json.JSONDecoder(strict=False)


class CustomInput:
    """Reads the input of a custom tool from the arguments {"input": "…"} while they come."""

    _BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _TEXT = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
    _HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")
    """Matches, at the end of a piece, the escape of the first half of a character whose second half follows."""

    def __init__(self) -> None:
        self._rest = ""
        self._has_begun = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Take the next piece of the arguments. Return new text of the input."""
        self._rest += arguments
        if not self._has_begun:
            begin = self._BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._has_begun, self._rest = True, self._rest[begin.end() :]
        if self._has_ended:
            return ""
        found = self._TEXT.match(self._rest)
        assert found is not None
        end = found.end()
        self._has_ended = self._rest.startswith('"', end)
        if not self._has_ended and (half := self._HALF.search(self._rest, 0, end)):
            end = half.start(1)
        text, self._rest = self._rest[:end], self._rest[end:]
        return _decoded(text)

    def finish(self) -> str:
        """End the input. Return the text that was held back; all arguments if they do not begin such an object."""
        may_begin = '{"input":"'.startswith("".join(self._rest.split()))
        return "" if self._has_begun or may_begin else self._rest


def _decoded(text: str) -> str:
    """Return the text of a JSON string without its quotes. Halves of characters without the other half are replaced."""
    decoded = str(_JSON_STRING.decode(f'"{text}"'))
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in text else decoded


Json = dict[str, Any]


class TextChunk(NamedTuple):
    """A stream chunk with nothing but text. `ResponseFormat.text_chunk` makes its body."""

    choice: int
    text: str
    place: str | int = "content"
    """Kind of the text: "content", "reasoning", or the index of the call whose arguments it continues."""


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
        self._held: dict[int, list[Delta]] = {}

    @abstractmethod
    def whole(self, choices: list[Delta], usage: Json) -> Json:
        """Return the body of a response that is not streamed."""

    @abstractmethod
    def text_chunk(self, index: int, text: str, place: str | int) -> Json:
        """Return the stream chunk, as JSON, of a `TextChunk`."""

    def chunks(self, delta: Delta) -> Iterator[Json | TextChunk]:
        """Yield the stream chunks of a delta; nothing if the client sees no change yet."""
        if (complete := self._with_end(delta)) is not None:
            yield from self._chunks(complete)

    @abstractmethod
    def _chunks(self, delta: Delta) -> Iterator[Json | TextChunk]: ...

    def _with_end(self, delta: Delta) -> Delta | None:
        """Return the delta to send, joined with a delta that was kept before; None if the delta itself is kept.

        A choice's last tokens are kept until its end comes, which is soon, because clients expect both in one chunk.
        """
        self._counts[delta.index] += len(delta.tokens)
        held = self._held.setdefault(delta.index, [])
        held.append(delta)
        sampling = self._prompt(delta).sampling
        count = self._counts[delta.index]
        last = next((each.tokens[-1] for each in reversed(held) if each.tokens), None)
        ends = last is not None and sampling.ends(last.id, count)
        if delta.finish_reason is None and (ends or count >= sampling.max_tokens):
            return None
        # Joined only here, because a derendered stream may hold very many tokens that end an answer.
        return join_deltas(self._held.pop(delta.index))

    def held_tokens(self, index: int) -> list[Token]:
        """Return the tokens of a choice that are kept for a chunk with the choice's end."""
        return [token for held in self._held.get(index, ()) for token in (*held.answer_tokens, *held.tokens)]

    def empty_chunk(self) -> Json:
        """Return a stream chunk without choices or new text."""
        return self._chunk([])

    def usage_so_far(self, usage: Json) -> Json:
        """Return the `usage` for the latest chunk: that of all generated tokens, without tokens that are kept."""
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
        """Return whether a delta is its choice's first one, and remember that the choice has begun."""
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
        """Return the tokens of a delta whose ids and logprobs a response may list."""
        return delta.tokens

    def _says_only_text(self, delta: Delta) -> bool:
        return self._format is None and delta.finish_reason is None and not self._returns_ids

    def _says_something(self, delta: Delta) -> bool:
        # A token may have no text yet: half a character, or the possible start of a stop string. As in vLLM, it gets a
        # chunk, so that the client sees progress.
        return bool(delta.text or delta.tokens or delta.finish_reason)

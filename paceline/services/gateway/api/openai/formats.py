"""Bodies and stream chunks of POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from collections.abc import Iterator

from paceline.core.types import Token
from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.logprobs import TextOffsets
from paceline.services.gateway.api.response_format import CustomInput, Json, ResponseFormat, TextChunk
from paceline.services.gateway.planning.answers.answer import CallArguments, CallBegin, Content, Reasoning, calls_of
from paceline.services.gateway.planning.plan import Plan
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.planning.tool_schemas import CustomToolDefinition, NamedTool


class ChatFormat(ResponseFormat):
    """Formats deltas as responses of POST /v1/chat/completions."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest, plan: Plan, response_id: str, model: str, tokenizer: Tokenizer) -> None:
        super().__init__(request, plan, response_id, model, tokenizer)
        last = request.messages[-1]
        self._echo = last.text or "" if request.echo and last.role == "assistant" else ""
        self._shows_reasoning = request.include_reasoning
        self._is_parsed = any(prompt.answer is not None for prompt in plan.prompts)
        self._stop_for_calls = "stop" if isinstance(request.choice, NamedTool) else "tool_calls"
        self._has_calls: set[int] = set()
        """Indexes of choices that have begun a tool call."""
        self._custom = {tool.function.name for tool in request.tools or () if isinstance(tool, CustomToolDefinition)}
        self._inputs: dict[tuple[int, int], CustomInput] = {}
        """Readers of the calls of custom tools in a stream, by the indexes of choice and call."""

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
        """Return the chunks for a delta's parts: texts, and `delta` objects with the beginnings of tool calls."""
        if not delta.parts:
            # A parser holds back what may be a marker. Then an empty text would end a client's view of the reasoning.
            return [TextChunk(delta.index, delta.text)] if delta.text or not self._is_parsed else []
        pieces: list[Json | TextChunk] = []
        for part in delta.parts:
            if isinstance(part, Content):
                pieces.append(TextChunk(delta.index, part.text))
            elif isinstance(part, CallArguments):
                if (reader := self._inputs.get((delta.index, part.index))) is None:
                    pieces.append(TextChunk(delta.index, part.text, part.index))
                elif text := reader.push(part.text):
                    pieces.append(_input_fields(part.index, text))
            elif isinstance(part, CallBegin):
                self._has_calls.add(delta.index)
                is_custom = part.name in self._custom
                if is_custom:
                    self._inputs[delta.index, part.index] = CustomInput()
                begun = {"id": part.id, **_called(part.name, "", is_custom)}
                pieces.append({"tool_calls": [{"index": part.index, **begun}]})
            elif self._shows_reasoning:
                pieces.append(TextChunk(delta.index, part.text, "reasoning"))
        return [*pieces, *self._ends(delta)]

    def _ends(self, delta: Delta) -> Iterator[Json]:
        """Yield what calls of custom tools have held back, if a delta is the last one of its choice."""
        if delta.finish_reason is not None:
            for choice, index in [key for key in self._inputs if key[0] == delta.index]:
                if rest := self._inputs.pop((choice, index)).finish():
                    yield _input_fields(index, rest)

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
                {"id": call.id, **_called(call.name, call.arguments, call.name in self._custom)} for call in calls
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
    """Return the `delta` object for a text; see `TextChunk` about its place."""
    if isinstance(place, int):
        return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
    return {"content": text} if place == "content" else {"reasoning": text, "reasoning_content": text}


def _called(name: str, arguments: str, is_custom: bool) -> Json:
    """Return the fields of a call besides its id."""
    if not is_custom:
        return {"type": "function", "function": {"name": name, "arguments": arguments}}
    reader = CustomInput()
    return {"type": "custom", "custom": {"name": name, "input": reader.push(arguments) + reader.finish()}}


def _input_fields(index: int, text: str) -> Json:
    """Return the `delta` object for a piece of the input of a custom tool.

    Args:
        index: the index of the call.
    """
    return {"tool_calls": [{"index": index, "custom": {"input": text}}]}


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

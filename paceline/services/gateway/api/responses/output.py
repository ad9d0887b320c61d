"""The items of an answer while they grow, the logprobs of its text, and the events that tell of them."""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

from paceline.core.types import Token
from paceline.services.gateway.api.logprobs import LogprobFormat
from paceline.services.gateway.api.response_format import CustomInput
from paceline.services.gateway.api.responses.items import seal
from paceline.services.gateway.api.responses.tools import ClientName
from paceline.services.gateway.planning.vocabulary import Vocabulary

Json = dict[str, Any]

Status = Literal["completed", "incomplete"]


class TextLogprobs:
    """Finds the tokens of a text among all tokens of the answer so far, and formats their logprobs.

    Args:
        count: the number of most likely tokens to show.
        as_ids: whether a token is shown as `token_id:7`.
    """

    def __init__(self, vocabulary: Vocabulary, count: int, as_ids: bool) -> None:
        self._vocabulary = vocabulary
        self._format = LogprobFormat(vocabulary, count, as_ids)
        self._tokens: list[Token] = []
        """Tokens whose text was not taken yet."""

    def push(self, tokens: Sequence[Token]) -> None:
        """Add the next tokens of the answer."""
        self._tokens += tokens

    def drop(self) -> None:
        """Forget all tokens so far, because their text belongs to no message."""
        self._tokens.clear()

    def take(self, text: str, held: bytes = b"") -> list[Json]:
        """Return the logprobs of a text's tokens. If several places have this text, the last one counts.

        Args:
            held: the bytes of the last tokens, whose text comes later and is left out of the search.
        """
        pieces, wanted = [self._vocabulary.token_bytes(token.id) for token in self._tokens], text.encode()
        begin = b"".join(pieces).removesuffix(held).rfind(wanted)
        first, end = 0, len(pieces)
        if begin >= 0:  # else bytes that are no character, for which the text has U+FFFD
            ends = list(itertools.accumulate(map(len, pieces)))
            first = bisect.bisect_right(ends, begin)
            end = bisect.bisect_left(ends, begin + len(wanted)) + 1
        tokens, self._tokens = self._tokens[first:end], self._tokens[end:]
        entries: list[Json] = self._format.chat(tokens)["content"]
        return entries


class OutputItem(ABC):
    """One item of a response's output, while it grows.

    Args:
        value: the item's JSON, which is kept up to date.
        index: the item's place in the output.
    """

    def __init__(self, value: Json, index: int) -> None:
        self.value = value
        self._index = index

    def begin(self) -> list[Json]:
        """Return the events that begin the item."""
        return [self._about_item("added")]

    @abstractmethod
    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        """Add text to the item. Return the events for it."""

    def end(self, status: Status) -> list[Json]:
        """Return the events that end the item."""
        self.value["status"] = status
        return [self._about_item("done")]

    def _about_item(self, what: str) -> Json:
        # A copy, because the item grows while events may wait.
        return {"type": f"response.output_item.{what}", "output_index": self._index, "item": dict(self.value)}

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.value["id"], "output_index": self._index, **fields}


class _TextItem(OutputItem):
    """An item whose content is one text."""

    _texts: str
    """Name of the text in the types of its events, such as "output_text"."""

    def __init__(self, value: Json, index: int, part: Json) -> None:
        super().__init__({**value, "content": []}, index)
        self._part = part
        self._pieces: list[str] = []

    def begin(self) -> list[Json]:
        return [*super().begin(), self._event("content_part.added", content_index=0, part=dict(self._part))]

    def end(self, status: Status) -> list[Json]:
        self._part["text"] = "".join(self._pieces)
        self.value["content"] = [self._part]
        done = self._event(f"{self._texts}.done", content_index=0, text=self._part["text"], **self._logprobs())
        part = self._event("content_part.done", content_index=0, part=self._part)
        return [done, part, *super().end(status)]

    def _logprobs(self) -> Json:
        return {}


class ResponseMessage(_TextItem):
    """An item that is a message of the model."""

    _texts = "output_text"

    def __init__(self, item_id: str, index: int) -> None:
        value = {"id": item_id, "type": "message", "status": "in_progress", "role": "assistant"}
        super().__init__(value, index, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._pieces.append(text)
        self._part["logprobs"] += logprobs
        return [self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def _logprobs(self) -> Json:
        return {"logprobs": self._part["logprobs"]}


class Thought(_TextItem):
    """An item that is reasoning of the model.

    Args:
        seals: whether the item has `encrypted_content`, for clients that send no other reasoning back.
    """

    _texts = "reasoning_text"

    def __init__(self, item_id: str, index: int, seals: bool) -> None:
        value = {"id": item_id, "type": "reasoning", "status": "in_progress", "summary": []}
        super().__init__({**value, "encrypted_content": None}, index, {"type": "reasoning_text", "text": ""})
        self._seals = seals

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._pieces.append(text)
        return [self._event("reasoning_text.delta", content_index=0, delta=text)]

    def end(self, status: Status) -> list[Json]:
        if self._seals:
            self.value["encrypted_content"] = seal("".join(self._pieces))
        return super().end(status)


class ResponseFunctionCall(OutputItem):
    """An item that is a call of a function."""

    def __init__(self, item_id: str, index: int, call_id: str, name: ClientName) -> None:
        value = {"id": item_id, "type": "function_call", "status": "in_progress", "call_id": call_id}
        super().__init__({**value, **_named(name), "arguments": ""}, index)
        self._pieces: list[str] = []

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        self._pieces.append(text)
        return [self._event("function_call_arguments.delta", delta=text)]

    def end(self, status: Status) -> list[Json]:
        arguments = self.value["arguments"] = "".join(self._pieces)
        done = self._event("function_call_arguments.done", name=self.value["name"], arguments=arguments)
        return [done, *super().end(status)]


class CustomCall(OutputItem):
    """An item that is a call of a custom tool, whose input is a text."""

    def __init__(self, item_id: str, index: int, call_id: str, name: ClientName) -> None:
        value = {"id": item_id, "type": "custom_tool_call", "status": "in_progress", "call_id": call_id}
        super().__init__({**value, **_named(name), "input": ""}, index)
        self._reader = CustomInput()
        self._pieces: list[str] = []

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        return self._add(self._reader.push(text))

    def end(self, status: Status) -> list[Json]:
        rest = self._add(self._reader.finish())
        whole = self.value["input"] = "".join(self._pieces)
        return [*rest, self._event("custom_tool_call_input.done", input=whole), *super().end(status)]

    def _add(self, text: str) -> list[Json]:
        if not text:
            return []
        self._pieces.append(text)
        return [self._event("custom_tool_call_input.delta", delta=text)]


def _named(name: ClientName) -> Json:
    return {"name": name.name, **({"namespace": name.namespace} if name.namespace else {})}

"""Answers in the form of the Messages API: content blocks, and the events of a stream."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.http.error_responses import messages_error_body
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import event
from paceline.services.gateway.planning.answers.answer import (
    CallArguments,
    CallBegin,
    Content,
    Part,
    Reasoning,
    join_parts,
)

Json = dict[str, Any]

_NO_STOP: Json = {"stop_reason": None, "stop_sequence": None}


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """Formats the answer to one request as a message of the Messages API."""

    request_id: str
    model: str
    shows_thinking: bool = True
    """Whether thinking blocks show the text of the reasoning."""

    def whole(self, choices: list[Delta], usage: Json) -> Json:
        """Return the body of a response that is not streamed."""
        (answer,) = choices
        content: list[Json] = []
        for part in join_parts(answer.all_parts):
            match part:
                case CallArguments(_, text):
                    content[-1]["input"] = _object(text)
                case Content(text):
                    content.append({"type": "text", "text": text})
                case Reasoning(text) if self.shows_thinking:
                    content.append({**_empty_block(part), "thinking": text})
                case _:
                    content.append(_empty_block(part))
        has_calls = any(block["type"] == "tool_use" for block in content)
        return self.message(content, _stop_fields(answer, has_calls), usage)

    def message(self, content: list[Json], stop: Json, usage: Json) -> Json:
        """Return the JSON of a message.

        Args:
            content: the content blocks.
            stop: the fields that say why the answer ended.
            usage: the usage in Anthropic's form.
        """
        message_id = self.request_id if self.request_id.startswith("msg_") else f"msg_{self.request_id}"
        head = {"id": message_id, "type": "message", "role": "assistant", "model": self.model}
        return {**head, "content": content, **stop, "usage": _usage_fields(usage)}


class MessageWriter:
    """Converts the deltas of an answer into the events of a message's stream; a `StreamWriter`.

    Args:
        usage: returns the usage, with all tokens generated so far.
    """

    def __init__(self, message_format: MessageFormat, usage: Callable[[], Json]) -> None:
        self._format = message_format
        self._usage = usage
        self._has_begun = False
        self._index = -1
        """Index of the latest content block."""
        self._open: type[Part] | None = None
        """The kind of part that the open block takes; None if no block is open."""
        self._has_calls = False
        self._stop = _NO_STOP

    def begin(self) -> bytes:
        return b"" if self._has_begun else self.ping()

    def ping(self) -> bytes:
        """Return a ping event. If the stream has not begun, put the event that begins it in front."""
        ping = event({"type": "ping"}, "ping")
        if self._has_begun:
            return ping
        self._has_begun = True
        start = {"type": "message_start", "message": self._format.message([], _NO_STOP, self._usage())}
        return event(start, "message_start") + ping

    def write(self, delta: Delta) -> bytes:
        written = b"".join(map(self._write_part, delta.all_parts))
        if delta.finish_reason is not None:
            self._stop = _stop_fields(delta, self._has_calls)
        return written

    def end(self) -> bytes:
        last = {"type": "message_delta", "delta": self._stop, "usage": _usage_fields(self._usage())}
        return self._close() + event(last, "message_delta") + event({"type": "message_stop"}, "message_stop")

    def error(self, error: ApiError) -> bytes:
        return event(messages_error_body(error.status, str(error), self._format.request_id), "error")

    def _write_part(self, part: Part) -> bytes:
        match part:
            case Content(text):
                return self._enter(part) + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                begun = self._enter(part)
                shown = self._format.shows_thinking
                return begun + self._delta({"type": "thinking_delta", "thinking": text}) if shown else begun
            case CallBegin():
                self._has_calls = True
                return self._close() + self._enter(part)
            case CallArguments(_, text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _enter(self, part: Part) -> bytes:
        """Return the events that open a content block for a part; b"" if the part belongs to the open block."""
        if self._open is type(part):
            return b""
        closed = self._close()
        self._open = type(part)
        self._index += 1
        start = {"type": "content_block_start", "index": self._index, "content_block": _empty_block(part)}
        return closed + event(start, "content_block_start")

    def _close(self) -> bytes:
        """Return the events that end the open content block; b"" if no block is open."""
        if self._open is None:
            return b""
        signature = self._delta({"type": "signature_delta", "signature": ""}) if self._open is Reasoning else b""
        self._open = None
        return signature + event({"type": "content_block_stop", "index": self._index}, "content_block_stop")

    def _delta(self, delta: Json) -> bytes:
        return event({"type": "content_block_delta", "index": self._index, "delta": delta}, "content_block_delta")


def _stop_fields(answer: Delta, has_calls: bool) -> Json:
    """Return the fields that say why an answer ended.

    Args:
        answer: the whole answer, or its last delta.
        has_calls: whether the answer has tool calls.
    """
    # Of Anthropic's reasons, this one alone says that an answer was cut off. It also stands for an answer that was
    # aborted or repeated itself.
    if answer.finish_reason != "stop":
        return {**_NO_STOP, "stop_reason": "max_tokens"}
    if isinstance(answer.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop_reason}
    return {**_NO_STOP, "stop_reason": "tool_use" if has_calls and not answer.has_open_call else "end_turn"}


def _usage_fields(usage: Json) -> Json:
    """Return a usage in Anthropic's form, which counts cached prompt tokens separately from other prompt tokens."""
    details = usage["prompt_tokens_details"]
    cached, created = details["cached_tokens"], details.get("cache_creation_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
    }


def _empty_block(part: Part) -> Json:
    """Return the content block that a part begins, before its text."""
    match part:
        case Reasoning():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case CallBegin(_, call_id, name):
            return {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        case _:
            return {"type": "text", "text": ""}


def _object(text: str) -> Json:
    """Return the arguments of a call, from their JSON text, as an object.

    If the call was cut off, the object has only the complete members, as clients of a stream would read them. The
    stop_reason then says that the call must not be carried out.
    """
    try:
        value = from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return _finite(value) if isinstance(value, dict) else {}


def _finite(value: Any) -> Any:
    """Return a value from JSON in which the largest double replaces larger numbers, because JSON has no infinity.

    The recursion is safe: the library that reads JSON refuses deeply nested values.
    """
    match value:
        case float():
            return max(-sys.float_info.max, min(value, sys.float_info.max))
        case dict():
            return {name: _finite(each) for name, each in value.items()}
        case list():
            return [_finite(each) for each in value]
    return value

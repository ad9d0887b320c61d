"""One response, from its beginning to its end: deltas of a generation become items and events."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.responses.conversation import id_prefix
from paceline.services.gateway.api.responses.output import (
    CustomCall,
    OutputItem,
    ResponseFunctionCall,
    ResponseMessage,
    Status,
    TextLogprobs,
    Thought,
)
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.api.responses.tools import Toolbox
from paceline.services.gateway.http.errors import NOT_UNICODE, ApiError, is_unicode
from paceline.services.gateway.http.event_streams import event
from paceline.services.gateway.planning.answers.answer import CallArguments, CallBegin, Content, Part, Reasoning
from paceline.services.gateway.planning.tokenizer import Tokenizer

Json = dict[str, Any]

MAX_ECHO_BYTES = 4 << 20
"""Largest size, in bytes, of the request's fields that a response repeats, because several events have all of them."""

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""Codes of failed responses by the HTTP status of the error. All other statuses have the code "server_error"."""


def id_key(response_id: str) -> str:
    """Return the part of a response's id that the ids of its items have in common with it."""
    return response_id.removeprefix("resp_")


def response_of_item(item_id: str) -> str:
    """Return the id of the response that an item belongs to. The item's id must come from this server."""
    return "resp_" + item_id.partition("_")[2][:32]


class ResponseBuilder:
    """Builds a response and its events from deltas. Each event has a sequence number.

    Args:
        is_stored: whether the response is kept.
        usage: returns the usage in the form of a chat.
    """

    def __init__(
        self,
        response_id: str,
        request: ResponsesRequest,
        toolbox: Toolbox,
        model: str,
        tokenizer: Tokenizer,
        generation: Generation,
        *,
        is_stored: bool,
    ) -> None:
        self._toolbox = toolbox
        self._usage: Callable[[], Json] = generation.usage
        self._seals = request.encrypts_reasoning
        as_ids = bool(request.return_tokens_as_token_ids)
        count = request.top_logprobs or 0
        self._logprobs = TextLogprobs(tokenizer.vocabulary, count, as_ids) if request.shows_logprobs else None
        self._held = b""
        """Bytes of tokens whose text comes after the part that is being added; see `Delta.held`."""
        self._item: OutputItem | None = None
        """The item that still grows; None if there is none."""
        self._next_number = 0
        self._decode = tokenizer.decode
        (self._prompt,) = generation.plan.prompts
        self._generated: list[int] | None = [] if request.enable_response_messages else None
        """Ids of all generated tokens; None if the client does not want them."""
        sampling = self._prompt.sampling
        self.response = {
            **_HEAD,
            "id": response_id,
            "created_at": int(time.time()),
            "model": model,
            "status": "queued" if request.background else "in_progress",
            "background": request.background,
            "store": is_stored,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if request.top_p is None else request.top_p,
            **echo_of(request),
            "output": [],
        }

    @property
    def id(self) -> str:
        return str(self.response["id"])

    def begin(self) -> list[Json]:
        """Begin the response. Return its first events."""
        events = [self._about_response("created")]
        self.response["status"] = "in_progress"
        return self._numbered([*events, self._about_response("in_progress")])

    def add(self, delta: Delta) -> list[Json]:
        """Add the next delta to the response. Return the events for it."""
        parts = delta.all_parts
        if self._generated is not None:
            self._generated += [token.id for token in delta.tokens]
        if self._logprobs is not None:
            self._logprobs.push(delta.tokens)
        events = []
        for number, part in enumerate(parts, 1):
            self._held = delta.held if number == len(parts) else b""
            events += self._add_part(part)
        if self._logprobs is not None and parts and not isinstance(parts[-1], Content):
            self._logprobs.drop()
        if delta.finish_reason not in (None, "stop") or delta.has_open_call:
            # OpenAI has no reason for an answer that was aborted, repeated itself or ended within a call.
            details = {"reason": "max_output_tokens"} if delta.finish_reason == "length" else None
            self.response |= {"status": "incomplete", "incomplete_details": details}
        return self._numbered(events)

    def end(self) -> list[Json]:
        """End the response after its last delta. Return the last events."""
        if self.response["status"] == "incomplete":
            events = self._end_item("incomplete")
        else:
            events = self._end_item("completed")
            # Clients expect something that they can show or do.
            if all(item["type"] == "reasoning" for item in self.response["output"]):
                events += [*self._begin_item(ResponseMessage, "message"), *self._end_item("completed")]
            self.response |= {"status": "completed", "completed_at": int(time.time())}
        return self._numbered([*events, self._about_end(self.response["status"])])

    def fail(self, error: ApiError) -> list[Json]:
        """End the response with an error. Return the last events."""
        events = self._end_item("incomplete")
        code = _ERROR_CODES.get(error.status, "server_error")
        self.response |= {
            "status": "failed",
            "error": {"code": code, "message": str(error)},
            "incomplete_details": None,
        }
        return self._numbered([*events, self._about_end("failed")])

    def cancel(self) -> list[Json]:
        """End the response because the client cancelled it. Return the last events."""
        events = self._end_item("incomplete")
        self.response |= {"status": "cancelled", "incomplete_details": None}
        # There is no event of this name. Clients of streams know this one as an end.
        return self._numbered([*events, self._about_end("incomplete")])

    def _add_part(self, part: Part) -> list[Json]:
        events: list[Json] = []
        match part:
            case Content(text):
                if not isinstance(self._item, ResponseMessage):
                    events += [*self._end_item("completed"), *self._begin_item(ResponseMessage, "message")]
                return events + self._grow(text)
            case Reasoning(text):
                if not isinstance(self._item, Thought):
                    events += [*self._end_item("completed"), *self._begin_item(Thought, "reasoning", self._seals)]
                return events + self._grow(text)
            case CallBegin(_, call_id, name):
                tool = self._toolbox.client_name(name)
                kind = ResponseFunctionCall if tool.kind == "function" else CustomCall
                prefix = "function_call" if tool.kind == "function" else "custom_tool_call"
                return [*self._end_item("completed"), *self._begin_item(kind, prefix, call_id, tool)]
            case CallArguments(_, text):
                return self._grow(text)

    def _grow(self, text: str) -> list[Json]:
        assert self._item is not None
        logprobs: list[Json] = []
        if self._logprobs is not None and isinstance(self._item, ResponseMessage):
            logprobs = self._logprobs.take(text, self._held)
        return self._item.add(text, logprobs)

    def _begin_item(self, kind: Callable[..., OutputItem], name: str, *args: Any) -> list[Json]:
        output = self.response["output"]
        self._item = kind(f"{id_prefix(name)}_{id_key(self.id)}o{len(output)}", len(output), *args)
        output.append(self._item.value)
        return self._item.begin()

    def _end_item(self, status: Status) -> list[Json]:
        item, self._item = self._item, None
        return item.end(status) if item is not None else []

    def _about_response(self, what: str) -> Json:
        # A copy, because the response grows while the event may wait.
        return {"type": f"response.{what}", "response": {**self.response, "output": list(self.response["output"])}}

    def _about_end(self, what: str) -> Json:
        self.response["usage"] = _usage(self._usage())
        if self._generated is not None:
            messages = {"input_messages": self._prompt.token_ids, "output_messages": self._generated}
            self.response |= {name: [self._raw_message(ids)] for name, ids in messages.items()}
        return self._about_response(what)

    def _raw_message(self, token_ids: list[int]) -> Json:
        """Return vLLM's raw message for tokens: their ids, and their whole text with special tokens."""
        return {"message": self._decode(token_ids), "tokens": token_ids, "type": "raw_message_tokens"}

    def _numbered(self, events: list[Json]) -> list[Json]:
        for each in events:
            each["sequence_number"] = self._next_number
            self._next_number += 1
        return events


def encode(events: list[Json]) -> list[bytes]:
    """Return the text of each event as a server-sent event."""
    return [event(each, each["type"]) for each in events]


_HEAD: Json = {
    "object": "response",
    "completed_at": None,
    "error": None,
    "incomplete_details": None,
    "usage": None,
    # What this server does not have.
    "access_programs": None,
    "conversation": None,
    "image": None,
    "input_transformations": None,
    "moderation": None,
    "prompt": None,
    "prompt_cache_diagnostics": None,
    "prompt_cache_options": None,
    "tool_usage": None,
}


def check_echo(request: ResponsesRequest) -> None:
    """Raise ApiError if the fields that the response repeats are not valid Unicode or larger than MAX_ECHO_BYTES."""
    left = MAX_ECHO_BYTES
    for name, value in echo_of(request).items():
        text = json.dumps(value, ensure_ascii=False)
        if not is_unicode(text):
            raise ApiError(400, f"{name}: a text is {NOT_UNICODE}", param=name)
        left -= len(text.encode())
        if left < 0:
            told = f"the fields up to this one that a response repeats have more than {MAX_ECHO_BYTES} bytes"
            raise ApiError(400, f"{name}: {told}; send less", param=name)


def echo_of(request: ResponsesRequest) -> Json:
    """Return the fields of a response that repeat those of its request."""
    choice = request.tool_choice
    return {
        "conversation": None if request.conversation_id is None else {"id": request.conversation_id},
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "prompt_cache_retention": request.prompt_cache_retention,
        "reasoning": {"effort": None, "summary": None, **request.reasoning.echo()},
        "safety_identifier": request.safety_identifier,
        "service_tier": request.service_tier or "default",
        "text": {"format": {"type": "text"}, **request.text.echo()},
        "tool_choice": choice if isinstance(choice, str) else choice.echo(),
        "tools": [tool.echo() for tool in request.tools or ()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": request.truncation,
        "user": request.user,
    }


def _usage(usage: Json) -> Json:
    """Return the usage of a response from the usage of a chat."""
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }

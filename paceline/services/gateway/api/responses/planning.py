"""Plans of responses: a request and its earlier turns become a chat. Pure functions."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.responses.conversation import Messages
from paceline.services.gateway.api.responses.items import InputItem, MessageItem
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.api.responses.tool_items import McpCallItem, ToolOutputItem
from paceline.services.gateway.api.responses.tools import Toolbox
from paceline.services.gateway.http.errors import ApiError, ContextLengthError
from paceline.services.gateway.planning.chat_prompt import media_of
from paceline.services.gateway.planning.media.items import NO_ITEMS, Expansions
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.planning import plan_chat
from paceline.services.gateway.planning.schemas import ChatRequest, GenerationRequest

Json = dict[str, Any]

_CLIENT_FIELDS = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Names of a chat's fields, each with the name of the same field in a request for a response."""
_CHAT_FIELD = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(_CLIENT_FIELDS, reverse=True)))})\b")
_FUNCTION = re.compile(r"(tools\[\d+\])\.function\b")


def plan_response(
    request: ResponsesRequest,
    toolbox: Toolbox,
    items: Sequence[InputItem],
    model: ServedModel,
    media: Expansions = NO_ITEMS,
) -> tuple[Plan, Sequence[InputItem]]:
    """Return the plan of a response, and the items in its prompt. With truncation, the oldest items may be left out.

    Args:
        items: all items of the conversation, with references replaced by their items.
        media: the tokens that stand in the prompt for each image, video or audio clip. A conversation counts as too
            long if one is missing here.

    Raises:
        InvalidRequestError, ApiError, NoWorkerError: errors of `plan_chat`. They name the fields of a response.
    """

    def plan(part: Sequence[InputItem]) -> Plan:
        chat = chat_request(request, toolbox, part)
        if any(item not in media for item in media_of(chat.messages, model.tokenizer)):
            raise _MediaLeftOutError
        return plan_chat(chat, model, media)

    with in_client_fields():
        if request.truncation == "disabled":
            return plan(items), items
        return _plan_what_fits(items, plan)


@contextlib.contextmanager
def in_client_fields() -> Iterator[None]:
    """Rename fields of a chat to fields of a response in errors that are raised while the block runs."""
    try:
        yield
    except InvalidRequestError as error:
        text = str(error)
        # This error has no words of the client's, so that all names in it are ours.
        is_own = isinstance(error, ContextLengthError)
        error.args = (_CHAT_FIELD.sub(_client_field, text) if is_own else _in_client_fields(text),)
        error.param = error.param and _in_client_fields(error.param)
        raise


def chat_request(request: ResponsesRequest, toolbox: Toolbox, items: Sequence[InputItem]) -> ChatRequest:
    """Return the chat whose answer is the wanted response.

    Raises ApiError if the chat is not valid.
    """
    messages = Messages(request.instructions, toolbox)
    for item in items:
        item.add_to(messages)
    common = {
        name: getattr(request, name) for name in GenerationRequest.model_fields if name in request.model_fields_set
    }
    verbosity = {"verbosity": request.text.verbosity} if request.text.verbosity else {}
    fields: Json = {
        **common,
        "messages": messages.whole(),
        "tools": toolbox.definitions,
        "tool_choice": toolbox.choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        "max_completion_tokens": request.max_output_tokens,
        "reasoning_effort": request.reasoning.effort,
        "mm_processor_kwargs": request.mm_processor_kwargs,
        "chat_template_kwargs": {**verbosity, **(request.chat_template_kwargs or {})} or None,
    }
    if request.text.format is not None:
        fields["response_format"] = request.text.format.for_chat()
    if request.shows_logprobs:
        fields |= {"logprobs": True, "top_logprobs": request.top_logprobs or 0}
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        if not first["loc"]:
            raise ApiError(400, _in_client_fields(first["msg"])) from error
        place = _in_client_fields(str(first["loc"][0]))
        raise ApiError(400, f"{place}: {first['msg']}", param=place) from error


class _MediaLeftOutError(InvalidRequestError):
    """There was no room in the context for an image, a video or audio."""

    def __init__(self) -> None:
        super().__init__(
            "input: even the latest items have more images, videos and audio clips than the model's context, "
            "--max-media-items and --limit-mm-per-prompt allow; send fewer or smaller ones",
            "input",
        )


def _plan_what_fits(
    items: Sequence[InputItem], plan: Callable[[Sequence[InputItem]], Plan]
) -> tuple[Plan, Sequence[InputItem]]:
    """Return the plan with as many of the latest items as fit into the context, and these items."""
    try:
        return plan(items), items
    except (ContextLengthError, _MediaLeftOutError):
        cuts = _cuts(items)
        if not cuts:
            raise
        kept = _shortened(items, cuts[-1])
        fitting = plan(kept)
    first, last = 0, len(cuts) - 1
    while first < last:
        middle = (first + last) // 2
        longer = _shortened(items, cuts[middle])
        try:
            fitting, kept = plan(longer), longer
            last = middle
        except (ContextLengthError, _MediaLeftOutError):
            first = middle + 1
    return fitting, kept


class _Cut(NamedTuple):
    """A place before which older items are left out, except system messages and one of the user."""

    begin: int
    """Index of the first item after it."""
    asked: int | None
    """Index of the message of the user to which the next items belong; None if they begin with one."""


def _cuts(items: Sequence[InputItem]) -> list[_Cut]:
    """Return the places before which items may be left out, in the order of the conversation.

    A turn begins with a message of the user. Because turns of agents are long, the first calls of a turn may be left
    out with their results while the rest of the turn stays. No result stays without its call.
    """
    system = _system_items(items)
    results = {item.call_id: index for index, item in enumerate(items) if isinstance(item, ToolOutputItem)}
    cuts = []
    asked: int | None = None
    last_result = -1  # of the calls so far
    for index, item in enumerate(items):
        if index > system and index > last_result:
            if _is_asked(item):
                cuts.append(_Cut(index, None))
            elif isinstance(items[index - 1], ToolOutputItem | McpCallItem) and not isinstance(item, ToolOutputItem):
                cuts.append(_Cut(index, asked))
        if _is_asked(item):
            asked = index
        elif not isinstance(item, ToolOutputItem):
            last_result = max(last_result, results.get(getattr(item, "call_id", ""), -1))
    return cuts


def _shortened(items: Sequence[InputItem], cut: _Cut) -> Sequence[InputItem]:
    asked = [] if cut.asked is None else [items[cut.asked]]
    return [*items[: _system_items(items)], *asked, *items[cut.begin :]]


def _system_items(items: Sequence[InputItem]) -> int:
    """Return the number of system messages at the beginning of the conversation."""
    return next((index for index, item in enumerate(items) if not _is_system(item)), len(items))


def _is_asked(item: InputItem) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _is_system(item: InputItem) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _in_client_fields(text: str) -> str:
    """Return a text in which the name of a chat's field at its beginning is replaced by the name in a response.

    Other words stay, because they may be the client's own.
    """
    if found := _FUNCTION.match(text):
        return found[1] + text[found.end() :]
    found = _CHAT_FIELD.match(text)
    return _client_field(found) + text[found.end() :] if found else text


def _client_field(found: re.Match[str]) -> str:
    return _CLIENT_FIELDS[found[0]]

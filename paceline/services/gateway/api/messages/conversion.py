"""Converts bodies of the Messages API to bodies of chats. Pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.messages.blocks import (
    AssistantBlock,
    ImageBlock,
    Marked,
    ShownBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UnreadBlock,
    UrlSource,
    UserBlock,
)
from paceline.services.gateway.api.messages.schemas import (
    CountRequest,
    MessagesRequest,
    SystemMessage,
    Tool,
)
from paceline.services.gateway.planning.answer_format import AnswerFormat, JsonSchemaFormat
from paceline.services.gateway.planning.answers.registry import AnswerForms
from paceline.services.gateway.planning.chat_schemas import ChatMessage, ContentPart, TextPart
from paceline.services.gateway.planning.media.parts import MediaPart, data_url, name_places
from paceline.services.gateway.planning.request_body import CacheControl
from paceline.services.gateway.planning.schemas import ChatFields, ChatRequest
from paceline.services.gateway.planning.tool_schemas import (
    AnyCall,
    Function,
    FunctionCall,
    NamedFunction,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolDefinition,
)

Json = dict[str, Any]

_BILLING = re.compile(r"x-anthropic-billing-header[^\n]*\n*")
"""A line that Claude Code puts before its instructions, and that is removed. The line changes with each request, so
prompts with the line would never begin alike and never be found in the cache."""


def chat_fields(body: CountRequest) -> ChatFields:
    """Return the conversation of a request as fields of a chat. Raises InvalidRequestError if it cannot be answered."""
    return ChatFields(**_prompt_fields(body))


def chat_request(body: MessagesRequest, forms: AnswerForms) -> ChatRequest:
    """Return the chat request that asks for the same answer.

    Args:
        forms: how the model writes. Without a form of reasoning, the request's budget for thinking is left out.

    Raises:
        InvalidRequestError: the conversation cannot be answered.
        ApiError: the tools, or the choice among them, contradict each other.
    """
    parallel = body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use
    return ChatRequest(
        **_prompt_fields(body),
        tool_choice=_tool_choice(body),
        parallel_tool_calls=parallel,
        thinking_token_budget=_budget(body) if forms.thought is not None else None,
        response_format=_response_format(body),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        cache_salt=body.cache_salt,
        priority=body.priority,
        stream=body.stream,
    )


def _prompt_fields(body: CountRequest) -> Json:
    """Return the values of the fields of `ChatFields` for a conversation."""
    messages = list(_messages(body))
    continues = body.messages[-1].role == "assistant"
    if continues and messages[-1].tool_calls:
        message = "messages: the last message holds tool_use; add a message with the tool_result"
        raise InvalidRequestError(message, "messages")
    effort = body.output_config.effort if body.output_config is not None else None
    switches = {}
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        effort = effort if thinks else "none"
        switches = {"enable_thinking": thinks, "thinking": thinks}
    return {
        "messages": messages,
        "continue_final_message": continues,
        "tools": [_tool(tool) for tool in body.tools or () if tool.is_custom] or None,
        "reasoning_effort": effort,
        "mm_processor_kwargs": body.mm_processor_kwargs,
        "cache_control": body.cache_control,
        "chat_template_kwargs": {**switches, **(body.chat_template_kwargs or {})} or None,
    }


def _messages(body: CountRequest) -> Iterator[ChatMessage]:
    """Yield the chat messages of a conversation. As in Anthropic's API, neighbours of one role are joined."""
    system = [] if body.system is None else [SystemMessage(role="system", content=body.system)]
    for role, neighbours in itertools.groupby([*system, *body.messages], key=lambda message: message.role):
        blocks = [block for message in neighbours for block in _blocks(message.content)]
        if role == "system":
            yield from _system(blocks)
        elif role == "user":
            yield from _user(blocks)
        else:
            yield _assistant(blocks)


def _blocks(content: str | Sequence[Any]) -> Sequence[Any]:
    return [TextBlock(type="text", text=content)] if isinstance(content, str) else content


def _system(blocks: Sequence[TextBlock]) -> Iterator[ChatMessage]:
    texts = [_BILLING.sub("", block.text, count=1) if _BILLING.match(block.text) else block.text for block in blocks]
    if text := "\n\n".join(filter(None, texts)):
        yield ChatMessage(role="system", content=text, cache_control=_last_mark(blocks))


def _user(blocks: Sequence[UserBlock]) -> Iterator[ChatMessage]:
    """Yield a message for each tool result, then one for all other blocks. Results must follow their calls at once."""
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            mark = _last_mark([block, *_blocks(block.content or "")])
            yield ChatMessage.of_blocks("tool", _result(block), tool_call_id=block.tool_use_id, cache_control=mark)
    shown = [_part(block) for block in blocks if isinstance(block, ShownBlock)]
    if shown or not blocks:
        mark = _last_mark([block for block in blocks if isinstance(block, ImageBlock)])
        yield ChatMessage.of_blocks("user", shown, cache_control=mark)


def _part(block: ShownBlock | UnreadBlock) -> ContentPart:
    if isinstance(block, ImageBlock):
        source = block.source
        url = source.url if isinstance(source, UrlSource) else data_url(source.media_type, source.data)
        part = MediaPart.model_validate({"type": "image_url", "image_url": url})
        name_places(part, block.place)
        return part
    return TextPart(type="text", text=block.text, cache_control=block.cache_control)


def _result(block: ToolResultBlock) -> list[ContentPart]:
    parts = [_part(part) for part in _blocks(block.content or "")]
    first = parts[0] if parts else None
    if block.is_error:
        begin = first.text if isinstance(first, TextPart) else ""
        parts = [TextPart(type="text", text=f"Error: {begin}"), *parts[isinstance(first, TextPart) :]]
    return parts


def _assistant(blocks: Sequence[AssistantBlock]) -> ChatMessage:
    calls: list[AnyCall] = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=block.input))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    message = ChatMessage(
        role="assistant",
        content="\n".join(block.text for block in blocks if isinstance(block, TextBlock)),
        tool_calls=calls or None,
        cache_control=_last_mark(blocks),
    )
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    return message.model_copy(update={"reasoning": "\n".join(thoughts)}) if any(thoughts) else message


def _tool(tool: Tool) -> ToolDefinition:
    assert tool.name is not None  # Tool checks it
    function = Function(name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict)
    return ToolDefinition(function=function, cache_control=tool.cache_control)


def _last_mark(blocks: Sequence[object]) -> CacheControl | None:
    """Return the last cache breakpoint of these blocks; None if they have none."""
    marks = (block.cache_control for block in reversed(blocks) if isinstance(block, Marked))
    return next((mark for mark in marks if mark is not None), None)


def _tool_choice(body: MessagesRequest) -> ToolChoice | None:
    choice = body.tool_choice
    if choice is None or (choice.type == "auto"):
        return None  # auto if there are tools
    if choice.type == "tool":
        return NamedTool(function=NamedFunction(name=choice.name or ""))
    return "required" if choice.type == "any" else "none"


def _budget(body: MessagesRequest) -> int | None:
    if body.thinking is None:
        return None
    return 0 if body.thinking.type == "disabled" else body.thinking.budget_tokens


def _response_format(body: MessagesRequest) -> AnswerFormat | None:
    wanted = (body.output_config.format if body.output_config is not None else None) or body.output_format
    if wanted is None:
        return None
    return AnswerFormat(type="json_schema", json_schema=JsonSchemaFormat(name="answer", schema=wanted.schema_))

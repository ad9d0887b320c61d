"""The items of a conversation, as clients send them."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.responses.conversation import ConversationItem, Messages
from paceline.services.gateway.api.responses.tool_items import (
    AgentCallItem,
    AgentOutputItem,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    McpCallItem,
)
from paceline.services.gateway.planning.chat_schemas import ContentPart, TextPart
from paceline.services.gateway.planning.media.parts import MediaPart
from paceline.services.gateway.planning.request_body import Body

Json = dict[str, Any]

_SEALED = "paceline.1."
"""Prefix of this server's `encrypted_content`. After it comes the reasoning itself in base64."""


def seal(text: str) -> str:
    """Return reasoning as the `encrypted_content` of an item, for clients that send no other reasoning back."""
    return _SEALED + base64.b64encode(text.encode()).decode()


def _unseal(content: str) -> str:
    """Return the reasoning in an `encrypted_content`; "" if it comes from another server."""
    try:
        return (
            base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
            if content.startswith(_SEALED)
            else ""
        )
    except (binascii.Error, UnicodeDecodeError):
        return ""


class MessageItem(ConversationItem):
    """A message of any role. Its `type` may be missing."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ContentPart]

    def add_to(self, messages: Messages) -> None:
        parts = [] if isinstance(self.content, str) else self.content
        if self.role == "user":
            messages.add(self.role, self.content)
        elif media := next((part for part in parts if isinstance(part, MediaPart)), None):
            message = f"{media.place}: a message of the role {self.role!r} can have text alone"
            raise InvalidRequestError(message, media.place)
        elif self.role == "assistant":
            messages.add_text("content", self.content)
        else:
            messages.add(self.role, self.content)

    def stored(self, new_id: str) -> Json:
        texts = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        fields = {"type": "message", "role": self.role, "status": "completed"}
        return {"id": self.id or f"msg_{new_id}", **fields, "content": [self._stored_part(part) for part in texts]}

    def _stored_part(self, part: ContentPart) -> Json:
        if isinstance(part, MediaPart):
            return part.stored()
        if part.type == "refusal":
            return {"type": "refusal", "refusal": part.text}
        if self.role == "assistant":
            return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}
        return {"type": "input_text", "text": part.text}


class ReasoningText(Body):
    type: str = "reasoning_text"
    text: str


class ReasoningItem(ConversationItem):
    """Reasoning of the model. Its summary is used only if the reasoning itself is missing."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None

    def add_to(self, messages: Messages) -> None:
        text = "\n".join(part.text for part in self.content or ()) or _unseal(self.encrypted_content or "")
        if text := text or "\n".join(part.text for part in self.summary):
            messages.add_text("reasoning", text)


class ReferenceItem(ConversationItem):
    """A reference to an item of a stored response, by id. The item replaces the reference before messages are made."""

    type: Literal["item_reference"] = "item_reference"
    id: str

    def add_to(self, messages: Messages) -> None:
        raise AssertionError("references are resolved first")


class OtherItem(ConversationItem):
    """An item without content, of a tool that this server does not have. The model does not see this item."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    type: str
    tools: list[Json] | None = None
    """Definitions of further tools, which the items `additional_tools` and `tool_search_output` hold."""

    def add_to(self, messages: Messages) -> None:
        pass


_KINDS = {
    "message": "message",
    "reasoning": "reasoning",
    "function_call": "function_call",
    "custom_tool_call": "custom_tool_call",
    "item_reference": "item_reference",
    "mcp_call": "mcp_call",
    "computer_call": "agent_call",
    "shell_call": "agent_call",
    "local_shell_call": "agent_call",
    "apply_patch_call": "agent_call",
    "function_call_output": "output",
    "custom_tool_call_output": "output",
    "computer_call_output": "output",
    "apply_patch_call_output": "agent_output",
    "shell_call_output": "agent_output",
    "local_shell_call_output": "agent_output",
}
"""Types of items, each with the tag of the class that reads it."""
_CONTENT = frozenset({"content", "text", "image_url", "input_audio"})
"""Fields that the model must see. An item of an unknown type with such a field is refused as a wrong message."""


def _kind_of(data: Any) -> str:
    if isinstance(data, ConversationItem):
        kind = str(getattr(data, "type", ""))
    elif not isinstance(data, dict):
        return "message"
    elif data.get("type") is None:
        kind = "item_reference" if "id" in data and not data.keys() & {"role", "content"} else "message"
    else:
        kind = str(data["type"])
    if kind in _KINDS:
        return _KINDS[kind]
    return "message" if isinstance(data, dict) and data.keys() & _CONTENT else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[AgentCallItem, Tag("agent_call")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[AgentOutputItem, Tag("agent_output")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of),
]

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def read_items(stored: Sequence[Json]) -> list[InputItem]:
    """Return the items from their stored JSON."""
    return _ITEMS.validate_python(list(stored))

"""The items of a conversation, as clients send them, and the chat messages that they become."""

from __future__ import annotations

import base64
import binascii
import json
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, field_validator

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.answer_format import Body
from paceline.services.gateway.chat_schemas import ContentPart, TextPart, kind_of_part, text_of
from paceline.services.gateway.media.parts import MediaPart

Json = dict[str, Any]

_SEALED = "paceline.1."
"""The beginning of our `encrypted_content`, which is the reasoning itself in base64."""


def seal(text: str) -> str:
    """Return reasoning as the `encrypted_content` of an item, for clients that send nothing else back."""
    return _SEALED + base64.b64encode(text.encode()).decode()


def _unseal(content: str) -> str:
    """Return the reasoning in an `encrypted_content`; "" if another server wrote it."""
    try:
        return (
            base64.b64decode(content.removeprefix(_SEALED), validate=True).decode()
            if content.startswith(_SEALED)
            else ""
        )
    except (binascii.Error, UnicodeDecodeError):
        return ""


class ToolNames(Protocol):
    """The names by which the model knows tools."""

    def name_for_model(self, name: str, namespace: str | None) -> str: ...


class Messages:
    """A list of chat messages that grows by items. The model's items between two others are one message."""

    def __init__(self, instructions: str | None, names: ToolNames) -> None:
        self.names = names
        self.messages: list[Json] = []
        if instructions:
            self.add("system", instructions)

    def add(self, role: str, content: str | list[ContentPart], **fields: Any) -> None:
        """Add a message. System messages at the beginning are joined into one."""
        if role in ("system", "developer"):
            role = "system"
            if isinstance(content, str) and len(self.messages) == 1 and self.messages[0]["role"] == "system":
                self.messages[0]["content"] += f"\n\n{content}"
                return
        self.messages.append({"role": role, "content": content, **fields})

    def answer(self) -> Json:
        """Return the message of the model that is being read."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add("assistant", "")
        return self.messages[-1]

    def add_text(self, field: Literal["content", "reasoning"], text: str) -> None:
        """Add text to the model's message."""
        message = self.answer()
        message[field] = f"{message[field]}\n\n{text}" if message.get(field) else text

    def add_call(self, call_id: str, name: str, namespace: str | None, arguments: str) -> None:
        """Add a tool call to the model's message."""
        function = {"name": self.names.name_for_model(name, namespace), "arguments": arguments}
        self.answer().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})


class Item(Body):
    """The base of items."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    id: str | None = None

    @abstractmethod
    def add_to(self, messages: Messages) -> None:
        """Add what the model shall see."""

    def stored(self, new_id: str) -> Json:
        """Return the item as OpenAI lists it, with a new id if it has none."""
        fields = self.model_dump(exclude_none=True)
        return {"id": self.id or f"{id_prefix(fields['type'])}_{new_id}", **fields}


class MessageItem(Item):
    """A message. `type` may be missing."""

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
            messages.add_text("content", text_of(self.content))
        else:
            messages.add(self.role, text_of(self.content))

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


class ReasoningItem(Item):
    """Reasoning of the model. Its summary counts only if the reasoning itself is missing."""

    type: Literal["reasoning"]
    summary: list[ReasoningText] = Field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None

    def add_to(self, messages: Messages) -> None:
        text = "\n".join(part.text for part in self.content or ()) or _unseal(self.encrypted_content or "")
        if text := text or "\n".join(part.text for part in self.summary):
            messages.add_text("reasoning", text)


class FunctionCallItem(Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None
    arguments: str

    def add_to(self, messages: Messages) -> None:
        messages.add_call(self.call_id, self.name, self.namespace, self.arguments)


class CustomCallItem(Item):
    """A call of a tool that takes a text."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None
    input: str

    def add_to(self, messages: Messages) -> None:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        messages.add_call(self.call_id, self.name, self.namespace, arguments)


class ComputerCallItem(Item):
    """A call of a computer's tool: what to do with mouse and keyboard."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    type: Literal["computer_call"]
    call_id: str
    action: Json | None = None
    actions: list[Json] | None = None

    def add_to(self, messages: Messages) -> None:
        arguments = {"actions": self.actions or []} if self.action is None else self.action
        messages.add_call(self.call_id, "computer", None, json.dumps(arguments, ensure_ascii=False))


class UnreadPart(Body):
    """A document in a tool's output. The model sees a note in its place, because an agent cannot know what comes."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    type: Literal["input_file"]

    def for_message(self) -> TextPart:
        return TextPart(type="text", text=f"[{self.type}: this model takes no documents]")


def _kind_of_output(data: Any) -> str:
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "unread part" if kind == "input_file" else kind_of_part(data)


OutputPart = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[MediaPart, Tag("media part")]
    | Annotated[UnreadPart, Tag("unread part")],
    Discriminator(_kind_of_output),
]


class CallOutputItem(Item):
    """What a tool returned. It may be one image, such as a computer's screenshot."""

    type: Literal["function_call_output", "custom_tool_call_output", "computer_call_output"]
    call_id: str
    output: str | list[OutputPart] | Json

    @field_validator("output", mode="before")
    @classmethod
    def _read_image(cls, given: Any) -> Any:
        is_image = isinstance(given, dict) and given.get("type") in ("computer_screenshot", "input_image")
        return [{**given, "type": "input_image"}] if is_image else given

    def add_to(self, messages: Messages) -> None:
        if isinstance(self.output, dict):
            content: str | list[ContentPart] = json.dumps(self.output, ensure_ascii=False)
        elif isinstance(self.output, list):
            content = [part.for_message() if isinstance(part, UnreadPart) else part for part in self.output]
        else:
            content = self.output
        messages.add("tool", content, tool_call_id=self.call_id)

    def stored(self, new_id: str) -> Json:
        fields = super().stored(new_id)
        match self.type, self.output:
            case "computer_call_output", [MediaPart() as screenshot]:
                fields["output"] = {**screenshot.stored(), "type": "computer_screenshot"}
        return fields


class ReferenceItem(Item):
    """The id of an item of a stored response. Such items are replaced before messages are made."""

    type: Literal["item_reference"] = "item_reference"
    id: str

    def add_to(self, messages: Messages) -> None:
        raise AssertionError("references are resolved first")


class OtherItem(Item):
    """An item of a tool that this server does not have, without content. The model does not see it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    type: str
    tools: list[Json] | None = None
    """Definitions of further tools, which the items `additional_tools` and `tool_search_output` hold."""

    def add_to(self, messages: Messages) -> None:
        pass


_KINDS = frozenset(
    {
        "message",
        "reasoning",
        "function_call",
        "custom_tool_call",
        "computer_call",
        "item_reference",
    }
)
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "computer_call_output")
_CONTENT = frozenset({"content", "text", "image_url", "input_audio"})
"""Fields that the model must see. An item of an unknown kind that has one is refused as a wrong message."""


def _kind_of(data: Any) -> str:
    if isinstance(data, Item):
        kind = str(getattr(data, "type", ""))
    elif not isinstance(data, dict):
        return "message"
    elif data.get("type") is None:
        kind = "item_reference" if "id" in data and not data.keys() & {"role", "content"} else "message"
    else:
        kind = str(data["type"])
    if kind in _OUTPUTS:
        return "output"
    if kind in _KINDS:
        return kind
    return "message" if isinstance(data, dict) and data.keys() & _CONTENT else "other"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[ComputerCallItem, Tag("computer_call")]
    | Annotated[CallOutputItem, Tag("output")]
    | Annotated[ReferenceItem, Tag("item_reference")]
    | Annotated[OtherItem, Tag("other")],
    Discriminator(_kind_of),
]

_ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def read_items(stored: Sequence[Json]) -> list[InputItem]:
    """Return the items of stored JSON."""
    return _ITEMS.validate_python(list(stored))


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
    "computer_call": "cu",
    "computer_call_output": "cuo",
}


def id_prefix(kind: str) -> str:
    """Return the beginning of the ids of items of a kind."""
    return _PREFIXES.get(kind, "item")

"""The messages of a conversation's body."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, PrivateAttr, Tag, model_validator
from pydantic_core import PydanticCustomError

from paceline.services.gateway.planning.media.parts import MEDIA_TYPES, MediaPart
from paceline.services.gateway.planning.request_body import Body, CacheControl
from paceline.services.gateway.planning.tool_schemas import AnyCall, call_for_template

Json = dict[str, Any]

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Types of parts of a message's content that are texts, and the name of the field with the text."""


_OWN_FIELDS = frozenset({*_TEXT_PARTS.values(), "annotations", "logprobs", "signature"})
"""Fields of text parts that are never passed to a chat template."""


class TextPart(Body):
    """A text part of a message's content. All types of texts are read as `text`.

    Further fields are for chat templates that name them, such as the `source_lang_code` of TranslateGemma.
    """

    model_config = ConfigDict(extra="allow", json_schema_extra=lambda schema: _as_clients_write(schema))

    type: str
    text: str
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_kind(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"type": "text", "text": data}
        if not isinstance(data, dict) or "type" not in data:
            return data
        kind = data["type"]
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            message = "content of type {kind} is not supported; send text, images, videos or audio"
            raise PydanticCustomError("unsupported", message, {"kind": repr(kind)[:80]})
        field = _TEXT_PARTS[kind]
        return {**data, "text": data[field]} if field in data else data

    @property
    def further_fields(self) -> Json:
        """The part's further fields, which a chat template may name."""
        return {name: value for name, value in (self.model_extra or {}).items() if name not in _OWN_FIELDS}

    def for_template(self) -> Json:
        return {**self.further_fields, "type": "text", "text": self.text}


def kind_of_part(data: Any) -> str:
    """Return the tag that tells text from media among a message's parts. It is no field's name, for clear errors."""
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "media part" if isinstance(kind, str) and kind in MEDIA_TYPES else "text part"


ContentPart = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[MediaPart, Tag("media part")], Discriminator(kind_of_part)
]


def text_of(content: str | Sequence[ContentPart]) -> str:
    """Return the texts of a message's content, joined by newlines."""
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _with_joined_texts(parts: Sequence[ContentPart]) -> list[ContentPart]:
    joined: list[ContentPart] = []
    for is_text, group in itertools.groupby(parts, key=lambda part: isinstance(part, TextPart)):
        neighbours = list(group)
        joined += [TextPart(type="text", text=text_of(neighbours))] if is_text else neighbours
    return joined


def _as_clients_write(schema: Json) -> None:
    """Change the JSON schema of TextPart into the schema of what clients send: a string, or a part of each type."""
    about = {key: schema.pop(key) for key in tuple(schema)}
    text = {"type": "string"}
    kinds = [
        {"type": "object", "properties": {"type": {"const": kind}, name: text}, "required": ["type", name]}
        for kind, name in _TEXT_PARTS.items()
    ]
    schema |= {"anyOf": [text, *kinds], "title": about["title"], "description": about["description"]}


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatMessage(Body):
    """One message of a conversation. Fields that are unknown here are passed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    role: str = Field(min_length=1)
    content: str | list[ContentPart] | None = None
    tool_calls: list[AnyCall] | None = None
    tool_call_id: str | None = None
    cache_control: CacheControl | None = None
    """A cache breakpoint at the end of the content; None if there is none."""
    _joins_texts: bool = PrivateAttr(False)

    @staticmethod
    def of_blocks(role: str, blocks: list[ContentPart], **fields: Any) -> ChatMessage:
        """Return a message of content blocks, with neighbouring texts joined by newlines.

        Clients of the Messages API write paragraphs as blocks. Most chat templates would join these without a space.
        """
        message = ChatMessage(role=role, content=blocks, **fields)
        message._joins_texts = True
        return message

    @model_validator(mode="before")
    @classmethod
    def _check_kinds(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("audio"):
            raise PydanticCustomError("unsupported", "messages with audio are not supported by this server")
        return data

    @property
    def text(self) -> str | None:
        """The content as one text; None if there is no content."""
        return None if self.content is None else text_of(self.content)

    @property
    def media(self) -> list[MediaPart]:
        """The images, videos and audio in the content."""
        return [part for part in self.content if isinstance(part, MediaPart)] if isinstance(self.content, list) else []

    @property
    def part_fields(self) -> set[str]:
        """The names of all further fields of the message's text parts."""
        parts = self.content if isinstance(self.content, list) else []
        return {name for part in parts if isinstance(part, TextPart) for name in part.further_fields}

    @property
    def written_arguments(self) -> list[str]:
        """The arguments of the message's tool calls, if they are texts, which `for_template` will read as JSON."""
        given = [call.function.arguments for call in self.tool_calls or ()]
        return [arguments for arguments in given if isinstance(arguments, str)]

    def for_template(self, takes_parts: bool) -> Json:
        """Return the message as a chat template reads it.

        Args:
            takes_parts: whether the template reads lists of texts. If not, texts are joined, unless there are media.
        """
        content: object = self.text
        if isinstance(self.content, list) and (self.media or (takes_parts and not self._joins_texts)):
            parts = _with_joined_texts(self.content) if self._joins_texts else self.content
            content = [part.for_template() for part in parts]
        message = {"role": self.role, "content": content, **(self.model_extra or {})}
        if self.tool_calls:
            message["tool_calls"] = [call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

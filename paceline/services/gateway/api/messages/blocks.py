"""The blocks of messages in Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.services.gateway.planning.media.parts import Placed
from paceline.services.gateway.planning.request_body import Body, CacheControl

Json = dict[str, Any]

HostedToolKind: TypeAlias = Literal[
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "advisor_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "container_upload",
]


class Marked(Body):
    """Base class of blocks and tools that may have a cache breakpoint at their end."""

    cache_control: CacheControl | None = None


class TextBlock(Marked):
    type: Literal["text"]
    text: str


class ThinkingBlock(Body):
    """Reasoning of an earlier answer. Its signature is ignored, because this server makes no signatures."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Encrypted reasoning of an earlier answer, which this server cannot read and the model does not see."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Marked):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: Json = Field(default_factory=dict)


class Base64Source(Body):
    type: Literal["base64"]
    media_type: str = "image/*"
    """Ignored: the data itself tells its format."""
    data: str


class UrlSource(Body):
    type: Literal["url"]
    url: str = Field(min_length=1)


def _check_source(source: Any) -> Any:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "file":
        raise PydanticCustomError("unsupported", "this server keeps no files; send a source of type base64 or url")
    return source


class ImageBlock(Marked, Placed):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Field(discriminator="type"), BeforeValidator(_check_source)]


class SearchResultBlock(Marked):
    """A passage that a tool has found, with its title and its source."""

    type: Literal["search_result"]
    title: str
    source: str
    content: list[TextBlock]

    @property
    def text(self) -> str:
        return "\n".join([self.title, self.source, *(block.text for block in self.content)])


class DocumentBlock(Marked):
    """A document. The model sees its text; a document in a tool's result that is not text becomes a note."""

    type: Literal["document"]
    source: Json = Field(default_factory=dict)
    title: str | None = None
    context: str | None = None

    @property
    def contents(self) -> str | None:
        """The document's text; None if the document is not text."""
        match self.source:
            case {"type": "text", "data": str(text)} | {"type": "content", "content": str(text)}:
                return text
            case {"type": "content", "content": [*blocks]}:
                texts = [block.get("text") for block in blocks if isinstance(block, dict)]
                found = [text for text in texts if isinstance(text, str)]
                return "\n".join(found) if len(found) == len(blocks) else None
        return None

    @property
    def text(self) -> str:
        own = "[document: this server reads only text]" if self.contents is None else self.contents
        return "\n".join(filter(None, [self.title, self.context, own]))


class ReadableDocument(DocumentBlock):
    """A document in a message of the user."""

    @model_validator(mode="after")
    def _check_source(self) -> ReadableDocument:
        if self.contents is None:
            message = "this server reads only documents of text; send a source of type text or content, with texts"
            raise PydanticCustomError("unsupported", message)
        return self


ShownBlock: TypeAlias = TextBlock | ImageBlock | SearchResultBlock | DocumentBlock
"""The blocks of a user's message, and of a tool's result, that the model can see."""


class UnreadBlock(Marked):
    """A part of a tool's result that this server does not read. The model sees a note in its place."""

    type: Literal["tool_reference"]

    @property
    def text(self) -> str:
        return f"[{self.type}: this server searches no tools]"


class HostedToolBlock(Body):
    """A call of a tool that Anthropic's servers run, or its result. The model does not see this block."""

    type: HostedToolKind


def _of_type(*kinds: str) -> BeforeValidator:
    """Return a check that a content block has one of these types, or belongs to a hosted tool.

    The error of the check says which types this API supports.
    """

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in (*kinds, *get_args(HostedToolKind)):
            message = "content of type {kind} is not supported here; send {kinds}"
            raise PydanticCustomError("unsupported", message, {"kind": repr(kind)[:80], "kinds": " or ".join(kinds)})
        return block

    return BeforeValidator(check)


_BY_TYPE = Field(discriminator="type")

ResultBlock: TypeAlias = Annotated[TextBlock | ImageBlock | SearchResultBlock | DocumentBlock | UnreadBlock, _BY_TYPE]


class ToolResultBlock(Marked):
    """The result of a tool call, in a message of the user."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: str | list[ResultBlock] | None = None
    is_error: bool | None = None


UserBlock: TypeAlias = Annotated[
    TextBlock | ImageBlock | SearchResultBlock | ReadableDocument | ToolResultBlock | HostedToolBlock,
    _BY_TYPE,
    _of_type("text", "image", "search_result", "document", "tool_result"),
]
AssistantBlock: TypeAlias = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | HostedToolBlock,
    _BY_TYPE,
    _of_type("text", "thinking", "redacted_thinking", "tool_use"),
]

"""The items of tools: calls by the model, and the results of calls."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from paceline.services.gateway.api.responses.conversation import ConversationItem, Messages
from paceline.services.gateway.planning.chat_schemas import ContentPart, TextPart, kind_of_part
from paceline.services.gateway.planning.media.parts import MediaPart
from paceline.services.gateway.planning.request_body import Body

Json = dict[str, Any]

_KEEPING = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
"""Fields that are not read here are stored, too."""


class NamedCallItem(ConversationItem):
    """The base of calls of tools that the client has defined."""

    call_id: str
    name: str = Field(min_length=1)
    namespace: str | None = None


class FunctionCallItem(NamedCallItem):
    """A call of a function by the model."""

    type: Literal["function_call"]
    arguments: str

    def add_to(self, messages: Messages) -> None:
        messages.add_call(self.call_id, self.name, self.namespace, self.arguments)


class CustomCallItem(NamedCallItem):
    """A call of a custom tool by the model. Its input is a text."""

    type: Literal["custom_tool_call"]
    input: str

    def add_to(self, messages: Messages) -> None:
        arguments = json.dumps({"input": self.input}, ensure_ascii=False)
        messages.add_call(self.call_id, self.name, self.namespace, arguments)


class AgentCallItem(ConversationItem):
    """A call of one of OpenAI's tools that run at the client: a computer, a shell or edits of files.

    Its result is an item of its own.
    """

    model_config = _KEEPING

    type: Literal["computer_call", "shell_call", "local_shell_call", "apply_patch_call"]
    call_id: str
    action: Json | None = None
    actions: list[Json] | None = None
    operation: Json | None = None

    def add_to(self, messages: Messages) -> None:
        arguments = self.action or self.operation or {"actions": self.actions or []}
        name = self.type.removesuffix("_call")
        messages.add_call(self.call_id, name, None, json.dumps(arguments, ensure_ascii=False))


class McpCallItem(ConversationItem):
    """A call of a tool on an MCP server, with its result."""

    model_config = _KEEPING

    type: Literal["mcp_call"]
    id: str
    name: str = Field(min_length=1)
    server_label: str
    arguments: str
    output: str | None = None
    error: Any = None

    def add_to(self, messages: Messages) -> None:
        messages.add_call(self.id, self.name, self.server_label, self.arguments)
        failure = None if self.error is None else f"Error: {json.dumps(self.error, ensure_ascii=False)}"
        messages.add("tool", self.output or failure or "", tool_call_id=self.id)


class UnreadPart(Body):
    """A document in a tool's output. The model sees a note instead, because agents cannot know what tools return."""

    model_config = _KEEPING

    type: Literal["input_file"]

    def for_message(self) -> TextPart:
        return TextPart(type="text", text="[document: this server reads only text]")


def _kind_of_output(data: Any) -> str:
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "unread part" if kind == "input_file" else kind_of_part(data)


OutputPart = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[MediaPart, Tag("media part")]
    | Annotated[UnreadPart, Tag("unread part")],
    Discriminator(_kind_of_output),
]


class ToolOutputItem(ConversationItem):
    """The base class of results of tools."""

    call_id: str
    """The id of the call that had this result."""


class CallOutputItem(ToolOutputItem):
    """The result of a tool: text, parts, or one image, such as a computer's screenshot."""

    type: Literal["function_call_output", "custom_tool_call_output", "computer_call_output"]
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


class AgentOutputItem(ToolOutputItem):
    """The result of one of OpenAI's tools: text, or the output and the end of each command of a shell."""

    model_config = _KEEPING

    type: Literal["shell_call_output", "local_shell_call_output", "apply_patch_call_output"]
    output: str | list[Json] | None = None
    status: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_call(cls, data: Any) -> Any:
        # A local_shell_call_output has the id of the call as its own.
        return {"call_id": data.get("id"), **data} if isinstance(data, dict) else data

    def add_to(self, messages: Messages) -> None:
        text = json.dumps(self.output, ensure_ascii=False) if isinstance(self.output, list) else self.output
        messages.add("tool", text or self.status or "", tool_call_id=self.call_id)

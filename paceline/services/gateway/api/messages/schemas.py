"""The bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.services.gateway.api.messages.blocks import AssistantBlock, Marked, TextBlock, UserBlock
from paceline.services.gateway.planning.chat_schemas import ReasoningEffort
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.planning.request_body import Body, CacheControl, NamedRequest, warn_of_hosted_tools
from paceline.services.gateway.planning.schemas import StopString

Json = dict[str, Any]


class UserMessage(Body):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantMessage(Body):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]


class SystemMessage(Body):
    """A system message within the conversation."""

    role: Literal["system"]
    content: str | list[TextBlock]


Message: TypeAlias = Annotated[UserMessage | AssistantMessage | SystemMessage, Field(discriminator="role")]


class Tool(Marked):
    """An entry of `tools`: a tool that the client defines, or one that Anthropic hosts or defines."""

    type: str | None = None
    """ "custom" or None for a tool that the client defines; otherwise the type of Anthropic's tool."""
    name: str | None = Field(None, min_length=1, max_length=256)
    description: str | None = None
    input_schema: Json | None = None
    strict: bool | None = None

    @property
    def is_custom(self) -> bool:
        """Whether the client defines the tool, so that the request has the schema of its input."""
        return self.type in (None, "custom")

    @model_validator(mode="after")
    def _check_fields(self) -> Tool:
        if self.is_custom and (self.name is None or self.input_schema is None):
            raise PydanticCustomError("missing", "a tool needs a name and an input_schema")
        return self


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if self.type == "tool" and self.name is None:
            raise PydanticCustomError("missing", "a choice of type 'tool' needs the name of the tool")
        return self


class Thinking(Body):
    """The client's wishes for the model's reasoning."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=0)
    """Largest number of tokens of reasoning. Ignored for models without reasoning."""
    display: Literal["summarized", "omitted"] | None = None
    """ "omitted" leaves the text of thinking blocks empty; otherwise blocks have the whole reasoning."""


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Json = Field(alias="schema")


class OutputConfig(Body):
    effort: ReasoningEffort | None = None
    format: OutputFormat | None = None


class CountRequest(NamedRequest):
    """The body of POST /v1/messages/count_tokens: the fields that make the prompt."""

    messages: Annotated[list[Message], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name for the field `format` of `output_config`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further names for the model's chat template; vLLM's field."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Options of the model's preprocessing of media; vLLM's field."""
    cache_control: CacheControl | None = None
    """A cache breakpoint at the end of the prompt. Prompts are cached without it, too: a breakpoint is a hint."""
    context_management: Any = None
    """Ignored: the model sees the whole conversation."""

    @model_validator(mode="after")
    def _check_count(self) -> CountRequest:
        warn_of_hosted_tools(tool.type or "" for tool in self.tools or () if not tool.is_custom)
        name_places(self.messages, "messages")
        return self


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages: Anthropic's fields, and some of this server's fields for chats."""

    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], Field(max_length=16)] | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31)
    stream: bool = False
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    """Requests with equal salts may share cached blocks, within one key unless the operator lets keys share."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

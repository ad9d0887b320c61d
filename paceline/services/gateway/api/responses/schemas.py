"""The body of POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from paceline.services.gateway.api.responses.items import InputItem, MessageItem
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.answer_format import AnswerFormat, JsonSchemaFormat
from paceline.services.gateway.planning.chat_schemas import ReasoningEffort
from paceline.services.gateway.planning.media.parts import name_places
from paceline.services.gateway.planning.request_body import Body, warn_of_hosted_tools
from paceline.services.gateway.planning.schemas import GenerationRequest

Json = dict[str, Any]

_REFUSED = ("moderation", "prompt", "prompt_logprobs", "return_token_ids")
"""Fields that would change the answer, and are refused because they are not supported."""


class EchoedBody(Body):
    """A part of the body that the response repeats as the client sent it."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def echo(self) -> Json:
        return self.model_dump(exclude_unset=True, by_alias=True)


ToolName = Annotated[str, Field(min_length=1, max_length=120)]
"""Name of a tool or of a namespace. The model's name of a tool joins the two."""


class FunctionTool(EchoedBody):
    """A tool that the client runs; its arguments are JSON that fits the schema in `parameters`."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class CustomFormat(Body):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(EchoedBody):
    """A tool of the client whose input is a text."""

    type: Literal["custom"]
    name: ToolName
    description: str | None = None
    format: CustomFormat | None = None


def _kind_of_tool(data: Any) -> str:
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return kind if kind in ("function", "custom", "namespace") else "hosted"


ClientTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type")]


class NamespaceTool(EchoedBody):
    """A group of the client's tools."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: list[ClientTool]


class HostedTool(EchoedBody):
    """A tool that OpenAI's servers have, such as a web search. This server has none: the model is not told of it."""

    type: str


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[HostedTool, Tag("hosted")],
    Discriminator(_kind_of_tool),
]


class NamedResponseTool(EchoedBody):
    """A `tool_choice` that names one tool. Without a name, the tool is one of OpenAI's servers."""

    type: str
    name: str | None = None
    namespace: str | None = None


class AllowedTools(EchoedBody):
    """A `tool_choice` among some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedResponseTool]


def _kind_of_choice(data: Any) -> str:
    if isinstance(data, str):
        return "word"
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "allowed" if kind == "allowed_tools" else "named"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[NamedResponseTool, Tag("named")],
    Discriminator(_kind_of_choice),
]


class TextFormat(EchoedBody):
    """The format of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Json | bool | None = Field(None, alias="schema")
    strict: bool | None = None

    def for_chat(self) -> AnswerFormat:
        """Return the same format as the `response_format` of a chat."""
        schema = None
        if self.type == "json_schema":
            fields = {"name": self.name or "answer", "schema": self.schema_, "strict": self.strict}
            schema = JsonSchemaFormat.model_validate(fields)
        return AnswerFormat(type=self.type, json_schema=schema)


class TextOptions(EchoedBody):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Passed to the chat template, which may use or ignore it."""


class ReasoningOptions(EchoedBody):
    effort: ReasoningEffort | None = None
    summary: str | None = None
    """Accepted, but reasoning is never summarized: clients get all of it."""


MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]
Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]


class NamedConversation(Body):
    id: str


class ResponsesRequest(GenerationRequest):
    """The body of POST /v1/responses: OpenAI's fields, and this server's sampling parameters as for chats."""

    input: str | list[InputItem]
    instructions: str | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    max_output_tokens: int | None = Field(None, ge=1)
    max_tokens: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=-1)
    include: Annotated[list[str], Field(max_length=100)] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"
    previous_response_id: str | None = None
    conversation: str | NamedConversation | None = None
    """The conversation that the response continues. Input and output are added to the conversation afterwards."""
    store: bool = True
    background: bool = False
    metadata: Metadata = Field(default_factory=dict)
    chat_template_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None
    enable_response_messages: bool = False
    """Whether the response has `input_messages` and `output_messages`: prompt and answer as the model sees them, with
    their token ids."""
    # Accepted and repeated in the response.
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    # Sent by agents for their own servers.
    client_metadata: Any = None
    prompt_cache_options: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_refused(cls, data: Any) -> Any:
        if isinstance(data, dict) and (name := next((name for name in _REFUSED if data.get(name)), None)):
            raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
        return data

    @model_validator(mode="after")
    def _check_response(self) -> ResponsesRequest:
        if (self.n or 1) != 1:
            raise ApiError(400, "n must be 1: a response is one answer", param="n")
        if self.conversation is not None and self.previous_response_id is not None:
            message = "conversation and previous_response_id exclude each other; send one of them"
            raise ApiError(400, message, param="conversation")
        if self.background and not self.store:
            raise ApiError(400, "background needs store to be true: the response is fetched later", param="background")
        warn_of_hosted_tools(tool.type for tool in self.tools or () if isinstance(tool, HostedTool))
        name_places(self.input, "input")
        return self

    @property
    def input_items(self) -> list[InputItem]:
        """The input as a list of items. A text becomes one message of the user."""
        return self.input if isinstance(self.input, list) else [MessageItem(role="user", content=self.input)]

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation; None if the request names no conversation."""
        given = self.conversation
        return given.id if isinstance(given, NamedConversation) else given

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    @property
    def encrypts_reasoning(self) -> bool:
        return "reasoning.encrypted_content" in self.include

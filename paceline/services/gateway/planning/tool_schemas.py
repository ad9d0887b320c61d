"""The tools of a conversation's body, the choice among them, and their calls.

Custom tools, whose input is a text, are functions with one argument for the model. `CustomInput` reads the input
from the argument.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from paceline.services.gateway.planning.request_body import Body, CacheControl

Json = dict[str, Any]


class FunctionCall(Body):
    """The function of a tool call in a conversation."""

    name: str = Field(min_length=1)
    arguments: str | Json | None = None
    """The arguments as JSON text, as the API returns them, or as an object."""


class ToolCall(Body):
    """A tool call in a conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCallText(Body):
    name: str = Field(min_length=1)
    input: str


class CustomToolCall(Body):
    """A call of a custom tool in a conversation."""

    id: str | None = None
    type: Literal["custom"]
    custom: CustomCallText

    @property
    def function(self) -> FunctionCall:
        """The call of the function that stands for the tool."""
        return FunctionCall(name=self.custom.name, arguments={"input": self.custom.input})


def _kind(data: Any) -> str:
    """Return the tag of a tool, a call or a choice. It is no field's name, for clear errors."""
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return "custom tool" if kind == "custom" else "function tool"


AnyCall = Annotated[
    Annotated[ToolCall, Tag("function tool")] | Annotated[CustomToolCall, Tag("custom tool")], Discriminator(_kind)
]


class ArgumentsObject(dict[str, Any]):
    """A call's arguments for a chat template: an object that becomes its JSON text if the template adds it to a string.

    Most templates write `arguments | tojson`; others expect the JSON text of the API.
    """

    def __init__(self, values: Json, text: str) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: object) -> str:
        return f"{self}{other}"

    def __radd__(self, other: object) -> str:
        return f"{other}{self}"


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    """An entry of `tools`."""

    type: Literal["function"] = "function"
    function: Function
    cache_control: CacheControl | None = Field(None, exclude=True)

    def for_template(self) -> Json:
        return self.model_dump(exclude_none=True)


class CustomGrammar(Body):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomInputFormat(Body):
    """The form of a custom tool's input."""

    type: Literal["text", "grammar"] = "text"
    grammar: CustomGrammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> CustomInputFormat:
        if (self.type == "grammar") != (self.grammar is not None):
            raise PydanticCustomError("grammar", "a format has a grammar if, and only if, its type is grammar")
        return self


class CustomDefinition(Body):
    """A tool whose input is a text."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    format: CustomInputFormat | None = None


class CustomToolDefinition(Body):
    """An entry of `tools` whose input is a text. For the model it is a function with one argument."""

    type: Literal["custom"]
    custom: CustomDefinition
    cache_control: CacheControl | None = Field(None, exclude=True)

    @property
    def function(self) -> Function:
        """The function that stands for the tool."""
        custom = self.custom
        grammar = custom.format.grammar if custom.format is not None else None
        if grammar is None:
            return function_of_custom(custom.name, custom.description, "lark", None)
        return function_of_custom(custom.name, custom.description, grammar.syntax, grammar.definition)

    def for_template(self) -> Json:
        return ToolDefinition(function=self.function, cache_control=None).for_template()


def function_of_custom(
    name: str, description: str | None, syntax: Literal["lark", "regex"], definition: str | None
) -> Function:
    """Return the function that stands for a custom tool. Its one argument is the input.

    Args:
        definition: the grammar of the input; None if the input may be any text. A regular expression is enforced, and
            a Lark grammar is told to the model.
    """
    texts, schema = [description or ""], {"type": "string"}
    if definition is not None:
        texts.append(f"The input must follow this {syntax} grammar:\n{definition}")
        if syntax == "regex":
            schema["pattern"] = f"^(?:{definition})$"
    parameters = {
        "type": "object",
        "properties": {"input": schema},
        "required": ["input"],
        "additionalProperties": False,
    }
    # An expression that cannot be enforced is an error, because then the input could have any form.
    strict = True if "pattern" in schema else None
    told = "\n\n".join(text for text in texts if text) or None
    return Function(name=name, description=told, parameters=parameters, strict=strict)


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag("function tool")] | Annotated[CustomToolDefinition, Tag("custom tool")],
    Discriminator(_kind),
]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """A `tool_choice` that names a function."""

    type: Literal["function"] = "function"
    function: NamedFunction


class NamedCustomTool(Body):
    """A `tool_choice` that names a custom tool."""

    type: Literal["custom"]
    custom: NamedFunction

    @property
    def function(self) -> NamedFunction:
        return self.custom


AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("function tool")] | Annotated[NamedCustomTool, Tag("custom tool")], Discriminator(_kind)
]


class AllowedToolsOptions(Body):
    """The field `allowed_tools` of OpenAI's `tool_choice`."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[AnyNamedTool], Field(min_length=1)]


class AllowedChatTools(Body):
    """A `tool_choice` among some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolsOptions


def _kind_of_choice(data: Any) -> str:
    if isinstance(data, str):
        return "word"
    kind = data.get("type") if isinstance(data, dict) else getattr(data, "type", None)
    return {"allowed_tools": "allowed", "custom": "named custom"}.get(str(kind), "named")


ToolChoice = Literal["none", "auto", "required"] | NamedTool
"""The choice among the tools in a model's prompt."""
WantedToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[AllowedChatTools, Tag("allowed")]
    | Annotated[NamedTool, Tag("named")]
    | Annotated[NamedCustomTool, Tag("named custom")],
    Discriminator(_kind_of_choice),
]
"""The choice among tools in a client's body, where it may also name allowed tools."""


def _finite(text: str) -> float:
    """Return the number that a text spells. Replace infinity, which JSON cannot write, by the largest double."""
    largest = sys.float_info.max
    return min(max(float(text), -largest), largest)


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def call_for_template(call: ToolCall | CustomToolCall) -> Json:
    """Return a call as a chat template reads it: every tool is a function there."""
    function = call.function
    arguments: object = function.arguments if function.arguments is not None else {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}", parse_float=_finite, parse_constant=_refuse)
        except (ValueError, RecursionError):
            parsed = None  # an answer that was cut off, or nested too deeply; the template gets it as it is
        if isinstance(parsed, dict):
            arguments = ArgumentsObject(parsed, arguments or "{}")
    elif isinstance(arguments, dict):
        arguments = ArgumentsObject(arguments, json.dumps(arguments, ensure_ascii=False))
    return {"id": call.id, "type": "function", "function": {"name": function.name, "arguments": arguments}}

"""The tools of a request, as functions that the model may call, and the way back from a call to the client's tool."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.responses.items import InputItem, OtherItem
from paceline.services.gateway.api.responses.schemas import (
    AllowedTools,
    CustomTool,
    FunctionTool,
    NamedResponseTool,
    NamespaceTool,
    ResponsesRequest,
    Tool,
)
from paceline.services.gateway.planning.chat_schemas import Function, NamedFunction, ToolDefinition
from paceline.services.gateway.planning.chat_schemas import NamedTool as ChatNamedTool
from paceline.services.gateway.planning.chat_schemas import ToolChoice as ChatToolChoice

Json = dict[str, Any]

_TOOL: TypeAdapter[Tool] = TypeAdapter(Tool)
_JSON_STRING = json.JSONDecoder(strict=False)


@dataclass(frozen=True, slots=True)
class ClientName:
    """The client's name of a tool, with its namespace."""

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


def joined_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool: names of namespaces and tools are joined by two underscores."""
    if not namespace:
        return name
    return namespace + name if namespace.endswith("__") else f"{namespace}__{name}"


class Toolbox:
    """The tools of a request: as functions for the model, and with the client's names.

    Args:
        request: the request with its tools. Those of OpenAI's servers are left out.
        items: the whole conversation, because items may define further tools.

    Raises:
        InvalidRequestError: two tools have the same name, or the choice names a tool that does not exist.
    """

    def __init__(self, request: ResponsesRequest, items: Iterable[InputItem] = ()) -> None:
        self._functions: dict[str, Function] = {}
        self._names: dict[str, ClientName] = {}
        for tool in request.tools or ():
            for name, function in _functions(tool):
                if function.name in self._functions:
                    message = f"tools: there are two tools of the name {function.name!r}"
                    raise InvalidRequestError(message, "tools")
                self._add(name, function)
        # Agents repeat definitions: the last one counts.
        for tool in _tools_of(items):
            for name, function in _functions(tool):
                self._add(name, function)
        self.choice = self._choose(request.tool_choice)

    @property
    def definitions(self) -> list[ToolDefinition] | None:
        """The functions for a chat's `tools`; None if there are no functions."""
        return [ToolDefinition(function=function, cache_control=None) for function in self._functions.values()] or None

    def client_name(self, name: str) -> ClientName:
        """Return the client's name of the function that the model calls."""
        return self._names.get(name) or ClientName("function", name)

    def name_for_model(self, name: str, namespace: str | None) -> str:
        """Return the model's name of a tool, which may be a tool of an earlier turn that is gone."""
        return joined_name(name, namespace)

    def _add(self, name: ClientName, function: Function) -> None:
        self._functions[function.name] = function
        self._names[function.name] = name

    def _choose(self, choice: str | AllowedTools | NamedResponseTool) -> ChatToolChoice | None:
        """Return a chat's `tool_choice`. A choice among some tools removes all others from this toolbox."""
        if isinstance(choice, AllowedTools):
            allowed = {self._find(tool, "tool_choice.tools") for tool in choice.tools if tool.name is not None}
            self._functions = {name: self._functions[name] for name in self._functions if name in allowed}
            choice = choice.mode
        if isinstance(choice, NamedResponseTool):
            return ChatNamedTool(function=NamedFunction(name=self._find(choice, "tool_choice")))
        if choice == "required":
            if not self._functions:
                message = "tool_choice: required needs tools that this server can call: functions or custom tools"
                raise InvalidRequestError(message, "tool_choice")
            return "required"
        if not self._functions:
            return None
        return "none" if choice == "none" else "auto"

    def _find(self, tool: NamedResponseTool, place: str) -> str:
        if tool.name is None:
            raise InvalidRequestError(f"{place}: this server has no tool of type {tool.type!r}", place)
        name = joined_name(tool.name, tool.namespace)
        if name not in self._functions:
            raise InvalidRequestError(f"{place}: no tool of tools has the name {name!r}", place)
        return name


def _tools_of(items: Iterable[InputItem]) -> list[Tool]:
    """Return the tools that items define. Definitions that cannot be read are left out."""
    tools: list[Tool] = []
    for item in items:
        for data in (isinstance(item, OtherItem) and item.tools) or ():
            try:
                tools.append(_TOOL.validate_python(data))
            except ValidationError:
                continue
    return tools


def _functions(tool: Tool) -> list[tuple[ClientName, Function]]:
    match tool:
        case FunctionTool() | CustomTool():
            return [_function(tool)]
        case NamespaceTool(name=namespace, tools=members, description=description):
            functions = [_function(member, namespace) for member in members]
            if description and functions:
                first = functions[0][1]
                about = f"About all functions of {namespace}: {description}"
                first.description = f"{first.description}\n\n{about}" if first.description else about
            return functions
    return []


def _function(tool: FunctionTool | CustomTool, namespace: str | None = None) -> tuple[ClientName, Function]:
    name = joined_name(tool.name, namespace)
    if isinstance(tool, FunctionTool):
        function = Function(name=name, description=tool.description, parameters=tool.parameters, strict=tool.strict)
        return ClientName("function", tool.name, namespace), function
    texts, schema = [tool.description or ""], {"type": "string"}
    constraint = tool.format
    if constraint is not None and constraint.definition is not None:
        texts.append(f"The input must follow this {constraint.syntax or 'lark'} grammar:\n{constraint.definition}")
        if constraint.syntax == "regex":
            schema["pattern"] = f"^(?:{constraint.definition})$"
    parameters = {
        "type": "object",
        "properties": {"input": schema},
        "required": ["input"],
        "additionalProperties": False,
    }
    description = "\n\n".join(text for text in texts if text) or None
    # An expression that cannot be enforced is an error, because then the input could have any form.
    strict = True if "pattern" in schema else None
    function = Function(name=name, description=description, parameters=parameters, strict=strict)
    return ClientName("custom", tool.name, namespace), function


class CustomInput:
    """Reads the input of a custom tool from the arguments {"input": "…"} while they come."""

    _BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
    _TEXT = re.compile(r'(?:[^"\\]+|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*')
    _HALF = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")
    """Matches, at the end of a piece, the escape of the first half of a character whose second half follows."""

    def __init__(self) -> None:
        self._rest = ""
        self._has_begun = False
        self._has_ended = False

    def push(self, arguments: str) -> str:
        """Take the next piece of the arguments. Return new text of the input."""
        self._rest += arguments
        if not self._has_begun:
            begin = self._BEGIN.match(self._rest)
            if begin is None:
                return ""
            self._has_begun, self._rest = True, self._rest[begin.end() :]
        if self._has_ended:
            return ""
        found = self._TEXT.match(self._rest)
        assert found is not None
        end = found.end()
        self._has_ended = self._rest.startswith('"', end)
        if not self._has_ended and (half := self._HALF.search(self._rest, 0, end)):
            end = half.start(1)
        text, self._rest = self._rest[:end], self._rest[end:]
        return _decoded(text)

    def finish(self) -> str:
        """End the input. Return the text that was held back; all arguments if they do not begin such an object."""
        may_begin = '{"input":"'.startswith("".join(self._rest.split()))
        return "" if self._has_begun or may_begin else self._rest


def _decoded(text: str) -> str:
    """Return the text of a JSON string without its quotes. Halves of characters without the other half are replaced."""
    decoded = str(_JSON_STRING.decode(f'"{text}"'))
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if "\\u" in text else decoded

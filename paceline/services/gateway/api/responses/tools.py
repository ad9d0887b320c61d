"""The tools of a request, as functions that the model may call, and the way back from a call to the client's tool."""

from __future__ import annotations

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
from paceline.services.gateway.planning.tool_schemas import Function, NamedFunction, ToolDefinition, function_of_custom
from paceline.services.gateway.planning.tool_schemas import NamedTool as ChatNamedTool
from paceline.services.gateway.planning.tool_schemas import ToolChoice as ChatToolChoice

Json = dict[str, Any]

_TOOL: TypeAdapter[Tool] = TypeAdapter(Tool)


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
    form = tool.format
    syntax, definition = (form.syntax or "lark", form.definition) if form is not None else ("lark", None)
    return ClientName("custom", tool.name, namespace), function_of_custom(name, tool.description, syntax, definition)

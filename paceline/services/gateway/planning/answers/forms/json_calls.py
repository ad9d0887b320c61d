"""Calls that are JSON objects: a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable

from paceline.services.gateway.planning.answers.answer import Answer
from paceline.services.gateway.planning.answers.reader import FormError, Steps

NAMES = ("name", "function")


def read_calls(answer: Answer, *arguments: str) -> Steps[None]:
    """Read one call, or a JSON list of calls. Each call is an object as in {"name": …, "arguments": {…}}."""
    reader = answer.reader
    yield from reader.skip_space()
    if (yield from reader.peek()) != "[":
        yield from read_call(answer, *arguments)
        return
    yield from reader.take()
    yield from reader.skip_space()
    while (yield from reader.choose(("]",))) is None:
        yield from read_call(answer, *arguments)
        yield from reader.skip_space()
        yield from reader.choose((",",))
        yield from reader.skip_space()


def read_call(answer: Answer, *arguments: str) -> Steps[None]:
    """Read a call that is a JSON object. Once its name is known, its arguments are added piece by piece as they come.

    Args:
        arguments: names that the member with the arguments may have.

    Raises:
        FormError: the text is no JSON object, or the object has no name of a tool.
    """
    reader = answer.reader
    add: Callable[[str], None] | None = None
    has_arguments = False
    early: list[str] = []
    """Pieces of the arguments that came before the name."""
    while (member := (yield from reader.json_members())) is not None:
        if member in NAMES and add is None:
            name = yield from reader.json_string()
            if answer.tools and name not in answer.tools:
                raise FormError("no tool has this name")  # where calls have no markers, it may be other JSON
            add = answer.begin_call(name)
            add("".join(early))
        elif member in arguments and not has_arguments:
            has_arguments = True
            sink = early.append if add is None else add
            if (yield from reader.peek()) == '"':  # the arguments as JSON text within a string
                sink((yield from reader.json_string()))
            else:
                yield from reader.pass_json(sink)
        else:
            yield from reader.pass_json(lambda text: None)
        yield from reader.skip_space()
    if add is None:
        raise FormError("the call has no name")
    if not has_arguments:
        add(json.dumps({}))

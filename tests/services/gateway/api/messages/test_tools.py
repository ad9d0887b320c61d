"""Tools in the Messages API, through Anthropic's own client."""

from __future__ import annotations

from typing import Any

import pytest

from tests.services.gateway.api.messages.conftest import Desk

LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "integer"}}},
}
FIND = {"name": "find", "input_schema": {"type": "object"}, "type": "custom", "cache_control": {"type": "ephemeral"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "sky", "far": 3}}\n</tool_call>'


async def test_a_conversation_with_tools(desk: Desk) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "What is up?"}]
    for ask in (desk.ask, desk.stream):
        desk.answers(f"<think>Up.</think>I look.\n{CALL}\n{CALL}")
        message = await ask(messages=turns, tools=[LOOK, FIND])
        assert message.stop_reason == "tool_use"
        thought, text, *calls = message.content
        assert (thought.type, text.type) == ("thinking", "text")
        assert [(call.name, call.input) for call in calls if call.type == "tool_use"] == [
            ("look", {"at": "sky", "far": 3})
        ] * 2
        turns.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        results = [
            {"type": "tool_result", "tool_use_id": call.id, "content": f"cloud {place}"}
            for place, call in enumerate(calls)
            if call.type == "tool_use"
        ]
        turns.append({"role": "user", "content": [*results, {"type": "text", "text": "And?"}]})
        desk.answers("Clouds.")
        assert (await ask(messages=turns, tools=[LOOK, FIND])).stop_reason == "end_turn"
        call = '<tool_call>{"name": "look", "arguments": {"at": "sky", "far": 3}}</tool_call>'
        assert desk.prompt.endswith(
            f"<|assistant|><think>Up.</think>I look.{call}{call}<|tool|>cloud 0<|tool|>cloud 1<|user|>And?<|assistant|>"
        )


async def test_the_input_of_a_call_that_was_cut_off_is_an_object(desk: Desk) -> None:
    desk.answers(CALL)
    for cut, expected in (
        ('{"name": "look", ', {}),
        ('{"name": "look", "arguments": {"at": "sk', {}),
        ('{"name": "look", "arguments": {"at": "sky", "far": ', {"at": "sky"}),
    ):
        for ask in (desk.ask, desk.stream):
            message = await ask(tools=[LOOK], max_tokens=len("<tool_call>\n") + len(cut))
            assert message.stop_reason == "max_tokens"
            (call,) = message.content
            assert call.type == "tool_use"
            assert call.input == expected


async def test_the_choice_among_tools(desk: Desk) -> None:
    desk.answers(CALL)

    async def rules(**choice: Any) -> tuple[bool, set[str], bool]:
        """Return whether text is allowed, the tools that are, and whether several calls are."""
        await desk.ask(tools=[LOOK, FIND], tool_choice=choice)
        rules = dict(line.split(": ", 1) for line in desk.constraint.splitlines() if ": " in line)
        names = {name for name in ("look", "find") if f'\\"{name}\\"' in rules["calls"]}
        return "plain" in rules["body"], names, "*" in rules["body"]

    assert await rules(type="auto") == (True, {"look", "find"}, True)
    assert await rules(type="auto", disable_parallel_tool_use=True) == (True, {"look", "find"}, False)
    assert await rules(type="any") == (False, {"look", "find"}, True)
    assert await rules(type="tool", name="find") == (False, {"find"}, False)


async def test_no_tool_may_be_called(desk: Desk) -> None:
    desk.answers("x")
    await desk.ask(tools=[LOOK], tool_choice={"type": "none"})
    assert "look" in desk.prompt
    assert "calls" not in desk.constraint


async def test_hosted_tools_are_left_out(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    desk.answers("x")
    hosted = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    await desk.ask(tools=[LOOK, hosted])
    assert desk.prompt.startswith("<|tools|>look <tool_call>")
    assert "cannot run; the model is not told of them: 'web_search_20250305'" in caplog.text
    await desk.ask(tools=[hosted], tool_choice={"type": "auto"})
    assert desk.prompt == "<|user|>hello<|assistant|>"
    await desk.ask(tools=[])
    assert desk.constraint == ""

"""Agents at work over many turns: a client that sends whole histories as Codex does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.api.responses.conftest import SEED, StartAgents, ask, call, prompt_of, recite
from tests.services.gateway.conftest import Stack

Json = dict[str, Any]

TEMPLATE = """\
{%- for message in messages %}
    {%- if message.role not in ("user", "assistant") and not loop.first and message.role != "tool" %}
        {{- raise_exception("system messages come first") }}
    {%- endif %}
    {{- "<|" + message.role + "|>" }}
    {%- if message.reasoning_content %}{{ "<think>" + message.reasoning_content + "</think>" }}{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson + "}\n</tool_call>" }}
    {%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|assistant|>" }}{% endif %}
{#- The names of the tools are not shown: {{ tools }} #}"""

TOOLS: list[Json] = [
    {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"},
    },
    {
        "type": "namespace",
        "name": "mcp__notes__",
        "description": "Notes of the user.",
        "tools": [{"type": "function", "name": "search", "parameters": {"type": "object"}}],
    },
    {"type": "web_search", "external_web_access": False},
]


class Codex:
    """A client that keeps the history and sends all of it each time."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.history: list[Json] = []

    async def turn(self, answer: str) -> list[Json]:
        """Let the model give an answer. Return the calls in it."""
        recite(self._stack, answer)
        body = {
            "model": "toy",
            "instructions": "You are a coding agent.",
            "input": self.history,
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "thread",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-turn": "1"},
            **SEED,
        }
        response = await self._stack.http.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
        blocks = response.text.removesuffix("\n\n").split("\n\n")
        events = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
        assert events[-1]["type"] == "response.completed"
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        for item in items:
            if item["type"] == "reasoning":
                del item["content"]  # it sends back nothing but the encrypted content
            item.pop("status", None)
        self.history += items
        return [item for item in items if "call_id" in item]

    def say(self, text: str, role: str = "user") -> None:
        part = {"type": "input_text", "text": text}
        self.history.append({"type": "message", "role": role, "content": [part]})

    def give(self, made: Json, output: Any) -> None:
        self.history.append({"type": made["type"] + "_output", "call_id": made["call_id"], "output": output})


@pytest.fixture
async def codex(start_agents: StartAgents, tmp_path: Path) -> tuple[Stack, Codex]:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    stack = await start_agents(chat_template=str(template))
    return stack, Codex(stack)


async def test_each_turn_adds_to_the_prompt_of_the_turn_before(codex: tuple[Stack, Codex]) -> None:
    stack, client = codex
    client.say("<environment>linux</environment>", "developer")
    client.say("fix it")
    answers = [
        "<think>look first</think>" + call("exec_command", cmd="ls"),
        "<think>two at once</think>I see." + call("exec_command", cmd="cat a") + call("mcp__notes__search", q="a"),
        "<think>edit</think>" + call("apply_patch", input="*** Begin Patch\n+é\n*** End Patch"),
        "Done.",
        "<think>again</think>" + call("exec_command", cmd='echo "ü" \\'),
        "All done.",
    ]
    seen, kinds = "", []
    for number, answer in enumerate(answers):
        calls = await client.turn(answer)
        prompt = prompt_of(stack)
        assert prompt.startswith(seen)
        seen = prompt + answer
        kinds.append([(made["type"], made.get("namespace"), made["name"]) for made in calls])
        for made in calls:
            client.give(
                made, [{"type": "input_text", "text": f"result {number}"}] if number % 2 else f"result {number}"
            )
        if not calls:
            client.say("go on")
    assert seen.startswith("<|system|>You are a coding agent.\n\n<environment>linux</environment><|user|>fix it")
    assert kinds == [
        [("function_call", None, "exec_command")],
        [("function_call", None, "exec_command"), ("function_call", "mcp__notes__", "search")],
        [("custom_tool_call", None, "apply_patch")],
        [],
        [("function_call", None, "exec_command")],
        [],
    ]


async def test_a_message_between_a_call_and_its_output_belongs_to_the_call(codex: tuple[Stack, Codex]) -> None:
    stack, client = codex
    client.say("x")
    (made,) = await client.turn(call("exec_command", cmd="ls"))
    client.history.append({"role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]})
    client.give(made, "files")
    await client.turn("ok")
    expected = f"<|user|>x<|assistant|>Looking.{call('exec_command', cmd='ls')}<|tool|>files<|assistant|>"
    assert prompt_of(stack).endswith(expected)


async def test_items_of_other_servers_in_a_history_are_left_out(codex: tuple[Stack, Codex]) -> None:
    stack, client = codex
    client.say("x")
    client.history += [
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAAB-of-another-server"},
        {"type": "code_interpreter_call", "id": "c", "status": "completed", "code": "1", "container_id": "d"},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}], "encrypted_content": None},
    ]
    client.say("late rule", "developer")  # the template wants such messages first
    client.say("y")
    await client.turn("ok")
    expected = "agent.\n\nlate rule<|user|>x<|assistant|><think>in short</think><|user|>y<|assistant|>"
    assert prompt_of(stack).endswith(expected)


async def test_tools_of_other_servers_that_ran_at_the_client_are_seen(codex: tuple[Stack, Codex]) -> None:
    stack, client = codex
    client.say("x")
    edit = {"type": "update_file", "path": "a", "diff": "+b"}
    client.history += [
        {"type": "shell_call", "call_id": "a", "status": "completed", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "b", "stderr": "", "outcome": {}}]},
        {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c", "output": "d"},
        {"type": "apply_patch_call", "call_id": "e", "status": "completed", "operation": edit},
        {"type": "apply_patch_call_output", "call_id": "e", "status": "failed", "output": "no"},
        {"type": "mcp_call", "id": "m", "server_label": "notes", "name": "find", "arguments": "{}", "output": "f"},
        {"type": "mcp_call", "id": "n", "server_label": "notes", "name": "find", "arguments": "{}", "error": "away"},
    ]
    client.say("y")
    await client.turn("ok")
    prompt = prompt_of(stack)
    results = ['[{"stdout": "b", "stderr": "", "outcome": {}}]', "d", "no", "f", 'Error: "away"']
    places = [prompt.index(f"<|tool|>{result}<|") for result in results]
    names = ["shell", "local_shell", "apply_patch", "notes__find"]
    assert places == sorted(places)
    assert [prompt.count(f'"name": "{name}"') for name in names] == [1, 1, 1, 2]
    assert '"commands": ["ls"]' in prompt
    assert '"diff": "+b"' in prompt


async def test_items_can_bring_further_tools(codex: tuple[Stack, Codex]) -> None:
    _, client = codex
    tools = [{"type": "namespace", "name": "late", "description": "", "tools": TOOLS[:1]}, {"type": "function"}]
    client.history.append({"type": "additional_tools", "role": "developer", "tools": tools})
    client.say("x")
    (made,) = await client.turn(call("late__exec_command", cmd="ls"))
    assert (made["namespace"], made["name"]) == ("late", "exec_command")


async def test_a_stored_conversation_and_a_whole_history_are_the_same_prompt(codex: tuple[Stack, Codex]) -> None:
    stack, client = codex
    client.say("x")
    first = await ask(stack, client.history, "<think>t</think>" + call("exec_command", cmd="ls"), tools=TOOLS)  # type: ignore[arg-type]
    items = [item.model_dump(exclude_none=True) for item in first.output]
    output = {"type": "function_call_output", "call_id": items[1]["call_id"], "output": "files"}
    await ask(stack, [output], "ok", previous_response_id=first.id)  # type: ignore[arg-type]
    stored = prompt_of(stack)
    await ask(stack, [*client.history, *items, output], "ok")  # type: ignore[arg-type]
    assert prompt_of(stack) == stored
    assert "<think>t</think>" in stored

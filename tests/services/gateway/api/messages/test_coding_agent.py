"""A coding agent that sends its whole history each time, with all that such agents put around it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anthropic

from tests.services.gateway.api.messages.conftest import Desk

EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
BETAS = ["claude-code-20250219", "interleaved-thinking-2025-05-14", "context-management-2025-06-27", "made-up-2099"]

_NAMES = ["Read", "Edit", "Write", "Bash", "Glob", "Grep", *(f"mcp__server__tool_{index}" for index in range(30))]
TOOLS: list[dict[str, Any]] = [
    *(
        {
            "name": name,
            "description": f"{name} of the agent.\n\nUsage:\n- As needed.",
            "input_schema": {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["path"],
                "additionalProperties": False,
            },
        }
        for name in _NAMES
    ),
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
]
TOOLS[-2]["cache_control"] = EPHEMERAL


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SCRIPT = [
    f"<think>Look first.</think>I read the file.\n{call('Read', path='/src/ä.py', limit=20)}",
    f"{call('Grep', path='/src')}\n{call('Glob', path='**/*.py')}",
    "<think>Now I know.</think>What shall I do?",
    f"<think>Edit.</think>\n{call('Edit', path='/src/ä.py')}",
    "Done. The file says `<tool>` now.",
]
RESULTS: dict[str, Any] = {
    "Read": [
        {"type": "text", "text": "1\tprint('<tool_call>')"},
        {"type": "image", "source": {"type": "base64", "data": "aaaa"}},
    ],
    "Grep": "no match",
    "Glob": [],
    "Edit": "<tool_use_error>String not found.</tool_use_error>",
}


class Agent:
    """An agent that keeps the history, runs tools and asks until the model is done."""

    def __init__(self, desk: Desk) -> None:
        self.history: list[dict[str, Any]] = []
        self.prompts: list[str] = []
        self._desk = desk
        self._turns = itertools.count()

    async def say(self, text: str) -> str:
        """Send the user's words, and return the model's last words after all its tool calls."""
        reminder = {"type": "text", "text": "<system-reminder>\nThe list of todos is empty.\n</system-reminder>"}
        words = {"type": "text", "text": text, "cache_control": EPHEMERAL}
        self.history.append({"role": "user", "content": [reminder, words]})
        while True:
            answer = await self._ask()
            self.history.append({"role": "assistant", "content": [block.to_dict() for block in answer.content]})
            calls = [block for block in answer.content if block.type == "tool_use"]
            assert answer.stop_reason == ("tool_use" if calls else "end_turn")
            if not calls:
                return "".join(block.text for block in answer.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": each.id,
                    "content": RESULTS[each.name],
                    "is_error": each.name == "Edit",
                }
                for each in calls
            ]
            self.history.append({"role": "user", "content": results})

    async def _ask(self) -> anthropic.types.beta.BetaMessage:
        turn = next(self._turns)
        self._desk.answers(SCRIPT[turn])
        billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn:05x};"
        fields: dict[str, Any] = {
            "model": "toy",
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent.", "cache_control": EPHEMERAL},
                {"type": "text", "text": "# Environment\nA folder.", "cache_control": EPHEMERAL},
            ],
            "messages": self.history,
            "tools": TOOLS,
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "medium"},
            "betas": BETAS,
        }
        counted = await self._desk.client.beta.messages.count_tokens(**fields)
        async with self._desk.client.beta.messages.stream(
            **fields,
            max_tokens=4000,
            metadata={"user_id": "user_0_account__session_1"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_body={"seed": 0},
        ) as stream:
            answer = await stream.get_final_message()
        usage = answer.usage
        cached, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
        assert counted.input_tokens == usage.input_tokens + cached + created
        self.prompts.append(self._desk.prompt)
        return answer


async def test_a_session_of_a_coding_agent(desk: Desk, caplog: Any) -> None:
    agent = Agent(desk)
    assert await agent.say("Mend it.") == "What shall I do?"
    agent.history.append({"role": "system", "content": "The user is in edit mode now."})
    assert await agent.say("Edit.") == "Done. The file says `<tool>` now."
    assert len(agent.prompts) == len(SCRIPT)
    # All that was computed for one request serves the next one, although the billing text changes.
    for before, after in itertools.pairwise(agent.prompts):
        assert after.startswith(before)
    assert "billing" not in agent.prompts[-1]
    assert "<|system|>You are an agent.\n\n# Environment\nA folder.<|user|>" in agent.prompts[0]
    assert "web_search" not in agent.prompts[0]
    tail = agent.prompts[-1].removeprefix(agent.prompts[0])
    assert tail == (
        "<think>Look first.</think>I read the file."
        '<tool_call>{"name": "Read", "arguments": {"path": "/src/ä.py", "limit": 20}}</tool_call>'
        "<|tool|>1\tprint('<tool_call>')\n[image: this model takes text alone]<|assistant|>"
        '<tool_call>{"name": "Grep", "arguments": {"path": "/src"}}</tool_call>'
        '<tool_call>{"name": "Glob", "arguments": {"path": "**/*.py"}}</tool_call>'
        "<|tool|>no match<|tool|><|assistant|><think>Now I know.</think>What shall I do?"
        "<|system|>The user is in edit mode now."
        "<|user|><system-reminder>\nThe list of todos is empty.\n</system-reminder>\nEdit.<|assistant|>"
        '<think>Edit.</think><tool_call>{"name": "Edit", "arguments": {"path": "/src/ä.py"}}</tool_call>'
        "<|tool|>Error: <tool_use_error>String not found.</tool_use_error><|assistant|>"
    )
    assert not [record for record in caplog.records if "unknown field" in record.message]

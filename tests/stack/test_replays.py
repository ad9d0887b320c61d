"""Faults that hurt users of other servers, put into a real stack. Each test names the public threads.

Replays of transfers that fail, of peers that restart and of transfers that never start are in `test_hosts.py`, which
has the two hosts for them, and in `tests/services/kvtransfer/transfers/test_transfer_references.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.stack.processes import Stack, serve
from tests.stack.scripted import prompt_for, save_scripted

pytestmark = pytest.mark.stack

ARGUMENTS = r'{"city": "Caf\u00e9 \ud83d\ude00 a\/b", "days": 3}'
"""Arguments with every kind of escape. Grammars with fewer escapes than JSON have turned them into other texts."""
CALL = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
DATA = r'{"name": "Zo\u00eb \ud83d\ude00 a\/b", "age": 36}'
SCRIPTS = {
    "call": f"<tool_call>\n{CALL}\n</tool_call>",
    "text and two calls": f"Sure.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "thinking and call": f"<think>\nI ask.\n</think>\n\nOk.\n<tool_call>\n{CALL}\n</tool_call>",
    "thinking and JSON": f"<think>\nShe was 36.\n</think>\n\n{DATA}",
    "thinking and no JSON": "<think>\nHm.\n</think>\n\n```json\n{{" + 200 * " ",
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    }
]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}


@pytest.fixture(scope="module", params=[5, *(pytest.param(n, marks=pytest.mark.thorough) for n in (1, 12))])
def scripted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack whose model writes the scripts, and whose drafts come from the prompt and are accepted."""
    folder = tmp_path_factory.mktemp("replays")
    save_scripted(folder / "model", SCRIPTS)
    drafts = {"method": "ngram", "num_speculative_tokens": request.param, "prompt_lookup_min": 1, "adaptive": False}
    options = ("--prefill=0", "--kv-memory=1GiB", f"--speculative-config={json.dumps(drafts)}")
    with serve(folder / "log", str(folder / "model"), *options) as running:
        yield running


@pytest.fixture
async def client(scripted: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


async def read(client: AsyncOpenAI, name: str, **fields: Any) -> dict[str, Any]:
    """Return what a streamed answer says, with its calls joined."""
    messages: Any = [{"role": "user", "content": prompt_for(SCRIPTS, name)}]
    found: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    async for chunk in await client.chat.completions.create(
        model="model", messages=messages, stream=True, temperature=0, max_tokens=250, **fields
    ):
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            found["finish"] = choice.finish_reason or found["finish"]
            for call in choice.delta.tool_calls or ():
                own = found["calls"].setdefault(call.index, ["", ""])
                own[0] += call.function.name or "" if call.function else ""
                own[1] += call.function.arguments or "" if call.function else ""
    return found


def assert_is_data(content: str) -> None:
    """Assert that an answer is `DATA` with its escapes. There may be other white space after the first brace."""
    assert json.loads(content) == json.loads(DATA)
    assert content.endswith(DATA.removeprefix("{"))


async def accepted_drafts(stack: Stack) -> float:
    """Return the number of draft tokens that were accepted."""
    metrics = (await asyncio.to_thread(httpx.get, f"{stack.url}/metrics", verify=False)).text
    found = re.search(r"^paceline:spec_decode_num_accepted_tokens_total\S* (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


@pytest.mark.parametrize(
    ("name", "content", "reasoning", "calls"),
    [
        ("call", "", "", 1),
        ("text and two calls", "Sure.", "", 2),
        ("thinking and call", "Ok.", "I ask.", 1),
    ],
)
async def test_no_streamed_call_is_leaked_as_text(
    client: AsyncOpenAI, name: str, content: str, reasoning: str, calls: int
) -> None:
    """vLLM #44522 and #58127: half of the streamed tool calls came as text.

    The fault: one verified run has the end of the reasoning, a marker, and a part of the call, and 16 streams at once
    have their borders at different steps.
    """
    found = await asyncio.gather(*(read(client, name, tools=TOOLS) for _ in range(16)))
    for each in found:
        assert (each["content"].strip(), each["reasoning"].strip()) == (content, reasoning)
        assert [*each["calls"].values()] == [["get_weather", ARGUMENTS]] * calls
        assert each["finish"] == "tool_calls"


async def test_json_after_reasoning_is_whole_in_one_verified_run(client: AsyncOpenAI, scripted: Stack) -> None:
    """vLLM #44993 and #55313: JSON was corrupt, or blanks without end, with speculation and reasoning together.

    The fault: the drafts of one step end the reasoning and begin the JSON, so the grammar begins amid the drafts.
    """
    found = await asyncio.gather(*(read(client, "thinking and JSON", response_format=FORMAT) for _ in range(8)))
    for each in found:
        assert_is_data(each["content"])
        assert each["reasoning"].strip() == "She was 36."
        assert each["finish"] == "stop"
    # The workers count a second late.
    wanted = len(found) * len(SCRIPTS["thinking and JSON"]) / 2
    async with asyncio.timeout(30):
        while await accepted_drafts(scripted) < wanted:
            await asyncio.sleep(0.2)
    await scripted.settled()


async def test_drafts_after_reasoning_keep_to_the_grammar(client: AsyncOpenAI) -> None:
    """vLLM #44993 and #55313: fences, doubled braces, or blanks without end, from drafts that nobody checked.

    The fault: the drafts of one step end the reasoning and go on with what the grammar forbids.
    """
    found = await asyncio.gather(*(read(client, "thinking and no JSON", response_format=FORMAT) for _ in range(4)))
    for each in found:
        assert each["reasoning"].strip() == "Hm."
        assert re.match(r'\{\s{0,32}"name"\s{0,32}:\s{0,32}"', each["content"]), each["content"]


async def test_whole_answers_have_the_escapes_of_the_model(client: AsyncOpenAI) -> None:
    def ask(name: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": prompt_for(SCRIPTS, name)}]
        return client.chat.completions.create(model="model", messages=messages, temperature=0, max_tokens=250, **fields)

    called, answered = await asyncio.gather(ask("call", tools=TOOLS), ask("thinking and JSON", response_format=FORMAT))
    assert called.choices[0].message.tool_calls[0].function.arguments == ARGUMENTS
    assert_is_data(answered.choices[0].message.content)

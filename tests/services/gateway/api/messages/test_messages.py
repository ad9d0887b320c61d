"""POST /v1/messages and its count_tokens through Anthropic's own client."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.services.gateway.http import event_streams
from tests.services.gateway.api.messages.conftest import Desk, with_defaults
from tests.services.gateway.toy_calls import ADMISSION


async def test_a_whole_answer(desk: Desk) -> None:
    desk.answers("Good day.")
    message = await desk.ask()
    assert (message.type, message.role, message.model, message.id[:4]) == ("message", "assistant", "toy", "msg_")
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Good day."}]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message._request_id == message.id
    # The toy worker pretends to have cached tokens of any prompt.
    assert (message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0), message.usage.output_tokens) == (
        len("U") + len("hello") + len("A"),
        len("Good day.") + len("E"),
    )


async def test_a_streamed_answer(desk: Desk) -> None:
    desk.answers("<think>Let me see.</think>Good day.")
    async with desk.client.messages.stream(**with_defaults({})) as stream:
        types = [event.type async for event in stream]
        streamed = await stream.get_final_message()
    assert types[0] == "message_start"
    assert types[-1] == "message_stop"
    whole = await desk.ask()
    first, second = (message.to_dict(exclude_none=True) for message in (streamed, whole))
    assert {**first, "id": ""} == {**second, "id": ""}
    assert [block.type for block in whole.content] == ["thinking", "text"]


async def test_a_silent_stream_sends_pings(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "PING_SECONDS", 0.05)
    desk.answers("Good day.")
    desk.worker.pause_after = ADMISSION
    fields = with_defaults({})
    body = {"stream": True, **fields.pop("extra_body"), **fields}
    lines = []
    async with desk.stack.http.stream("POST", "/v1/messages", json=body) as response:
        async for line in response.aiter_lines():
            lines.append(line)
            if lines.count("event: ping") == 3:
                desk.worker.resume.set()
    assert lines[0] == "event: message_start"
    assert lines.count("event: message_start") == lines.count("event: message_stop") == 1


async def test_the_reasons_why_an_answer_ends(desk: Desk) -> None:
    desk.answers("one two three")
    for ask in (desk.ask, desk.stream):
        cut = await ask(max_tokens=5)
        assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 5)
        stopped = await ask(stop_sequences=["never", " t"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " t")
        assert [block.to_dict() for block in stopped.content] == [{"type": "text", "text": "one"}]


async def test_an_empty_answer_has_no_blocks(desk: Desk) -> None:
    desk.answers("")
    desk.worker.script, desk.worker.stop_at = b" ", 0
    for ask in (desk.ask, desk.stream):
        message = await ask()
        assert (message.content, message.stop_reason) == ([], "end_turn")


async def test_sampling_parameters_reach_the_worker(desk: Desk) -> None:
    desk.answers("x")
    await desk.ask(temperature=0.5, top_p=0.25, top_k=7, max_tokens=9)
    sampling = desk.worker.calls[-1].work.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0.5, 0.25, 7, 9)


async def test_a_prefilled_answer_is_continued(desk: Desk) -> None:
    desk.answers(" B.")
    turns: list[dict[str, Any]] = [{"role": "user", "content": "A or B?"}, {"role": "assistant", "content": "I say"}]
    message = await desk.ask(messages=turns)
    assert desk.prompt == "<|user|>A or B?<|assistant|>I say"
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": " B."}]


async def test_thinking(desk: Desk) -> None:
    desk.answers("x")
    for kind in ("enabled", "adaptive", "disabled"):
        budget = {"budget_tokens": 1024} if kind == "enabled" else {}
        await desk.ask(thinking={"type": kind, **budget}, max_tokens=2000)
        assert desk.prompt.endswith("<think></think>") == (kind == "disabled")
        assert ("max_tokens=1024" in desk.constraint) == (kind == "enabled")
        assert bool(desk.constraint) == (kind != "adaptive")


async def test_effort_switches_reasoning_but_thinking_counts(desk: Desk) -> None:
    desk.answers("x")
    await desk.ask(output_config={"effort": "high"}, thinking={"type": "disabled"})
    assert desk.prompt.endswith("<think></think>")
    await desk.ask(output_config={"effort": "high"})
    assert not desk.prompt.endswith("<think></think>")


async def test_an_answer_in_a_format(desk: Desk) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    desk.answers('{"city": "Oslo"}')
    await desk.ask(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert '"city"' in desk.constraint


async def test_tokens_are_counted_as_in_an_answer(desk: Desk) -> None:
    desk.answers("x")
    fields: dict[str, Any] = {
        "system": "Be short.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
        "thinking": {"type": "disabled"},
    }
    usage = (await desk.ask(**fields)).usage
    count = await desk.client.messages.count_tokens(model="toy", **fields)
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    assert count.input_tokens == len(desk.worker.calls[-1].work.token_ids)


async def test_the_whole_stream_of_events(desk: Desk) -> None:
    desk.answers("Hi")
    body = {**with_defaults({}), "stream": True}
    body |= body.pop("extra_body")
    response = await desk.stack.http.post("/v1/messages?beta=true", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert [line for line in response.text.split("\n") if line.startswith("event:")] == [
        "event: message_start",
        "event: ping",
        "event: content_block_start",
        "event: content_block_delta",
        "event: content_block_delta",
        "event: content_block_stop",
        "event: message_delta",
        "event: message_stop",
    ]

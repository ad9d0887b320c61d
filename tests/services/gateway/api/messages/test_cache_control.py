"""Cache breakpoints of the Messages API: where they are, what is told of them, and what the prompt is."""

from __future__ import annotations

import anthropic
import pytest

from tests.services.gateway.api.messages.conftest import Desk

MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
SYSTEM = "You are a very careful librarian. " * 4


async def test_breakpoints_do_not_change_the_prompt(desk: Desk) -> None:
    desk.answers("yes")
    plain = [{"type": "text", "text": "a document"}, {"type": "text", "text": "a question"}]
    marked = [{**plain[0], "cache_control": MARK}, {**plain[1], "cache_control": HOUR}]
    prompts = []
    for content, mark in ((plain, {}), (marked, {"cache_control": MARK})):
        system = [{"type": "text", "text": SYSTEM, **mark}]
        await desk.ask(system=system, messages=[{"role": "user", "content": content}])
        prompts.append(desk.prompt)
    assert prompts[0] == prompts[1]


async def test_usage_counts_the_tokens_before_the_last_breakpoint(desk: Desk) -> None:
    desk.answers("yes")
    question = [{"role": "user", "content": "a question"}]
    system = [{"type": "text", "text": SYSTEM, "cache_control": MARK}]
    usage = (await desk.ask(system=system, messages=question)).usage
    cached, created = usage.cache_read_input_tokens or 0, usage.cache_creation_input_tokens or 0
    assert usage.input_tokens + cached + created == len(desk.worker.calls[-1].work.token_ids)
    marked = desk.prompt.index(SYSTEM.rstrip()) + len(SYSTEM)
    # The names of roles are special tokens, so that a few characters are one token.
    assert marked - 20 <= cached + created <= marked
    without = (await desk.ask(system=SYSTEM, messages=question)).usage
    assert without.cache_creation_input_tokens == 0


async def test_a_breakpoint_at_the_end_covers_the_prompt(desk: Desk) -> None:
    desk.answers("yes")
    content = [{"type": "text", "text": "a question", "cache_control": MARK}]
    usage = (await desk.ask(messages=[{"role": "user", "content": content}])).usage
    assert usage.input_tokens == 0


async def test_more_than_four_breakpoints_are_refused(desk: Desk) -> None:
    content = [{"type": "text", "text": f"part {number}", "cache_control": MARK} for number in range(5)]
    with pytest.raises(anthropic.BadRequestError, match="cache_control at 4 places"):
        await desk.ask(messages=[{"role": "user", "content": content}])


@pytest.mark.parametrize("mark", [{"type": "forever"}, {"type": "ephemeral", "ttl": "2h"}])
async def test_unknown_breakpoints_are_refused(desk: Desk, mark: dict[str, str]) -> None:
    content = [{"type": "text", "text": "x", "cache_control": mark}]
    with pytest.raises(anthropic.BadRequestError, match=r"ephemeral|5m"):
        await desk.ask(messages=[{"role": "user", "content": content}])

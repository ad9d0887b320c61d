"""Prompts computed and prefixes cached on other hosts, and links that lose them."""

from __future__ import annotations

import pytest

from tests.services.gateway.conftest import StartStack, eventually
from tests.services.gateway.toy_workers import TEXT


async def test_a_prompt_computed_elsewhere_is_fetched_before_it_is_handed_over(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1)
    await stack.add("prefill", "far", host_id="elsewhere")
    await eventually(stack.sees_all)
    answer = (await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)).json()
    assert answer["choices"][0]["text"] == TEXT[:30]
    (call,) = stack.workers["decode-0"].calls
    assert (call.commands, call.source) == (["fetch", "handoff"], "kv of elsewhere")
    assert len(stack.workers["far"].calls) == 1


async def test_over_a_link_that_loses_blocks_nothing_more_is_moved(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1)
    await stack.add("prefill", "far", host_id="elsewhere")
    await eventually(stack.sees_all)
    decode = stack.workers["decode-0"]
    decode.loses_transfers = True
    for _ in range(2):
        answer = (await stack.post("/v1/completions", prompt="x", max_tokens=30, seed=0)).json()
        assert answer["choices"][0]["text"] == TEXT[:30]
    # The worker that could not fetch the blocks is not at fault. It computes this prompt itself, and the next one too.
    commands = [call.commands for call in decode.calls]
    assert commands[-2:] == [["prefill_here"], ["prefill_here"]]
    # If a command is sent while its call ends, gRPC may report "internal error" instead of the reason. Then the gateway
    # tries the link again.
    assert commands[:-2] in ([["fetch"]], [["fetch"], ["fetch"]])


@pytest.mark.slow
async def test_a_wrong_hint_costs_another_try_and_is_not_believed_again(start_stack: StartStack) -> None:
    stack = await start_stack(prefill=0, decode=1, local_prefill_tokens=64)
    prompt = [65 + number % 20 for number in range(200)]
    host = await stack.add("kvtransfer", "host")
    host.pretends_to_cache = prompt
    await stack.add("prefill", "far", host_id="elsewhere")
    await eventually(stack.sees_all)
    decode = stack.workers["decode-0"]

    async def is_believed() -> bool:
        answer = (await stack.post("/v1/completions", prompt=prompt, max_tokens=30, seed=0)).json()
        assert answer["choices"][0]["text"] == TEXT[:30]
        # The number of tokens that the worker found, not the one in the hint.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        # The hint promised 192 cached tokens, but the worker finds 16. The decode worker may compute at most 64, so a
        # prefill worker computes the rest.
        assert decode.calls[-1].commands == ["fetch", "handoff"]
        return len(decode.calls) > 1 and decode.calls[-2].outcome == "cancelled"

    await eventually(is_believed)


@pytest.mark.slow
@pytest.mark.parametrize("computes", ["decode", "prefill", "far"])
async def test_who_computes_brings_the_prefix_and_a_link_that_loses_it_is_left_out(
    start_stack: StartStack, computes: str
) -> None:
    stack = await start_stack(prefill=0, decode=1)
    prompt = [65 + number % 20 for number in range(200)]
    holder = await stack.add("kvtransfer", "holder", host_id="holder")
    holder.pretends_to_cache = prompt
    if computes != "decode":
        await stack.add("prefill", "p", host_id="elsewhere" if computes == "far" else "host")
    await eventually(stack.sees_all)
    decode = stack.workers["decode-0"]
    told = stack.workers["p"] if computes == "far" else decode

    async def ask() -> str:
        answer = (await stack.post("/v1/completions", prompt=prompt, max_tokens=30, seed=0)).json()
        assert answer["choices"][0]["text"] == TEXT[:30]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
        if told is not decode:
            assert decode.calls[-1].work.prefix_source == ""
        return str(told.calls[-1].work.prefix_source)

    async def is_told() -> bool:
        return await ask() == f"127.0.0.1:{holder.port}"

    await eventually(is_told)
    told.loses_transfers = True
    assert await is_told()
    told.loses_transfers = False
    assert await ask() == ""

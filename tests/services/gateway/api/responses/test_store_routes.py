"""Responses that are kept: conversations, retrieval, deletion, background and cancellation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from paceline.services.gateway.api.responses.store import ResponseStore
from tests.services.gateway.api.responses.conftest import SEED, StartAgents, ask, call, prompt_of, recite
from tests.services.gateway.conftest import Stack, StartStack, eventually


async def test_a_conversation_goes_on_from_its_last_response(agents: Stack) -> None:
    tool: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    first = await ask(agents, "one", "<think>t</think>" + call("find"), tools=[tool], instructions="old")
    output: Any = [{"type": "function_call_output", "call_id": first.output[1].call_id, "output": "result"}]  # type: ignore[union-attr]
    second = await ask(agents, output, "two", previous_response_id=first.id)
    assert '<|user|>one<|assistant|><tool_call>\n{"name": "find", "arguments": {}}' in prompt_of(agents)
    assert prompt_of(agents).endswith("</tool_call><|tool|>result<|assistant|>")
    await ask(agents, "three", "3", previous_response_id=second.id, instructions="new")
    assert prompt_of(agents).startswith("<|system|>new<|user|>one")
    assert prompt_of(agents).endswith("<|tool|>result<|assistant|>two<|user|>three<|assistant|>")


async def test_a_response_is_found_again_and_deleted(agents: Stack) -> None:
    responses = agents.openai.responses
    made = await ask(agents, "x", "ok")
    assert await responses.retrieve(made.id) == made
    await responses.delete(made.id)
    for lost in (responses.retrieve(made.id), responses.delete(made.id), responses.input_items.list(made.id)):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await lost
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(agents, "y", "ok", previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"


async def test_a_conversation_needs_all_its_turns(agents: Stack) -> None:
    first = await ask(agents, "1", "a")
    second = await ask(agents, "2", "b", previous_response_id=first.id)
    await agents.openai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        await ask(agents, "3", "c", previous_response_id=second.id)


async def test_a_streamed_response_is_kept_before_it_ends(agents: Stack) -> None:
    recite(agents, "ok")
    async with agents.openai.responses.stream(model="toy", input="x", extra_body=SEED) as stream:
        async for event in stream:
            if event.type == "response.completed":
                assert (await agents.openai.responses.retrieve(event.response.id)).output_text == "ok"


async def test_the_input_is_listed_in_pages(agents: Stack) -> None:
    items: list[Any] = [{"role": "developer", "content": "d"}, {"id": "msg_mine", "role": "user", "content": "1"}]
    first = await ask(agents, items, "a")  # type: ignore[arg-type]
    second = await ask(agents, "2", "b", previous_response_id=first.id)
    pages = agents.openai.responses.input_items.list(second.id, limit=2, order="asc")
    listed = [item async for item in pages]
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert (texts, listed[1].id) == (["d", "1", "a", "2"], "msg_mine")
    assert len({item.id for item in listed}) == 4
    newest = await agents.openai.responses.input_items.list(second.id, limit=1)
    assert newest.data[0].id == listed[-1].id
    assert newest.has_more


async def test_items_with_equal_ids_are_each_listed_once(agents: Stack) -> None:
    same: list[Any] = [{"id": "same", "role": "user", "content": f"{number}"} for number in range(3)]
    first = await ask(agents, [*same, {"id": "same-2", "role": "user", "content": "3"}], "a")  # type: ignore[arg-type]
    second = await ask(agents, same[:1], "b", previous_response_id=first.id)  # type: ignore[arg-type]
    for order in ("asc", "desc"):
        pages = agents.openai.responses.input_items.list(second.id, limit=1, order=order)  # type: ignore[arg-type]
        listed = [item async for item in pages]
        texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
        assert texts == ["0", "1", "2", "3", "a", "0"][:: 1 if order == "asc" else -1]
        assert len({item.id for item in listed}) == 6


@pytest.mark.parametrize("wrong", [r"\ud800", r"a\u0000"])
async def test_ids_that_no_database_can_store_are_refused(agents: Stack, wrong: str) -> None:
    for field in ("conversation", "previous_response_id"):
        answer = await send(agents, "/v1/responses", f'{{"input": "x", "{field}": "{wrong}"}}')
        assert (answer.status_code, "half of a surrogate pair" in answer.text) == (400, True)


async def test_items_that_no_answer_can_have_are_refused(agents: Stack) -> None:
    for item in (r'{"role": "user", "content": "\ud800"}', r'{"id": "\udfff", "role": "user", "content": "x"}'):
        for path, field in (("/v1/conversations", "items"), ("/v1/responses", "input")):
            answer = await send(agents, path, f'{{"{field}": [{item}]}}')
            assert (answer.status_code, "half of a surrogate pair" in answer.text) == (400, True), path


async def send(stack: Stack, path: str, body: str) -> httpx.Response:
    return await stack.http.post(path, content=body, headers={"Content-Type": "application/json"})


async def test_an_item_stands_for_itself_by_its_id(agents: Stack) -> None:
    made = await ask(agents, "x", "kept text")
    reference: Any = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": made.output[0].id}]
    await ask(agents, reference, "ok")
    assert prompt_of(agents) == "<|user|>x<|assistant|>kept text<|assistant|>"
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(agents, [{"type": "item_reference", "id": "msg_lost"}], "ok")  # type: ignore[arg-type]
    assert caught.value.param == "input[0].id"


async def test_responses_belong_to_the_key_that_let_the_request_in(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(store=str(tmp_path / "responses.db"), api_key="one,two")
    # The Authorization of both is the same, and no valid key.
    mine, other = (stack.openai.with_options(default_headers={"x-api-key": key}) for key in ("one", "two"))
    made = await mine.responses.create(model="toy", input="x", max_output_tokens=2)
    for foreign in (
        other.responses.retrieve(made.id),
        other.responses.delete(made.id),
        other.responses.cancel(made.id),
        other.responses.create(model="toy", input="x", previous_response_id=made.id),
        other.responses.create(model="toy", input=[{"type": "item_reference", "id": made.output[0].id}]),  # type: ignore[list-item]
    ):
        with pytest.raises(openai.NotFoundError):
            await foreign
    assert await stack.openai.with_options(api_key="one").responses.retrieve(made.id) == made


async def test_without_keys_all_responses_have_one_owner(agents: Stack) -> None:
    made = await ask(agents, "x", "ok")
    assert await agents.openai.with_options(api_key="other").responses.retrieve(made.id) == made


@pytest.mark.parametrize(("store", "options"), [(False, {}), (True, {"store": "none"})])
async def test_a_response_need_not_be_kept(start_agents: StartAgents, store: bool, options: dict[str, Any]) -> None:
    agents = await start_agents(**options)
    recite(agents, "ok")
    made = (await agents.post("/v1/responses", input="x", store=store, **SEED)).json()
    assert (made["store"], made["output"][0]["content"][0]["text"]) == (False, "ok")
    assert (await agents.http.get(f"/v1/responses/{made['id']}")).status_code == 404


async def test_without_a_store_there_is_no_background(start_agents: StartAgents) -> None:
    agents = await start_agents(store="none")
    answer = await agents.post("/v1/responses", input="x", background=True)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


async def test_a_store_that_fails_costs_no_answer(
    start_agents: StartAgents, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken.db"
    broken.write_text("no database, but long enough to be taken for one" * 10)
    agents = await start_agents(store=str(broken))
    recite(agents, "ok")
    made = (await agents.post("/v1/responses", input="x", **SEED)).json()
    assert (made["store"], made["status"]) == (False, "completed")
    lost = await agents.http.get(f"/v1/responses/{made['id']}")
    assert (lost.status_code, lost.json()["error"]["type"]) == (503, "service_unavailable")
    # Where the store is stands in the log alone.
    assert "broken.db" not in lost.text
    assert "broken.db: file is not a database" in caplog.text


async def test_a_response_in_the_background(agents: Stack) -> None:
    responses = agents.openai.responses
    agents.pause_decode(1)
    queued = await ask(agents, "x", "later", background=True)
    assert (queued.status, queued.output, queued.background) == ("queued", [], True)
    assert (await responses.retrieve(queued.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not complete"):
        await responses.create(model="toy", input="y", previous_response_id=queued.id)
    agents.workers["decode-0"].resume.set()

    async def is_complete() -> bool:
        return (await responses.retrieve(queued.id)).status == "completed"

    await eventually(is_complete)
    assert (await responses.retrieve(queued.id)).output_text == "later"
    assert (await responses.cancel(queued.id)).status == "completed"


async def test_a_stream_of_a_response_in_the_background_is_taken_up_again(agents: Stack) -> None:
    responses = agents.openai.responses
    agents.pause_decode(2)
    recite(agents, "abcdef")
    begun = await responses.create(model="toy", input="x", background=True, stream=True, extra_body=SEED)
    seen = [await anext(begun) for _ in range(5)]
    await begun.close()
    agents.workers["decode-0"].resume.set()
    response_id = seen[0].response.id  # type: ignore[union-attr]
    rest = [event async for event in await responses.retrieve(response_id, stream=True, starting_after=4)]
    assert [event.sequence_number for event in (*seen, *rest)] == list(range(5 + len(rest)))
    assert rest[-1].response.output_text == "abcdef"  # type: ignore[union-attr]
    async with responses.stream(response_id=response_id, starting_after=4) as stream:
        assert (await stream.get_final_response()).output_text == "abcdef"


async def test_a_request_that_comes_again_with_its_key_begins_nothing_new(agents: Stack) -> None:
    agents.pause_decode(1)
    recite(agents, "later")
    fields: Any = {"model": "toy", "background": True, "extra_body": SEED}
    fields["extra_headers"] = {"Idempotency-Key": "key-1"}
    first = await agents.openai.responses.create(input="x", **fields)
    again = await agents.openai.responses.create(input="x", **fields)
    assert (again.id, again.status) == (first.id, "in_progress")
    events = await agents.openai.responses.create(input="x", stream=True, **fields)
    agents.workers["decode-0"].resume.set()
    assert [event.type async for event in events][-1] == "response.completed"
    assert len(agents.workers["decode-0"].outcomes()) == 1
    others: Any = ({"input": "y"}, {"instructions": "z"}, {"temperature": 0.5}, {"max_output_tokens": 9})
    for different in others:
        with pytest.raises(openai.UnprocessableEntityError, match="take a new key"):
            await agents.openai.responses.create(**{"input": "x", **different}, **fields)


async def test_cancelling_ends_the_work(agents: Stack) -> None:
    agents.pause_decode(2)
    queued = await ask(agents, "x", "abcdef", background=True)
    await eventually(lambda: bool(agents.workers["decode-0"].calls))
    cancelled = await agents.openai.responses.cancel(queued.id)
    assert (cancelled.status, cancelled.error) == ("cancelled", None)
    await eventually(lambda: agents.workers["decode-0"].outcomes() == ["cancelled"])
    assert (await agents.openai.responses.cancel(queued.id)).status == "cancelled"
    plain = await ask(agents, "x", "ok")
    with pytest.raises(openai.BadRequestError, match="background"):
        await agents.openai.responses.cancel(plain.id)


async def test_who_cancels_again_does_not_interrupt_the_writing(agents: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    writes, goes_on, finish = asyncio.Event(), asyncio.Event(), ResponseStore.finish

    async def slow(store: ResponseStore, *args: Any) -> bool:
        writes.set()
        await goes_on.wait()
        return await finish(store, *args)

    monkeypatch.setattr(ResponseStore, "finish", slow)
    agents.pause_decode(2)
    recite(agents, "abcdef")
    responses = agents.openai.responses
    begun = await responses.create(model="toy", input="x", background=True, stream=True, extra_body=SEED)
    response_id = (await anext(begun)).response.id  # type: ignore[union-attr]
    while (await anext(begun)).type != "response.output_text.delta":
        pass
    await begun.close()
    first = asyncio.create_task(responses.cancel(response_id))
    await writes.wait()
    second = asyncio.create_task(responses.cancel(response_id))
    await asyncio.sleep(0.05)
    goes_on.set()
    for cancelled in (await first, await second):
        assert cancelled.status == "cancelled"
        assert cancelled.output_text.startswith("a")


async def test_deleting_ends_the_work(agents: Stack) -> None:
    agents.pause_decode(2)
    queued = await ask(agents, "x", "abcdef", background=True)
    await eventually(lambda: bool(agents.workers["decode-0"].calls))
    await agents.openai.responses.delete(queued.id)
    await eventually(lambda: agents.workers["decode-0"].outcomes() == ["cancelled"])


async def test_a_failure_in_the_background_is_told(start_agents: StartAgents) -> None:
    agents = await start_agents(max_attempts=1)
    agents.workers["decode-0"].fail_after = 2
    queued = await ask(agents, "x", "abcdef", background=True)

    async def has_failed() -> bool:
        return (await agents.openai.responses.retrieve(queued.id)).status == "failed"

    await eventually(has_failed)
    failed = await agents.openai.responses.retrieve(queued.id)
    assert failed.error
    assert (failed.error.code, "given up" in failed.error.message) == ("server_error", True)


async def test_after_a_restart_responses_are_there_and_those_that_ran_have_failed(
    start_agents: StartAgents, tmp_path: Path
) -> None:
    before = await start_agents(drain_seconds=0.0)
    done = await ask(before, "x", "ok")
    before.pause_decode(2)
    running = await ask(before, "x", "abcdef", background=True)
    await eventually(lambda: len(before.workers["decode-0"].calls) == 2)
    await before.close()
    after = await start_agents()
    assert (await after.openai.responses.retrieve(done.id)).output_text == "ok"
    failed = await after.openai.responses.retrieve(running.id)
    assert (failed.status, failed.error and failed.error.code) == ("failed", "server_error")
    assert (tmp_path / "responses.db").stat().st_mode & 0o777 == 0o600


async def test_a_gateway_that_was_killed_leaves_failed_responses(
    start_agents: StartAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.services.gateway.api.responses import runs

    monkeypatch.setattr(runs, "LEASE_SECONDS", -1.0)  # as if it had not said for long that it lives
    agents = await start_agents()
    agents.pause_decode(2)
    running = await ask(agents, "x", "abcdef", background=True)
    failed = await agents.openai.responses.retrieve(running.id)
    assert (failed.status, "has ended" in ((failed.error and failed.error.message) or "")) == ("failed", True)


async def test_another_gateway_of_the_same_store_can_cancel(
    start_agents: StartAgents, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.services.gateway.api.responses import runs

    monkeypatch.setattr(runs, "_KEEP_ALIVE_SECONDS", 0.05)
    one, other = await start_agents(), await start_agents()
    one.pause_decode(2)
    running = await ask(one, "x", "abcdef", background=True)
    await eventually(lambda: bool(one.workers["decode-0"].calls))
    assert (await other.openai.responses.retrieve(running.id)).status == "in_progress"
    assert (await other.openai.responses.cancel(running.id)).status == "cancelled"
    await eventually(lambda: one.workers["decode-0"].outcomes() == ["cancelled"])
    assert (await one.openai.responses.retrieve(running.id)).status == "cancelled"


async def test_an_item_is_referred_to_once(agents: Stack) -> None:
    first = await ask(agents, "x", "ok")
    reference = {"type": "item_reference", "id": first.output[0].id}
    for items, status in (([reference], 200), ([reference, reference], 400)):
        asked = [*items, {"role": "user", "content": "y"}]
        answer = await agents.post("/v1/responses", input=asked, max_output_tokens=2, **SEED)
        assert answer.status_code == status, answer.text
    assert answer.json()["error"]["param"] == "input[1].id"


async def test_what_a_response_continues_has_a_largest_size(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(store=str(tmp_path / "store.db"), max_conversation_size="25000", local_prefill_tokens=100)

    async def post(path: str = "/v1/responses", **body: Any) -> tuple[int, Any]:
        answer = await stack.post(path, **{"max_output_tokens": 1, **body})
        return answer.status_code, answer.json()

    # Fields of a response that the model does not see count as well.
    tools = [{"type": "web_search", "note": "n" * 9000}]
    status, first = await post(input="a", tools=tools)
    assert status == 200, first
    status, second = await post(input="b", previous_response_id=first["id"], tools=tools)
    assert status == 200, second
    _, third = await post(input="c", previous_response_id=second["id"], tools=tools)
    reference = {"type": "item_reference", "id": third["output"][0]["id"]}
    assert (await post(input=[{"role": "user", "content": "d"}, reference]))[0] == 200
    _, longest = await post(input="c", tools=tools * 2)
    others = [{"type": "item_reference", "id": longest["output"][0]["id"]}]
    for body in ({"input": "d", "previous_response_id": third["id"]}, {"input": [reference, *others]}):
        status, refused = await post(**body)
        assert (status, "--max-conversation-size" in refused["error"]["message"]) == (400, True), body
    _, conversation = await post("/v1/conversations")
    items = [{"role": "user", "content": "x" * 26_000}]
    status, refused = await post(f"/v1/conversations/{conversation['id']}/items", items=items)
    assert status == 200, refused
    status, refused = await post(input="d", conversation=conversation["id"])
    assert (status, "--max-conversation-size" in refused["error"]["message"]) == (400, True)


async def test_fields_that_a_response_repeats_have_a_largest_size(agents: Stack) -> None:
    tools = [{"type": "web_search", "note": "n" * (1 << 20)}] * 5
    refused = await agents.post("/v1/responses", input="x", tools=tools)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
    assert "a response repeats" in refused.json()["error"]["message"]


async def test_what_a_request_reads_from_the_store_counts_as_its_memory(
    start_stack: StartStack, tmp_path: Path
) -> None:
    stack = await start_stack(store=str(tmp_path / "store.db"), body_memory="128KiB", local_prefill_tokens=100)
    tools = [{"type": "web_search", "note": "n" * 20_000}]

    async def post(**body: Any) -> tuple[int, Any]:
        answer = await stack.post("/v1/responses", input="a", max_output_tokens=1, **body)
        return answer.status_code, answer.json()

    status, first = await post(tools=tools)
    assert status == 200, first
    status, second = await post(previous_response_id=first["id"])
    assert status == 200, second
    status, refused = await post(previous_response_id=first["id"], tools=tools)
    assert (status, "--body-memory" in refused["error"]["message"]) == (413, True)
    for _ in range(3):  # it is given back each time
        assert (await stack.http.get(f"/v1/responses/{first['id']}")).status_code == 200
        assert (await stack.http.get(f"/v1/responses/{second['id']}/input_items")).status_code == 200


async def test_what_a_response_continues_has_a_largest_number_of_items(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(store=str(tmp_path / "store.db"), max_messages=3, local_prefill_tokens=100)
    previous, statuses = None, []
    for _ in range(3):
        answer = await stack.post("/v1/responses", input="a", max_output_tokens=1, previous_response_id=previous)
        statuses.append(answer.status_code)
        previous = answer.json().get("id")
    assert statuses == [200, 200, 400]
    assert "--max-messages" in answer.json()["error"]["message"]

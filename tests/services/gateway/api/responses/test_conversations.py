"""OpenAI's conversations, by OpenAI's own client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.responses import conversation_store
from paceline.services.gateway.api.responses.conversation_store import Conversation, ConversationStore
from paceline.services.gateway.http.bounds import BYTE_COST, RequestMemory
from paceline.services.gateway.store.database import open_database
from paceline.services.gateway.store.store import Store
from tests.services.gateway.api.responses.conftest import SEED, call, prompt_of, recite
from tests.services.gateway.conftest import Stack, StartStack, eventually


def said(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


async def texts(stack: Stack, conversation_id: str, **options: Any) -> list[str]:
    """Return the texts of a conversation's messages, and the types of its other items."""
    listed = stack.openai.conversations.items.list(conversation_id, **{"order": "asc", **options})
    return [item.content[0].text if item.type == "message" else item.type async for item in listed]  # type: ignore[union-attr]


async def test_a_conversation_is_made_changed_and_deleted(agents: Stack) -> None:
    conversations = agents.openai.conversations
    made = await conversations.create(items=[said("one")], metadata={"topic": "x"})
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"topic": "x"})
    assert await conversations.retrieve(made.id) == made
    changed = await conversations.update(made.id, metadata={"topic": "y"})
    assert (changed.metadata, changed.created_at) == ({"topic": "y"}, made.created_at)
    gone = await conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    for lost in (conversations.retrieve(made.id), conversations.delete(made.id), texts(agents, made.id)):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await lost
    assert (await conversations.create()).metadata == {}


async def test_items_are_listed_added_and_deleted(agents: Stack) -> None:
    conversations = agents.openai.conversations
    made = await conversations.create(items=[said("0")])
    added = await conversations.items.create(made.id, items=[said(str(index), "assistant") for index in range(1, 6)])
    assert (len(added.data), added.first_id, added.has_more) == (5, added.data[0].id, False)
    assert await texts(agents, made.id, limit=2) == ["0", "1", "2", "3", "4", "5"]
    assert await texts(agents, made.id, limit=4, order="desc") == ["5", "4", "3", "2", "1", "0"]
    page = await conversations.items.list(made.id, after=added.data[0].id, order="asc", limit=2)
    assert ([item.id for item in page.data], page.has_more) == ([added.data[1].id, added.data[2].id], True)
    item = await conversations.items.retrieve(added.data[2].id or "", conversation_id=made.id)
    assert item == added.data[2]
    assert (await conversations.items.delete(item.id or "", conversation_id=made.id)).id == made.id
    assert await texts(agents, made.id) == ["0", "1", "2", "4", "5"]
    for lost in (conversations.items.retrieve, conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            await lost(item.id or "", conversation_id=made.id)
    with pytest.raises(openai.BadRequestError, match="no item has the id"):
        await conversations.items.list(made.id, after=item.id or "")


async def test_ids_of_items_are_unique_so_that_pages_end(agents: Stack) -> None:
    conversations = agents.openai.conversations
    one, two = ({**said(text), "id": f"msg_{text}"} for text in ("one", "two"))
    for doubled in ([one, one], [one, two, one]):
        with pytest.raises(openai.BadRequestError, match="id 'msg_one' already"):
            await conversations.create(items=doubled)
    made = await conversations.create(items=[one, two])
    with pytest.raises(openai.BadRequestError, match="id 'msg_two' already"):
        await conversations.items.create(made.id, items=[said("three"), two])
    recite(agents, "done")
    again: Any = [two, two]
    await agents.openai.responses.create(model="toy", conversation=made.id, input=again, extra_body=SEED)
    page = await conversations.items.list(made.id, order="asc", limit=100)
    assert len({item.id for item in page.data}) == len(page.data) == 5
    assert await texts(agents, made.id, limit=1) == ["one", "two", "two", "two", "done"]


async def test_pages_of_items_take_memory_before_they_are_read(agents: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    conversations = agents.openai.conversations
    made = await conversations.create(items=[{**said("x" * 1000), "id": f"msg_{index}"} for index in range(3)])
    taken: list[int] = []
    monkeypatch.setattr(RequestMemory, "take", lambda self, owner, size: taken.append(size))
    await conversations.items.list(made.id)
    assert sum(taken) > 3 * 1000 * BYTE_COST
    taken.clear()
    await conversations.items.retrieve("msg_1", conversation_id=made.id)
    assert 1000 * BYTE_COST < sum(taken) < 2000 * BYTE_COST


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_responses_go_on_from_a_conversation_and_add_to_it(agents: Stack, is_streamed: bool) -> None:
    made = await agents.openai.conversations.create(items=[said("be brief", "system"), said("zero")])
    tool: Any = {"type": "function", "name": "find", "parameters": {"type": "object"}}
    recite(agents, "<think>t</think>" + call("find"))
    options: Any = {"model": "toy", "conversation": made.id, "extra_body": SEED}
    if is_streamed:
        async for event in await agents.openai.responses.create(**options, input="one", tools=[tool], stream=True):
            last = event
        first = last.response
    else:
        first = await agents.openai.responses.create(**options, input="one", tools=[tool])
    assert (first.conversation.id, first.previous_response_id) == (made.id, None)
    assert prompt_of(agents).startswith(
        "<|system|>be brief<|user|>zero<|user|>one<|assistant|>"
    ) or "zero" in prompt_of(agents)
    output: Any = [{"type": "function_call_output", "call_id": first.output[1].call_id, "output": "result"}]
    recite(agents, "done")
    await agents.openai.responses.create(**{**options, "conversation": {"id": made.id}}, input=output, store=False)
    assert await texts(agents, made.id) == [
        "be brief", "zero", "one", "reasoning", "function_call", "function_call_output", "done",
    ]  # fmt: skip
    recite(agents, "again")
    await agents.openai.responses.create(**options, input="three")
    assert prompt_of(agents).endswith("<|tool|>result<|assistant|>done<|user|>three<|assistant|>")
    ids = [item.id async for item in agents.openai.conversations.items.list(made.id, order="asc")]
    assert len({*ids}) == len(ids)
    assert first.output[1].id in ids


async def test_responses_in_the_background_add_to_it_once(agents: Stack) -> None:
    made = await agents.openai.conversations.create()
    recite(agents, "done")
    begun = await agents.openai.responses.create(
        model="toy", input="one", conversation=made.id, background=True, extra_body=SEED
    )

    async def has_ended() -> bool:
        return (await agents.openai.responses.retrieve(begun.id)).status == "completed"

    await eventually(has_ended)
    assert await texts(agents, made.id) == ["one", "done"]


async def test_two_responses_at_once_do_not_mix(agents: Stack) -> None:
    made = await agents.openai.conversations.create()
    recite(agents, "done")
    options: Any = {"model": "toy", "conversation": made.id, "extra_body": SEED}
    await asyncio.gather(*(agents.openai.responses.create(**options, input=str(index)) for index in range(4)))
    told = await texts(agents, made.id)
    assert told[1::2] == ["done"] * 4
    assert sorted(told[::2]) == ["0", "1", "2", "3"]


async def test_a_failure_adds_nothing(agents: Stack) -> None:
    made = await agents.openai.conversations.create()
    with pytest.raises(openai.BadRequestError):
        await agents.openai.responses.create(model="toy", input="x" * 20_000, conversation=made.id)
    assert await texts(agents, made.id) == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("", {"items": [said(str(index)) for index in range(21)]}, "items"),
    ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0]"),
    ("", {"items": [{"type": "message", "role": "nobody", "content": "x"}]}, "items[0].role"),
    ("", {"items": [{**said("x"), "id": "i" * 300}]}, "items[0].id"),
    ("", {"metadata": {"k" * 65: "v"}}, "metadata"),
    ("/{id}", {}, "metadata"),
    ("/{id}/items", {}, "items"),
    ("/{id}/items", {"items": []}, "items"),
]


async def test_what_no_conversation_can_have_is_refused(agents: Stack) -> None:
    made = await agents.openai.conversations.create()
    for path, body, place in REFUSED:
        answer = await agents.post("/v1/conversations" + path.format(id=made.id), **body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"].startswith(place)
    for fields, status in (
        ({"conversation": "conv_lost"}, 404),
        ({"conversation": made.id, "previous_response_id": "resp_1"}, 400),
        ({"conversation": 3}, 400),
    ):
        answer = await agents.post("/v1/responses", model="toy", input="x", **fields)
        assert answer.status_code == status
        assert answer.json()["error"]["param"].startswith("conversation")


async def test_other_keys_see_nothing(start_stack: StartStack, tmp_path: Path) -> None:
    stack = await start_stack(api_key="alice,bob", store=str(tmp_path / "store.db"))
    alice, bob = (stack.openai.with_options(api_key=key).conversations for key in ("alice", "bob"))
    made = await alice.create(items=[said("secret")])
    (item,) = (await alice.items.list(made.id)).data
    refused = [
        bob.retrieve(made.id), bob.update(made.id, metadata={}), bob.delete(made.id),
        bob.items.create(made.id, items=[said("x")]), bob.items.retrieve(item.id or "", conversation_id=made.id),
        bob.items.delete(item.id or "", conversation_id=made.id),
        stack.openai.with_options(api_key="bob").responses.create(model="toy", input="x", conversation=made.id),
    ]  # fmt: skip
    for call_of_bob in refused:
        with pytest.raises(openai.NotFoundError):
            await call_of_bob
    with pytest.raises(openai.NotFoundError):
        await bob.items.list(made.id)
    assert len((await alice.items.list(made.id)).data) == 1


async def test_without_a_store_there_are_none(start_stack: StartStack) -> None:
    stack = await start_stack(store="none")
    assert (await stack.post("/v1/conversations")).status_code == 501
    answer = await stack.post("/v1/responses", model="toy", input="x", conversation="conv_1")
    assert (answer.status_code, "--store" in answer.text) == (400, True)


async def test_the_ones_used_longest_ago_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Store(open_database(str(tmp_path / "store.db")))
    store = ConversationStore(shared, entries=2, max_bytes=1000, seconds=60)

    async def kept() -> list[str]:
        return [name for name in "abcd" if await store.get(name, "me") is not None]

    for name in "ab":
        await store.add(Conversation(name, "me", 1.0, {}), [{"id": name}])
    await store.add(Conversation("other", "you", 1.0, {}), [])
    await store.items("a")
    await store.add(Conversation("c", "me", 1.0, {}), [])
    assert await kept() == ["a", "c"]
    await store.append("c", "me", [{"id": "x", "text": "x" * 970}])
    assert await kept() == ["c"]
    with pytest.raises(InvalidRequestError, match="begin a new one"):
        await store.append("c", "me", [{"id": "y"}])
    assert await store.get("other", "you") is not None
    monkeypatch.setattr(conversation_store.time, "time", lambda: 1e12)
    assert await store.get("c", "me") is None
    await store.add(Conversation("d", "me", 1.0, {}), [])
    rows, _ = await shared.run(lambda execute: execute("SELECT COUNT(*) FROM paceline_conversation_items"))
    assert rows == [(0,)]
    shared.close()

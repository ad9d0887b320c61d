"""LangChain's ChatOpenAI, over chats and over Responses: tools over several turns, streams, typed answers, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.services.gateway.clients.conftest import CONTEXT, Playhouse, call
from tests.services.gateway.conftest import PATIENCE

langchain = pytest.importorskip("langchain_openai", reason="make test installs langchain-openai")

from langchain_core.exceptions import ContextOverflowError  # noqa: E402
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage  # noqa: E402
from langchain_core.tools import tool  # noqa: E402


class Report(BaseModel):
    """A report of the weather."""

    city: str
    degrees: int


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"rain in {city}"


@tool
def get_time() -> str:
    """Return the time."""
    return "noon"


TOOLS = {each.name: each for each in (get_weather, get_time)}


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def make_model(request: pytest.FixtureRequest, playhouse: Playhouse) -> Callable[..., Any]:
    """Return a function that makes a chat model."""

    def make(**options: Any) -> Any:
        fields = {"model": "toy", "base_url": f"{playhouse.url}/v1", "api_key": "none", "max_retries": 0}
        return langchain.ChatOpenAI(
            **{**fields, "timeout": PATIENCE, "use_responses_api": request.param, "stream_usage": True, **options}
        )

    return make


async def ask(model: Any, messages: Any, **options: Any) -> AIMessage:
    """Return a model's answer from a stream, which says the same as the whole answer."""
    whole: AIMessage = await model.ainvoke(messages, **options)
    chunks = [chunk async for chunk in model.astream(messages, **options)]
    answer: AIMessage = chunks[0]
    for chunk in chunks[1:]:
        answer += chunk
    assert answer.text == whole.text
    assert [each["args"] for each in answer.tool_calls] == [each["args"] for each in whole.tool_calls]
    return answer


async def test_tools_over_several_turns(playhouse: Playhouse, make_model: Callable[..., Any]) -> None:
    answers = ["Let me see." + call("get_weather", city="Öslo") + call("get_time"), call("get_time"), "It rains."]
    playhouse.play({"How is it?": answers})
    model = make_model().bind_tools(list(TOOLS.values()))
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage("How is it?")]
    called = []
    for _ in answers:
        answer = await ask(model, messages)
        messages.append(answer)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] > 0
        for each in answer.tool_calls:
            called.append((each["name"], each["args"]))
            messages.append(ToolMessage(TOOLS[each["name"]].invoke(each["args"]), tool_call_id=each["id"]))
    assert called == [("get_weather", {"city": "Öslo"}), ("get_time", {}), ("get_time", {})]
    assert answer.text == "It rains."
    assert "<|tool|>rain in Öslo<|tool|>noon<|assistant|><tool_call>" in playhouse.prompts[-1]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
async def test_typed_answers(playhouse: Playhouse, make_model: Callable[..., Any], method: str) -> None:
    text = '{"city": "Oslo", "degrees": -3}'
    playhouse.play({"Report": [call("Report", city="Oslo", degrees=-3) if method == "function_calling" else text]})
    report = await make_model().with_structured_output(Report, method=method).ainvoke("Report in JSON")
    assert report == Report(city="Oslo", degrees=-3)
    assert playhouse.constraint


async def test_a_tool_may_be_required(playhouse: Playhouse, make_model: Callable[..., Any]) -> None:
    playhouse.play({"Time": [call("get_time")]})
    for choice in ("any", "get_time"):
        model = make_model().bind_tools([*TOOLS.values()], tool_choice=choice, strict=True, parallel_tool_calls=False)
        assert [each["name"] for each in (await ask(model, "Time")).tool_calls] == ["get_time"]


async def test_batches(playhouse: Playhouse, make_model: Callable[..., Any]) -> None:
    playhouse.play({"one": ["1"], "two": ["22"]})
    assert [answer.text for answer in await make_model().abatch(["one", "two"])] == ["1", "22"]


@pytest.mark.parametrize("stored", [True, False])
async def test_reasoning_stays_in_a_conversation(playhouse: Playhouse, stored: bool) -> None:
    playhouse.play({"Think": ["<think>Hm.</think>So.", "Again."]})
    fields = {"model": "toy", "base_url": f"{playhouse.url}/v1", "api_key": "none", "max_retries": 0}
    model = langchain.ChatOpenAI(
        **fields, reasoning={"effort": "low"}, output_version="responses/v1", use_previous_response_id=stored
    )
    first = await ask(model, [HumanMessage("Think")])
    assert first.text == "So."
    again = await ask(model, [HumanMessage("Think"), first, HumanMessage("More")])
    assert again.text == "Again."
    if stored:  # LangChain itself keeps no reasoning of a stream
        assert playhouse.prompts[-1] == "<|user|>Think<|assistant|><think>Hm.</think>So.<|user|>More<|assistant|>"


async def test_errors_reach_the_caller(playhouse: Playhouse, make_model: Callable[..., Any]) -> None:
    playhouse.play({"x": ["x"]})
    with pytest.raises(ContextOverflowError):
        await ask(make_model(), "x" * CONTEXT)
    with pytest.raises(openai.NotFoundError):
        await ask(make_model(model="other"), "x")
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await ask(make_model(temperature=3), "x")

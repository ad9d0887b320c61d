"""A real model through openai-agents and langchain-openai. tests/services/gateway/clients has all that they can do."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.stack.processes import Stack
from tests.stack.stacks import SMOLLM as MODEL
from tests.stack.stacks import on

pytestmark = [pytest.mark.model, pytest.mark.stack, on("float32")]


class Report(BaseModel):
    city: Literal["Paris", "Rome", "Oslo"]
    sunny: bool


@pytest.mark.parametrize("kind", ["OpenAIResponsesModel", "OpenAIChatCompletionsModel"])
async def test_agents(stack: Stack, kind: str) -> None:
    agents: Any = pytest.importorskip("agents", reason="make test installs openai-agents")
    agents.set_tracing_disabled(True)
    asked = []

    @agents.function_tool
    def get_weather(city: Literal["Paris", "Rome", "Oslo"]) -> str:
        """Return the weather of a city."""
        asked.append(city)
        return "sunny"

    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120) as client:
        common = {"model": getattr(agents, kind)(model=MODEL, openai_client=client), "instructions": "Report weather."}
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=80)
        # So small a model would call the tool again and again.
        reporter = agents.Agent(
            "reporter", **common, model_settings=settings, tools=[get_weather], tool_use_behavior="stop_on_first_tool"
        )
        question = "How is the weather in Paris?"
        assert (await agents.Runner.run(reporter, question)).final_output == "sunny"
        writer = agents.Agent("writer", **common, output_type=Report)
        streamed = agents.Runner.run_streamed(writer, question)
        async for _ in streamed.stream_events():
            pass
    assert len(asked) == 1
    assert isinstance(streamed.final_output, Report)


@pytest.mark.parametrize("responses", [False, True])
async def test_langchain(stack: Stack, responses: bool) -> None:
    langchain: Any = pytest.importorskip("langchain_openai", reason="make test installs langchain-openai")
    fields = {"model": MODEL, "base_url": f"{stack.url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 80}
    model = langchain.ChatOpenAI(**fields, use_responses_api=responses, timeout=120)
    question = "Name the capital of France in one short sentence."
    whole = await model.ainvoke(question)
    streamed = "".join([chunk.text async for chunk in model.astream(question)])
    assert "Paris" in whole.text
    assert streamed == whole.text
    reports = await asyncio.gather(*(model.with_structured_output(Report).ainvoke(question) for _ in range(2)))
    assert all(isinstance(report, Report) for report in reports)

"""The OpenAI Agents SDK, over Responses and over chats: tools over several turns, handoffs, types, streams, errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.services.gateway.clients.conftest import CONTEXT, Playhouse, call

agents = pytest.importorskip("agents", reason="make test installs openai-agents")


class Report(BaseModel):
    city: str
    degrees: int


@agents.function_tool
def get_weather(city: str, days: int = 1) -> str:
    """Return the weather of a city."""
    return f"rain in {city} for {days}"


@agents.function_tool
def get_time() -> str:
    """Return the time."""
    return "noon"


@pytest.fixture(autouse=True)
def no_tracing() -> None:
    agents.set_tracing_disabled(True)


@pytest.fixture(params=["responses", "chat"])
def model(request: pytest.FixtureRequest, client: openai.AsyncOpenAI) -> Any:
    kind = agents.OpenAIResponsesModel if request.param == "responses" else agents.OpenAIChatCompletionsModel
    return kind(model="toy", openai_client=client)


async def run(*args: Any, **options: Any) -> Any:
    """Run an agent until its end, with whole answers and with streams. Return the result of the streams."""
    whole = await agents.Runner.run(*args, **options)
    result = agents.Runner.run_streamed(*args, **options)
    deltas = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    text = "".join(each.delta for each in deltas if each.type == "response.output_text.delta")
    assert text == agents.ItemHelpers.text_message_outputs(result.new_items)
    assert result.final_output == whole.final_output
    return result


async def test_tools_over_several_turns(playhouse: Playhouse, model: Any) -> None:
    answers = [
        "<think>Ask both.</think>Let me see." + call("get_weather", city="Öslo", days=2) + call("get_time"),
        call("get_weather", city="Rome"),
        "It rains.",
        call("get_time"),
        "Noon.",
    ]
    playhouse.play({"How is it?": answers})
    agent = agents.Agent("helper", instructions="Be brief.", model=model, tools=[get_weather, get_time])
    first = await run(agent, "How is it?")
    assert first.final_output == "It rains."
    outputs = [item.output for item in first.new_items if item.type == "tool_call_output_item"]
    assert outputs == ["rain in Öslo for 2", "noon", "rain in Rome for 1"]
    thoughts = [item for item in first.new_items if item.type == "reasoning_item"]
    assert "Ask both." in str(thoughts)
    assert first.context_wrapper.usage.requests == 3
    second = await run(agent, [*first.to_input_list(), {"role": "user", "content": "And when?"}])
    assert second.final_output == "Noon."
    assert "Let me see.<tool_call>" in playhouse.prompts[-1]
    assert "<|tool|>rain in Öslo for 2<|tool|>noon<|assistant|><tool_call>" in playhouse.prompts[-1]


async def test_handoffs(playhouse: Playhouse, model: Any) -> None:
    playhouse.play({"Hola": [call("transfer_to_spanish"), call("get_time"), "¡Mediodía!"]})
    spanish = agents.Agent("spanish", instructions="You speak Spanish.", model=model, tools=[get_time])
    triage = agents.Agent("triage", instructions="You hand over.", model=model, handoffs=[spanish])
    result = await run(triage, "Hola")
    assert (result.final_output, result.last_agent.name) == ("¡Mediodía!", "spanish")
    assert "transfer_to_spanish" in playhouse.prompts[0]
    assert "<|system|>You speak Spanish." in playhouse.prompts[-1]


async def test_an_agent_may_be_a_tool(playhouse: Playhouse, model: Any) -> None:
    clock = agents.Agent("clock", model=model).as_tool("ask_clock", "Ask the clock.")
    # The scripts are told apart by their first message.
    playhouse.play({"|user|>Ask him": [call("ask_clock", input="hour?"), "He said noon."], "|user|>hour?": ["noon"]})
    result = await run(agents.Agent("boss", model=model, tools=[clock]), "Ask him")
    assert result.final_output == "He said noon."


async def test_an_output_has_its_type(playhouse: Playhouse, model: Any) -> None:
    playhouse.play({"Report": [call("get_time"), '{"city": "Oslo", "degrees": -3}']})
    agent = agents.Agent("reporter", model=model, tools=[get_time], output_type=Report)
    result = await run(agent, "Report")
    assert result.final_output == Report(city="Oslo", degrees=-3)
    assert "degrees" in playhouse.constraint


async def test_a_tool_may_be_required(playhouse: Playhouse, model: Any) -> None:
    playhouse.play({"Time": [call("get_time")]})
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, reasoning={"effort": "none"})
    agent = agents.Agent(
        "clock", model=model, tools=[get_time], model_settings=settings, tool_use_behavior="stop_on_first_tool"
    )
    assert (await run(agent, "Time")).final_output == "noon"
    assert playhouse.prompts[-1].endswith("<think></think>")
    assert "body: " in playhouse.constraint


async def test_a_stored_conversation_goes_on(playhouse: Playhouse, client: openai.AsyncOpenAI) -> None:
    model = agents.OpenAIResponsesModel(model="toy", openai_client=client)
    playhouse.play({"Time?": [call("get_time"), "Noon.", "Still noon."]})
    agent = agents.Agent("clock", model=model, tools=[get_time])
    first = await run(agent, "Time?", auto_previous_response_id=True)
    again = await run(agent, "And now?", previous_response_id=first.last_response_id)
    assert again.final_output == "Still noon."
    assert "Time?<|assistant|>" in playhouse.prompts[-1]
    assert playhouse.prompts[-1].endswith("Noon.<|user|>And now?<|assistant|>")


async def test_tools_of_openai_s_servers_are_not_shown(playhouse: Playhouse, client: openai.AsyncOpenAI) -> None:
    model = agents.OpenAIResponsesModel(model="toy", openai_client=client)
    playhouse.play({"Search": ["I cannot."]})
    agent = agents.Agent("searcher", model=model, tools=[agents.WebSearchTool(), get_time])
    assert (await run(agent, "Search")).final_output == "I cannot."
    assert "<|tools|>get_time <tool_call>" in playhouse.prompts[-1]


async def test_errors_reach_the_caller(playhouse: Playhouse, model: Any, client: openai.AsyncOpenAI) -> None:
    playhouse.play({"x": ["x" * 60]})
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await run(agents.Agent("a", model=model), "x" * CONTEXT)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        await run(agents.Agent("a", model=type(model)(model="other", openai_client=client)), "x")
    playhouse.play({"loop": [call("get_time")] * 3})
    with pytest.raises(agents.MaxTurnsExceeded):
        await run(agents.Agent("a", model=model, tools=[get_time]), "loop", max_turns=2)


async def test_arguments_come_piece_by_piece(playhouse: Playhouse, model: Any) -> None:
    playhouse.play({"Weather": [call("get_weather", city="Oslo"), "Rain."]})
    result = agents.Runner.run_streamed(agents.Agent("a", model=model, tools=[get_weather]), "Weather")
    events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
    pieces = [each.delta for each in events if each.type == "response.function_call_arguments.delta"]
    assert len(pieces) > 3
    assert json.loads("".join(pieces)) == {"city": "Oslo"}

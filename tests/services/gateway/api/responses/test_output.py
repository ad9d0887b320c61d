"""The logprobs of a message: those of its own tokens, each once, wherever text is held back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from paceline.core.types import FinishReason, Logprob, SamplingParams, Token
from paceline.services.gateway.api.choice import Choice
from paceline.services.gateway.api.responses.builder import ResponseBuilder
from paceline.services.gateway.api.responses.planning import chat_request
from paceline.services.gateway.api.responses.schemas import ResponsesRequest
from paceline.services.gateway.api.responses.tools import Toolbox
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.plan import Plan, PromptPlan, plan_answer
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.sequences.progress import Ended, Generated

FIND = {"type": "function", "name": "find", "parameters": {"type": "object"}}
NO_USAGE: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
NO_USAGE |= {"prompt_tokens_details": {}, "completion_tokens_details": {}}


def logprobs_of(tokenizer: Tokenizer, answer: str, sizes: list[int]) -> list[float]:
    """Return the logprobs of a message: 0 for the first token of the answer, -1 for the second one and so on.

    Args:
        sizes: numbers of tokens that come together; what is left comes at once.
    """
    body = {"input": "x", "tools": [FIND], "include": ["message.output_text.logprobs"]}
    request = ResponsesRequest.model_validate(body)
    toolbox = Toolbox(request, request.input_items)
    chat = chat_request(request, toolbox, request.input_items)
    reading = plan_answer(chat, choose_forms("hermes", "think", "", {}), tokenizer, "")
    prompt = PromptPlan(None, [1], SamplingParams(max_tokens=1 << 20, logprobs=0), answer=reading)
    plan = Plan(prompts=[prompt], n=1, stop=(), include_stop=False, skip_special_tokens=True, cache_salt="")
    generation: Any = SimpleNamespace(plan=plan, usage=lambda: NO_USAGE)
    builder = ResponseBuilder("resp_1", request, toolbox, "toy", tokenizer, generation, is_stored=False)
    choice = Choice(0, plan, tokenizer)
    tokens = [Token(own, (Logprob(own, -float(place), 1),)) for place, own in enumerate(answer.encode())]
    builder.begin()
    for size in [*sizes, len(tokens)]:
        part, tokens = tokens[:size], tokens[size:]
        if part and (delta := choice.take(Generated(part))):
            builder.add(delta)
    last = choice.take(Ended(FinishReason.LENGTH))
    assert last is not None
    builder.add(last)
    builder.end()
    messages = [item for item in builder.response["output"] if item["type"] == "message"]
    return [entry["logprob"] for item in messages for entry in item["content"][0]["logprobs"]]


@given(st.text("<to<é[ \n", min_size=1, max_size=12), st.lists(st.integers(1, 3), max_size=12))
@example("<<t", [1, 1, 1])  # the first "<" is text as soon as the second one may begin a marker
@example("éé", [1, 1, 1, 1])
def test_each_token_of_a_message_comes_once(toy_tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    text = f"a{text}b"  # white space at the ends may be dropped, and half a marker is
    assert logprobs_of(toy_tokenizer, text, sizes) == [-float(place) for place in range(len(text.encode()))]


def test_tokens_of_reasoning_and_calls_do_not_count(toy_tokenizer: Tokenizer) -> None:
    call = '<tool_call>\n{"name": "find", "arguments": {}}\n</tool_call>'
    for sizes in ([], [1] * 200):
        found = logprobs_of(toy_tokenizer, f"<think>hi</think>hi{call}", sizes)
        assert found == [-17.0, -18.0]

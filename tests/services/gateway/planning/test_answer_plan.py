"""How a request's answers are read: with the tools' schemas, and from the place at which the prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from llguidance import LLMatcher

from paceline.core.errors import InvalidRequestError
from paceline.core.grammar import grammar_of
from paceline.services.gateway.planning.answers.answer import CallArguments, CallBegin, Content, Part, Reasoning
from paceline.services.gateway.planning.answers.parser import AnswerParser
from paceline.services.gateway.planning.answers.registry import AnswerForms, choose_forms
from paceline.services.gateway.planning.plan import plan_answer
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.core.json_grammar.matching import allows, bytes_only
from tests.services.gateway.planning.constraints.making import chat_constraint, completion_constraint
from tests.services.gateway.toy_model import write_toy_model

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}
HARMONY = choose_forms("openai", "auto", "", {})
GEMMA = choose_forms("gemma4", "gemma4", "", {})
OWN = ("<|channel|>", "<|message|>", "<|start|>", "<|channel>", "<channel|>", "<|tool_call>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = write_toy_model(tmp_path_factory.mktemp("models") / "toy")
    path = str(folder / "tokenizer.json")
    with_own = tokenizers.Tokenizer.from_file(path)
    with_own.add_special_tokens([*OWN])
    with_own.save(path)
    return Tokenizer(folder)


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [{"role": "user", "content": "hello"}], **fields})


def read(
    tokenizer: Tokenizer, forms: AnswerForms, request: ChatRequest, prompt: str, pieces: Sequence[str]
) -> list[Part]:
    plan = plan_answer(request, forms, tokenizer, prompt)
    assert plan is not None
    parser = AnswerParser(plan.read, lambda: "id")
    return [part for piece in pieces for part in parser.push(piece)] + parser.finish()


def test_types_of_arguments_follow_from_the_tools_of_the_request(tokenizer: Tokenizer) -> None:
    forms = choose_forms("qwen3_coder", "none", "", {})
    text = "<tool_call>\n<function=f>\n<parameter=a>\n12\n</parameter>\n</function>\n</tool_call>"
    assert read(tokenizer, forms, chat(tools=[TOOL]), "", [text]) == [
        CallBegin(0, "id", "f"),
        CallArguments(0, '{"a": "12"}'),
    ]


def test_channels_are_read_without_tools_too(tokenizer: Tokenizer) -> None:
    pieces = ["<|channel|>analysis<|message|>so<|end|>", "<|start|>assistant<|channel|>final<|message|>42"]
    assert read(tokenizer, HARMONY, chat(), "<|start|>assistant", pieces) == [Reasoning("so"), Content("42")]


@pytest.mark.parametrize("prompt", ["<|turn>model\n<|channel>thought\n", "<|channel>thought"])
def test_a_prompt_may_end_within_a_named_channel(tokenizer: Tokenizer, prompt: str) -> None:
    assert read(tokenizer, GEMMA, chat(), prompt, ["so<channel|>42"]) == [Reasoning("so"), Content("42")]
    closed = "<|channel>thought\n<channel|>"
    assert read(tokenizer, GEMMA, chat(), closed, ["42"]) == [Content("42")]


def test_tokens_within_markers_are_kept(tokenizer: Tokenizer) -> None:
    own = tokenizer.vocabulary.added_tokens
    for forms, expected in ((HARMONY, OWN[:3]), (GEMMA, OWN[3:5])):
        plan = plan_answer(chat(), forms, tokenizer, "")
        assert plan is not None
        assert {own[text] for text in expected} <= plan.kept_token_ids


def test_a_message_that_the_prompt_has_begun_goes_on_without_a_header(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "I was"}]
    format_ = {"type": "json_object"}
    whole = chat(response_format=format_)
    begun = chat(messages=messages, continue_final_message=True, response_format=format_)
    for request, has_header in ((whole, True), (begun, False)):
        made = chat_constraint(request, HARMONY, tokenizer, "")
        assert made is not None
        assert ("final" in made.text) is has_header


def test_an_answer_of_a_model_that_always_thinks_begins_after_a_thought_that_the_prompt_has_closed(
    tokenizer: Tokenizer,
) -> None:
    forms = choose_forms("none", "deepseek_r1", "", {})
    assert read(tokenizer, forms, chat(), "<|assistant|>", ["so"]) == [Reasoning("so")]
    assert read(tokenizer, forms, chat(), "<|assistant|><think>\n\n</think>\n\n", ["so"]) == [Content("so")]


def test_only_reasoning_that_the_answer_goes_on_with_is_taken_from_the_budget(tokenizer: Tokenizer) -> None:
    forms = choose_forms("none", "deepseek_r1", "", {})
    fresh = chat(messages=[{"role": "user", "content": "What does <think> mean?"}], thinking_token_budget=64)
    begun = chat(
        messages=[{"role": "user", "content": "hello"}, {"role": "assistant", "content": "<think>so"}],
        continue_final_message=True,
        thinking_token_budget=64,
    )
    prompts = [*("hello<|assistant|>", "What does <think> mean?<|assistant|>"), "hello<|assistant|><think>so"]
    grammars = [
        chat_constraint(request, forms, tokenizer, prompt)
        for request, prompt in zip((fresh, fresh, begun), prompts, strict=True)
    ]
    texts = [constraint.text for constraint in grammars if constraint is not None]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("prompt", "left"),
    [
        ("hello", None),
        ("<think>so</think>and", None),
        ("<think>", 6),
        ("<think>so</think><think>\nabc", 3),
        ("<think>that is long", 0),
    ],
)
def test_a_completion_has_a_budget_of_reasoning(tokenizer: Tokenizer, prompt: str, left: int | None) -> None:
    forms = choose_forms("none", "qwen3", "", {})
    ids = tokenizer.encode(prompt, False)
    for content in (None, ["42"]):
        request = CompletionRequest(prompt=prompt, thinking_token_budget=6, guided_choice=content)
        constraint = completion_constraint(request, forms, tokenizer, ids)
        assert constraint is not None
        matcher = LLMatcher(bytes_only(), grammar_of(constraint.kind, constraint.text), log_level=0)
        begin, most = ("<think>", 6) if left is None else ("", left)
        assert allows(matcher, f"{begin}{'x' * most}</think>42"), matcher.get_error()
        assert not allows(matcher, f"{begin}{'x' * (most + 1)}</think>42")
        assert allows(matcher, f"{begin}</think>so") is (content is None)
    endless = CompletionRequest(prompt=prompt, thinking_token_budget=-1)
    assert completion_constraint(endless, forms, tokenizer, ids) is None


ESCAPED = [r"Caf\u00e9 S\u00e3o", r"hi \ud83d\ude00!", r"a\/b", r"\u0041\u007F", "Caf\u00e9 \U0001f600/\x7f"]


@pytest.mark.parametrize("text", ESCAPED)
@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "granite"])
def test_arguments_may_have_every_spelling_of_strings(tokenizer: Tokenizer, name: str, text: str) -> None:
    forms = choose_forms(name, "none", "", {})
    assert forms.tools is not None
    request = chat(tools=[TOOL], tool_choice="required")
    arguments = f'{{"a": "{text}"}}'
    written = forms.tools.write("f", arguments)
    constraint = chat_constraint(request, forms, tokenizer, "")
    assert constraint is not None
    matcher = LLMatcher(bytes_only(), grammar_of(constraint.kind, constraint.text), log_level=0)
    assert allows(matcher, written), matcher.get_error()
    assert CallArguments(0, arguments) in read(tokenizer, forms, request, "", [written])


def test_one_keyword_does_not_drop_the_schema_of_a_tool(tokenizer: Tokenizer) -> None:
    properties = {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "n": {"minimum": "3"}}
    parameters = {"properties": properties, "required": ["tags"]}
    forms = choose_forms("hermes", "none", "", {})
    request = chat(tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    constraint = chat_constraint(request, forms, tokenizer, "")
    assert constraint is not None
    place = "tools[0].function.parameters.properties"
    assert sorted(constraint.unenforced) == [f"{place}.n.minimum", f"{place}.tags.uniqueItems"]
    matcher = LLMatcher(bytes_only(), grammar_of(constraint.kind, constraint.text), log_level=0)
    assert forms.tools is not None
    right, wrong = (forms.tools.write("f", text) for text in ('{"tags": ["a"]}', '{"PARAMETER": "VALUE"}'))
    assert [allows(matcher, text) for text in (right, wrong)] == [True, False]


@pytest.mark.parametrize("form", ["hermes", "pythonic", "gemma4", "qwen3_coder"])
def test_a_strict_tool_is_refused_for_what_cannot_be_enforced(tokenizer: Tokenizer, form: str) -> None:
    forms = choose_forms(form, "none", "", {})
    for value, is_refused in (({"uniqueItems": True}, True), ({"format": "path"}, False)):
        function = {"name": "f", "strict": True, "parameters": {"properties": {"a": value}}}
        request = chat(tools=[{"type": "function", "function": function}])
        if is_refused:
            with pytest.raises(InvalidRequestError, match="uniqueItems cannot be enforced in full"):
                chat_constraint(request, forms, tokenizer, "")
        else:
            assert chat_constraint(request, forms, tokenizer, "") is not None


def test_multiples_are_enforced_in_every_notation(tokenizer: Tokenizer) -> None:
    value = {"type": ["integer", "string"], "multipleOf": 5}
    request = chat(
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": value, "b>c": {}}}}}]
    )
    for form in ("hermes", "qwen3_coder"):
        constraint = chat_constraint(request, choose_forms(form, "none", "", {}), tokenizer, "")
        assert constraint is not None
        assert not constraint.unenforced

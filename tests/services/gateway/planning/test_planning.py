from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InvalidRequestError, UnavailableError
from paceline.proto import common_pb2
from paceline.services.gateway.http.errors import ContextLengthError
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.fill_in_middle import fill_in_middle
from paceline.services.gateway.planning.plan import Plan, ServedModel
from paceline.services.gateway.planning.planning import plan_chat, plan_completion, plan_tokens
from paceline.services.gateway.planning.sampling import LEAST_TOP_P, LogprobRules
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.token_schemas import TokensRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.toy_model import (
    CHAT_TEMPLATE,
    END,
    REASONING_TEMPLATE,
    VOCAB_SIZE,
    text_of,
    write_toy_model,
)

LIMIT = 100


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_toy_model(tmp_path, temperature=0.5, top_k=40))


def completion(tokenizer: Tokenizer, limit: int = LIMIT, **fields: Any) -> Plan:
    return plan_completion(CompletionRequest(**{"prompt": "hello", **fields}), ServedModel(tokenizer, limit))


def chat(tokenizer: Tokenizer, **fields: Any) -> Plan:
    messages = [{"role": "user", "content": "hi"}]
    return plan_chat(ChatRequest(**{"messages": messages, **fields}), ServedModel(tokenizer, LIMIT))


def test_what_the_client_does_not_say_is_the_model_s_default(tokenizer: Tokenizer) -> None:
    sampling = completion(tokenizer).prompts[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 40, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.logprobs, sampling.min_tokens) == (1.0, None, 0)


def test_what_the_client_says_wins(tokenizer: Tokenizer) -> None:
    fields = {"temperature": 0, "top_k": -1, "top_p": 0.5, "presence_penalty": 1, "logit_bias": {"7": -100}}
    sampling = completion(tokenizer, **fields, allowed_token_ids=[1, 2], frequency_penalty=-1.5).prompts[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0, 0, 0.5)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1.5)
    assert (sampling.logit_bias, sampling.allowed_token_ids) == ({7: -100}, (1, 2))


def test_a_top_p_of_0_is_the_smallest_that_workers_take(tokenizer: Tokenizer) -> None:
    """OpenAI takes it. Both leave the best token alone, at any temperature."""
    assert completion(tokenizer, top_p=0).prompts[0].sampling.top_p == LEAST_TOP_P
    assert completion(tokenizer, top_p=LEAST_TOP_P / 2).prompts[0].sampling.top_p == LEAST_TOP_P


def test_a_budget_of_reasoning_holds_for_completions_and_token_ids(tokenizer: Tokenizer) -> None:
    served = ServedModel(tokenizer, LIMIT, choose_forms("none", "qwen3", "", {}))
    params = {"thinking_token_budget": 3, "max_tokens": 9}
    text = plan_completion(CompletionRequest(prompt=["<think>", "hello"], **params), served)
    ids = plan_tokens(TokensRequest.model_validate({"token_ids": [*b"<think>"], "sampling_params": params}), served)
    begun, fresh = (prompt.wanted for prompt in text.prompts)
    assert begun is not None
    assert fresh is not None
    assert begun != fresh
    assert ids.prompts[0].wanted == begun
    request = {"token_ids": [1], "sampling_params": params}
    with pytest.raises(InvalidRequestError) as error:
        plan_tokens(TokensRequest.model_validate(request), ServedModel(tokenizer, LIMIT))
    assert error.value.param == "sampling_params.thinking_token_budget"


def test_a_seed_is_kept_or_follows_from_the_id(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer, seed=-2).seeded("a").prompts[0].sampling.seed == 2**64 - 2
    for unsaid in (None, -1):
        plan = completion(tokenizer, seed=unsaid)
        assert len({plan.seeded(name).prompts[0].sampling.seed for name in "abcab"}) == 3


def test_the_model_s_ends_are_stop_tokens_unless_ignored(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer, stop_token_ids=[5]).prompts[0].sampling.stop_token_ids == {5, END}
    assert completion(tokenizer, stop_token_ids=[5], ignore_eos=True).prompts[0].sampling.stop_token_ids == {5}


def test_completions_default_to_16_tokens_and_chats_to_what_is_left(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer).prompts[0].sampling.max_tokens == 16
    assert completion(tokenizer, limit=8).prompts[0].sampling.max_tokens == 3
    plan = chat(tokenizer)
    assert plan.prompts[0].sampling.max_tokens == LIMIT - len(plan.prompts[0].token_ids)
    assert chat(tokenizer, max_tokens=5, max_completion_tokens=7).prompts[0].sampling.max_tokens == 7


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("ab", ["ab"], [[97, 98]]),
        (["a", "b"], ["a", "b"], [[97], [98]]),
        ([1, 2], [None], [[1, 2]]),
        ([[1], [2, 3]], [None, None], [[1], [2, 3]]),
    ],
)
def test_prompts_come_in_four_forms(tokenizer: Tokenizer, prompt: Any, texts: list[Any], ids: list[Any]) -> None:
    plan = completion(tokenizer, prompt=prompt)
    assert [planned.text for planned in plan.prompts] == texts
    assert [planned.token_ids for planned in plan.prompts] == ids


def test_truncation_keeps_the_end_unless_asked_otherwise(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer, truncate_prompt_tokens=2).prompts[0].token_ids == list(b"lo")
    right = completion(tokenizer, truncate_prompt_tokens=2, truncation_side="right").prompts[0]
    assert right.token_ids == list(b"he")
    fitting = completion(tokenizer, limit=5, truncate_prompt_tokens=-1, max_tokens=3).prompts[0]
    assert (fitting.token_ids, fitting.sampling.max_tokens) == (list(b"lo"), 3)


def test_echo_with_logprobs_scores_the_prompt(tokenizer: Tokenizer) -> None:
    assert completion(tokenizer, echo=True, logprobs=2).prompts[0].sampling.prompt_logprobs == 2
    assert completion(tokenizer, echo=True).prompts[0].sampling.prompt_logprobs is None
    plan = completion(tokenizer, echo=True, max_tokens=0)
    assert (plan.kind, plan.prompts[0].sampling.prompt_logprobs) == (common_pb2.WORK_KIND_SCORE, 0)


def test_text_parts_are_one_text(tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(tokenizer, messages=[{"role": "user", "content": parts}]).prompts[0].text == "<|user|>a\nb<|assistant|>"


def test_the_context_must_hold_prompt_and_answer(tokenizer: Tokenizer) -> None:
    completion(tokenizer, limit=10, max_tokens=5)
    with pytest.raises(ContextLengthError, match="shorten prompt or lower max_tokens") as caught:
        completion(tokenizer, limit=9, max_tokens=5)
    assert caught.value.param == "max_tokens"
    with pytest.raises(ContextLengthError, match="the prompt is too long: prompt has 5") as caught:
        completion(tokenizer, limit=5)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [300]}, "prompt"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"allowed_token_ids": [1, 300]}, "allowed_token_ids"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"logit_bias": {"300": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ],
)
def test_what_only_the_tokenizer_knows_to_be_wrong_is_refused(
    tokenizer: Tokenizer, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        completion(tokenizer, **fields)
    assert caught.value.param == param


def test_what_is_far_too_long_is_refused_before_its_tokens_are_counted(tokenizer: Tokenizer) -> None:
    text = "x" * (LIMIT * tokenizer.longest_token + 1)
    for plan in (
        lambda: completion(tokenizer, prompt=text),
        lambda: chat(tokenizer, messages=[{"role": "user", "content": text}]),
    ):
        with pytest.raises(ContextLengthError, match="characters"):
            plan()
    assert len(completion(tokenizer, prompt=text, truncate_prompt_tokens=2).prompts[0].token_ids) == 2


def test_without_a_worker_nothing_can_be_planned(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnavailableError, match="no decode worker"):
        completion(tokenizer, limit=0)


@pytest.mark.parametrize(
    ("most", "wanted", "count"), [(20, 20, 20), (0, 0, 0), (30, 30, 30), (-1, -1, VOCAB_SIZE), (900, -1, VOCAB_SIZE)]
)
def test_the_server_says_how_many_logprobs_there_may_be(
    tokenizer: Tokenizer, most: int, wanted: int, count: int
) -> None:
    rules = LogprobRules(most)
    body = CompletionRequest(prompt="x", logprobs=wanted, prompt_logprobs=wanted, echo=True)
    sampling = plan_completion(body, ServedModel(tokenizer, LIMIT, rules=rules)).prompts[0].sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == (count, count)
    chat_body = ChatRequest(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=wanted)
    assert plan_chat(chat_body, ServedModel(tokenizer, LIMIT, rules=rules)).prompts[0].sampling.logprobs == count


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 4}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 4}, "prompt_logprobs"),
        ({"logprobs": 1, "logprob_token_ids": [1, 2, 3, 4]}, "logprob_token_ids"),
    ],
)
def test_more_logprobs_are_refused(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"at most 3 tokens .*--max-logprobs") as caught:
        plan_completion(CompletionRequest(prompt="x", **fields), ServedModel(tokenizer, LIMIT, rules=LogprobRules(3)))
    assert caught.value.param == param


def test_a_request_says_how_tokens_are_named_else_the_server_does(tokenizer: Tokenizer) -> None:
    model = ServedModel(tokenizer, LIMIT, rules=LogprobRules(as_ids=True))
    for said, named in ((None, True), (False, False), (True, True)):
        body = CompletionRequest(prompt="x", return_tokens_as_token_ids=said)
        assert plan_completion(body, model).logprobs_as_ids is named


def test_bad_words_are_sequences_with_and_without_a_space(tokenizer: Tokenizer) -> None:
    words = completion(tokenizer, bad_words=["ab", " c", "ab", " "]).prompts[0].sampling.bad_words
    assert words == ((97, 98), (32, 97, 98), (99,), (32, 99), (32,), (32, 32))
    with pytest.raises(InvalidRequestError, match="forbid all of allowed_token_ids"):
        completion(tokenizer, bad_words=["a", "b"], allowed_token_ids=[97, 98])
    completion(tokenizer, bad_words=["a", "b"], allowed_token_ids=[97, 98, 99])


@pytest.mark.parametrize(
    ("own_tokens", "prompt"),
    [
        ("<fim_prefix> <fim_suffix> <fim_middle>", "<fim_prefix>{a<fim_suffix>b}<fim_middle>"),
        ("<|fim_prefix|> <|fim_suffix|> <|fim_middle|> <|x|>", "<|fim_prefix|>{a<|fim_suffix|>b}<|fim_middle|>"),
        ("[PREFIX] [SUFFIX]", "[SUFFIX]b}[PREFIX]{a"),
    ],
)
def test_a_suffix_is_written_with_the_tokens_of_the_model(own_tokens: str, prompt: str) -> None:
    assert fill_in_middle("{a", "b}", own_tokens.split()) == prompt
    with pytest.raises(InvalidRequestError, match="no tokens that mark"):
        fill_in_middle("a", "b", own_tokens.split()[1:])


TRANSLATES = (
    "{% for m in messages %}{% set part = m['content'][0] %}"
    "{{ part['source_lang_code'] }}>{{ part['target_lang_code'] }}:{{ part['text'] }}{% endfor %}"
)
"""A template in the manner of TranslateGemma's, which fails without these fields."""


@pytest.mark.parametrize(
    ("template", "fields", "dropped"),
    [
        (CHAT_TEMPLATE, {}, ""),
        (REASONING_TEMPLATE, {}, "<think>"),
        (REASONING_TEMPLATE, {"reasoning_effort": "none"}, "<think></think>"),
        (REASONING_TEMPLATE, {"add_generation_prompt": False}, ""),
        (REASONING_TEMPLATE, {"truncate_prompt_tokens": 9, "truncation_side": "right"}, ""),
        (REASONING_TEMPLATE, {"chat_template_kwargs": {"text": "a" * 1000}}, ""),  # it is too much to remember
        # Marks that are kept, a template that refuses later turns, and one that writes a question again.
        ("{% for m in messages %}{% if m.role == 'assistant' %}<t>{% endif %}{{ m.content }}{% endfor %}<t>", {}, ""),
        ("{% if messages|length > 1 %}{{ raise_exception('no') }}{% endif %}a<think>", {}, ""),
        ("{{ messages[-1].content }}{% if add_generation_prompt %}<think>{% endif %}", {}, ""),
    ],
)
def test_a_prompt_knows_which_end_later_prompts_do_not_have(
    template: str, fields: dict[str, Any], dropped: str, tmp_path: Path
) -> None:
    tokenizer = Tokenizer(write_toy_model(tmp_path / "model", chat_template=template))
    (prompt,) = chat(tokenizer, messages=[{"role": "user", "content": "Why is that?"}], **fields).prompts
    assert prompt.dropped_tokens == len(dropped)  # each character is a token
    assert text_of(prompt.token_ids).endswith(dropped)


def prompt_of(folder: Path, source: str, **fields: Any) -> str:
    tokenizer = Tokenizer(write_toy_model(folder, chat_template=source))
    return text_of(chat(tokenizer, **fields).prompts[0].token_ids)


def test_a_template_reads_the_fields_of_texts_that_it_names(tmp_path: Path) -> None:
    part = {"type": "text", "text": "ahoj", "source_lang_code": "cs", "target_lang_code": "de", "index": 0}
    messages = [{"role": "user", "content": [part]}]
    assert prompt_of(tmp_path, TRANSLATES, messages=messages) == "cs>de:ahoj"


def test_a_template_that_names_none_of_them_gets_a_text_as_before(tmp_path: Path) -> None:
    source = "{% for m in messages %}{{ loop.index }}{{ m.content + '!' }}{% endfor %}"
    part = {"type": "text", "text": "hi", "index": 3, "annotations": []}
    assert prompt_of(tmp_path, source, messages=[{"role": "user", "content": [part]}]) == "1hi!"


def test_documents_are_shown_or_refused(tmp_path: Path) -> None:
    source = "{% for d in documents or [] %}[{{ d.title }}:{{ d['text'] }}]{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "t", "text": "one"}, {"title": "u", "text": "two"}]
    assert prompt_of(tmp_path / "a", source, documents=documents) == "[t:one][u:two]hi"
    for nothing in ([], None):
        assert prompt_of(tmp_path / "a", source, documents=nothing) == "hi"
    with pytest.raises(InvalidRequestError, match="does not show them") as caught:
        prompt_of(tmp_path / "b", "{{ messages[0].content }}", documents=documents)
    assert caught.value.param == "documents"

"""Salts keep owners apart, and only what the operator names is shared."""

from __future__ import annotations

import datetime
import logging
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.services.common.secret import Secret
from paceline.services.gateway.http.access.callers import ANYONE, Caller
from paceline.services.gateway.planning.plan import PromptPlan, ServedModel
from paceline.services.gateway.planning.planning import plan_chat, plan_completion, plan_tokens
from paceline.services.gateway.planning.schemas import ChatRequest, CompletionRequest
from paceline.services.gateway.planning.sharing import CacheSalts, SharedPrompts, read_shared_prompts
from paceline.services.gateway.planning.token_schemas import TokensRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer
from tests.services.gateway.toy_model import USER, write_toy_model

SALTS = CacheSalts(Secret("a secret of this cluster"))
Text = st.text(st.characters(), max_size=4)  # with halves of surrogate pairs, which JSON can have, too
Callers = st.builds(
    Caller, name=st.just("n"), owner=st.sampled_from(["", "a1", "b2"]), is_admin=st.booleans(), share_cache=Text
)


def domain(caller: Caller) -> tuple[bool, str]:
    return bool(caller.share_cache), caller.share_cache or caller.owner


@given(Callers, Callers, Text, Text)
def test_two_requests_have_one_salt_exactly_if_owner_or_group_and_the_clients_salt_are_equal(
    one: Caller, other: Caller, ours: str, theirs: str
) -> None:
    same = (domain(one), ours) == (domain(other), theirs)
    assert (SALTS.salt(one, ours) == SALTS.salt(other, theirs)) == same


@given(Callers, Text)
def test_no_client_can_choose_a_salt_that_another_owner_has(caller: Caller, wanted: str) -> None:
    alice = Caller("alice", "a9", False)
    for salt in (SALTS.salt(alice, ""), f"a9{wanted}", f"owner{wanted}a9", f"\0a9{wanted}"):
        for text in (salt, SALTS.salt(caller, salt)):
            assert SALTS.salt(caller, text) not in ("", text, SALTS.salt(alice, wanted), SALTS.salt(alice, ""))


def test_a_group_is_no_owner_of_the_same_name() -> None:
    group, owner = Caller("x", "", False, share_cache="a1"), Caller("y", "a1", False)
    assert len({SALTS.salt(each, "") for each in (group, owner, ANYONE)}) == 3


def test_no_character_moves_from_the_owner_to_the_salt() -> None:
    splits = [SALTS.salt(Caller("x", "", False, share_cache="team"[:end]), "team"[end:]) for end in range(1, 5)]
    assert len({*splits}) == 4


def test_gateways_derive_equal_salts_from_the_secret_of_their_cluster() -> None:
    alice = Caller("alice", "a9", False)
    assert SALTS.salt(alice, "x") == "f603d1698c63f214b7c42e2278a11c96" != CacheSalts(Secret()).salt(alice, "x")
    assert CacheSalts(Secret("another cluster's secret")).salt(alice, "x") != SALTS.salt(alice, "x")


@given(Callers, Callers, Text, Text)
def test_if_all_share_only_the_clients_salts_count(one: Caller, other: Caller, ours: str, theirs: str) -> None:
    salts = CacheSalts(Secret(), shares_all=True)
    assert (salts.salt(one, ours) == salts.salt(other, theirs)) == (ours == theirs)


# ---- shared prompts

TEXT = "You answer questions about trains, and about nothing else."
"""58 characters, which are as many tokens of the toy model."""
DATED = (
    "{{ '<|assistant|>' + strftime_now('%d %b %Y') }}"
    "{% for message in messages %}{{ '<|user|>' + message.content }}{% endfor %}"
    "{% if tools %}tools: {{ tools }}{% endif %}"
)
"""A template that writes the date before the system message, and tools after all messages."""
NO_SYSTEM = "{% for message in messages %}{{ raise_exception('no') if message.role == 'system' }}{% endfor %}"
DAY = datetime.datetime(2026, 2, 3, 12)


@pytest.fixture(scope="module")
def dated(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_toy_model(tmp_path_factory.mktemp("dated"), chat_template=DATED))


def served(tokenizer: Tokenizer, *texts: str, now: datetime.datetime | None = None) -> ServedModel:
    shared = SharedPrompts({str(number): text for number, text in enumerate(texts)}, tokenizer)
    return ServedModel(tokenizer, 512, now=now, shared_prompts=shared)


def chat(model: ServedModel, system: str, user: str = "hello", **fields: object) -> PromptPlan:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    (prompt,) = plan_chat(ChatRequest.model_validate({"messages": messages, **fields}), model).prompts
    return prompt


def completion(model: ServedModel, text: str) -> PromptPlan:
    (prompt,) = plan_completion(CompletionRequest.model_validate({"prompt": text}), model).prompts
    return prompt


def test_whole_links_of_a_system_prompt_are_shared(dated: Tokenizer) -> None:
    model = served(dated, TEXT, now=DAY)
    begin = 1 + len("03 Feb 2026") + 1
    for user in ("hello", "", "\n"):
        prompt = chat(model, TEXT, user)
        assert prompt.shared_tokens == (begin + len(TEXT)) // BASE_TOKENS * BASE_TOKENS == 64
        assert bytes(prompt.token_ids[begin : prompt.shared_tokens]) == TEXT.encode()[: prompt.shared_tokens - begin]
    assert chat(model, f"{TEXT} Be kind.").shared_tokens == 64
    assert completion(model, f"{TEXT} Why?").shared_tokens == 48


def test_nothing_is_shared_of_a_prompt_that_begins_with_less_than_all_of_it(dated: Tokenizer) -> None:
    model = served(dated, TEXT, now=DAY)
    changed = TEXT[:40] + "X" + TEXT[41:]
    for text in (changed, TEXT[:40], f" {TEXT}"):
        assert chat(model, text).shared_tokens == completion(model, text).shared_tokens == 0
    user_first = ChatRequest.model_validate({"messages": [{"role": "user", "content": f"x{TEXT}"}]})
    assert plan_chat(user_first, model).prompts[0].shared_tokens == 0


def test_the_longest_text_counts_and_tokens_are_compared(dated: Tokenizer) -> None:
    longer = f"{TEXT} {TEXT}"
    model = served(dated, TEXT, longer, now=DAY)
    assert completion(model, f"{longer} Why?").shared_tokens == 112
    assert completion(model, f"{TEXT} Why?").shared_tokens == 48
    tokens = TokensRequest.model_validate({"token_ids": list(longer.encode()), "sampling_params": {}})
    assert plan_tokens(tokens, model).prompts[0].shared_tokens == 112
    cut = CompletionRequest.model_validate({"prompt": TEXT, "truncate_prompt_tokens": 50})
    assert plan_completion(cut, model).prompts[0].shared_tokens == 0  # its beginning is cut off


def test_a_template_may_write_the_date(dated: Tokenizer) -> None:
    shared = SharedPrompts({"a": TEXT}, dated)
    draw = random.Random(0)
    for _ in range(20):  # streams that go on may be of another day
        day = DAY + datetime.timedelta(days=draw.randint(0, 5))
        assert chat(ServedModel(dated, 512, now=day, shared_prompts=shared), TEXT).shared_tokens == 64
    assert len(shared._by_day) == 3
    yesterday = chat(served(dated, TEXT, now=DAY - datetime.timedelta(days=1)), TEXT)
    assert shared.shared_tokens(yesterday.token_ids, DAY) == 0


def test_a_client_cannot_change_what_is_shared(toy_tokenizer: Tokenizer) -> None:
    # Not even by a text that looks like the beginning of a message.
    model = served(toy_tokenizer, TEXT)
    prompt = chat(model, TEXT, "my PIN is 4711")
    assert prompt.shared_tokens == (len("<|system|>") + len(TEXT)) // BASE_TOKENS * BASE_TOKENS
    shared = bytes(prompt.token_ids[: prompt.shared_tokens])
    assert f"<|system|>{TEXT}".encode().startswith(shared)
    assert USER in prompt.token_ids[prompt.shared_tokens :]


@pytest.mark.parametrize("template", [NO_SYSTEM, None])
def test_texts_that_a_template_refuses_are_shared_in_completions_alone(
    tmp_path: Path, template: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = served(Tokenizer(write_toy_model(tmp_path / "model", chat_template=template)), TEXT)
    assert completion(model, f"{TEXT} Why?").shared_tokens == 48
    assert ("chats do not share [0]" in caplog.text) == (template is not None)


def test_a_text_that_is_too_short_is_told(toy_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = served(toy_tokenizer, "Be", TEXT)
    assert [record.message for record in caplog.records] == [
        "--shared-prompts: nothing of [0] is shared: it has too few tokens for a block"
    ]
    assert completion(model, TEXT).shared_tokens == 48


def test_a_file_names_texts_and_files(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_text(f"{TEXT} ünïcödé\n\n")
    file = tmp_path / "shared.toml"
    file.write_text('[a]\ntext = """\n  One.\n"""\n[b]\nfile = "own.txt"\n')
    assert read_shared_prompts(str(file)) == {"a": "  One.", "b": f"{TEXT} ünïcödé"}
    assert read_shared_prompts("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[a]\n", "[a] needs either text or file"),
        ('[a]\ntext = "x"\nfile = "y"', "[a] needs either text or file"),
        ('[a]\nfile = "none.txt"', "none.txt cannot be read"),
        ('[a]\ntext = " \\n"', "[a] has no text"),
        ('[a]\nsystem = "x"', "[a] system: Extra inputs"),
        ("[a]\ntext = 5", "[a] text: Input should be a valid string"),
        ('a = "x"', "a must be the heading of a prompt, [a]"),
        ("[a", "is not valid TOML"),
    ],
)
def test_a_file_that_is_not_valid_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "shared.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_shared_prompts(str(file))
    assert f"--shared-prompts {file}" in str(caught.value)
    assert message in str(caught.value)

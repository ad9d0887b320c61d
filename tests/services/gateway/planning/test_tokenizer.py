from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from paceline.core.errors import ConfigError, InvalidRequestError, ModelError
from paceline.services.gateway.planning import tokenizer as tokenizer_module
from paceline.services.gateway.planning.tokenizer import SamplingDefaults, Tokenizer
from tests.services.gateway.toy_model import END, VOCAB_SIZE, write_toy_model

TEXTS = [
    "Hello, world!",
    " two  spaces\n\nand a tab\t",
    "naïve ✓ 你好 👩‍👩‍👧",
    "<|im_start|>user\n",
    "",
    "1234567890",
    "def f(x):\n    return x",
]
TURNS = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "Hi <|im_end|> there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "How are you?"},
]


def chat(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> str:
    settings = {"add_generation_prompt": True, "continue_final_message": False, "template_kwargs": None, **options}
    return tokenizer.render_chat(messages, **settings)


def test_encodes_and_decodes(toy_tokenizer: Tokenizer) -> None:
    ids = toy_tokenizer.encode("é<|end|>", add_special_tokens=True)
    assert ids == [0xC3, 0xA9, END]
    assert toy_tokenizer.decode(ids) == "é<|end|>"
    assert toy_tokenizer.token_string(END) == "<|end|>"


def test_the_vocabulary_is_as_wide_as_the_logits(toy_tokenizer: Tokenizer) -> None:
    assert toy_tokenizer.vocab_size == VOCAB_SIZE


def test_half_a_surrogate_pair_is_refused(toy_tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="Unicode"):
        toy_tokenizer.encode("\ud800", add_special_tokens=True)


def test_ends_of_sequence_come_from_both_configs(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert Tokenizer(folder).eos_token_ids == {7, END}
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [8, 9], "vocab_size": 280}}))
    assert Tokenizer(folder).eos_token_ids == {8, 9, END}
    assert Tokenizer(folder).vocab_size == 280
    (folder / "config.json").write_text(json.dumps({"text_config": None, "vocab_size": 280}))
    assert Tokenizer(folder).vocab_size == 280
    (folder / "config.json").write_text(json.dumps({"vocab_size": "many"}))
    with pytest.raises(ModelError, match="vocab_size must be a positive whole number, not 'many'"):
        Tokenizer(folder)


def test_ends_that_the_model_cannot_choose_are_left_out(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 7, 10**6]}))
    assert Tokenizer(folder).eos_token_ids == {7, END}


@pytest.mark.parametrize("value", ["x", 5.0, [1.5], [[1]], True])
def test_ends_that_are_no_token_ids_are_refused(tmp_path: Path, value: object) -> None:
    folder = write_toy_model(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id must be a token id or a list of them"):
        Tokenizer(folder)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": value}))
    with pytest.raises(ModelError, match=r"^config\.json: eos_token_id must be a token id or a list of them"):
        Tokenizer(folder)


def test_default_sampling_comes_from_the_generation_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_toy_model(tmp_path, temperature=0.6, top_k=20, top_p=None, do_sample=True))
    assert tokenizer.defaults == SamplingDefaults(temperature=0.6, top_k=20)


def test_the_generation_config_can_be_ignored_except_for_its_ends(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path, temperature=0.6, max_new_tokens=9)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": 7}))
    tokenizer = Tokenizer(folder, generation_config="none")
    assert tokenizer.defaults == SamplingDefaults()
    assert tokenizer.eos_token_ids == {7, END}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "hot"),
        ("top_p", -0.1),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_k", float("nan")),
        ("min_p", 2),
        ("max_new_tokens", 0),
        ("max_new_tokens", 5.5),
    ],
)
def test_a_generation_config_that_no_request_could_have_is_refused(tmp_path: Path, name: str, value: object) -> None:
    kind = "a whole number" if name in ("top_k", "max_new_tokens") else "a number"
    with pytest.raises(ModelError, match=rf"{name} must be {kind} from .*--generation-config none"):
        Tokenizer(write_toy_model(tmp_path, **{name: value}))


def test_whole_numbers_of_a_generation_config_may_have_a_point(tmp_path: Path) -> None:
    defaults = Tokenizer(write_toy_model(tmp_path, top_k=20.0, max_new_tokens=5.0)).defaults
    assert (repr(defaults.top_k), repr(defaults.max_new_tokens)) == ("20", "5")


def test_default_sampling_without_a_say_is_that_of_openai(toy_tokenizer: Tokenizer) -> None:
    assert toy_tokenizer.defaults == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0)


def test_a_base_model_says_what_to_do_instead_of_chat(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"/v1/completions.*--chat-template"):
        chat(Tokenizer(write_toy_model(tmp_path, chat_template=None)), TURNS)


def test_a_template_may_come_from_four_places(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path, chat_template=None)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    assert chat(Tokenizer(folder), TURNS) == "processor"
    folder = write_toy_model(tmp_path, chat_template="config")
    assert chat(Tokenizer(folder), TURNS) == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert chat(Tokenizer(folder), TURNS) == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert chat(Tokenizer(folder, tmp_path / "own.jinja"), TURNS) == "own"


def test_of_several_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    named = [{"name": "rag", "template": "rag"}, {"name": "default", "template": "{{ eos_token }}"}]
    settings = {"chat_template": named, "eos_token": {"content": "<|end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert chat(Tokenizer(folder), TURNS) == "<|end|>"


@pytest.mark.parametrize("place", ["list", "files", "both"])
def test_conversations_with_tools_have_their_own_template_as_in_transformers(tmp_path: Path, place: str) -> None:
    folder = write_toy_model(tmp_path, chat_template="old")
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    texts = {"rag": "rag", "default": "D{{ messages[0].content }}", "tool_use": "T{{ tools[0].function.name }}"}
    if place != "files":
        listed = {name: f"old {text}" if place == "both" else text for name, text in texts.items()}
        named = [{"name": name, "template": text} for name, text in listed.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named, "eos_token": "<|end|>"}))
    if place != "list":
        (folder / "chat_template.jinja").write_text(texts["default"])
        (folder / "additional_chat_templates").mkdir()
        for name in ("rag", "tool_use"):
            (folder / "additional_chat_templates" / f"{name}.jinja").write_text(texts[name])
    own, reference = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for given, expected in ((None, "DHi"), (tools, "Tf")):
        turns = [{"role": "user", "content": "Hi"}]
        assert chat(own, turns, tools=given) == expected
        assert reference.apply_chat_template(turns, tools=given, tokenize=False) == expected
    assert (own.chat_template_source, own.tool_template_source) == (texts["default"], texts["tool_use"])
    (tmp_path / "own.jinja").write_text("own")
    assert chat(Tokenizer(folder, tmp_path / "own.jinja"), TURNS, tools=tools) == "own"


def test_a_prompt_is_never_cut_by_settings_of_the_training(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    assert len(Tokenizer(folder).encode("four", add_special_tokens=True)) == 4


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; MODEL must be"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"cannot read .*tokenizer\.json"):
        Tokenizer(tmp_path)
    folder = write_toy_model(tmp_path / "toy")
    with pytest.raises(ConfigError, match=r"absent\.jinja"):
        Tokenizer(folder, tmp_path / "absent.jinja")
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"generation_config\.json must hold a JSON object"):
        Tokenizer(folder)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma-3-270m"])
def test_a_real_model_is_read_as_transformers_reads_it(name: str, real_model: Callable[[str], Path]) -> None:
    folder = real_model(name)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special)
        joined = b"".join(map(ours.vocabulary.token_bytes, ids)).decode()
        assert joined == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert theirs.eos_token_id in ours.eos_token_ids


@pytest.mark.model
def test_a_real_chat_template_is_rendered_as_transformers_renders_it(real_model: Callable[[str], Path]) -> None:
    folder = real_model("smollm2-135m-instruct")
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for messages in (TURNS, TURNS[1:], TURNS[:3]):
        for options in (
            {"add_generation_prompt": True},
            {"add_generation_prompt": False, "continue_final_message": True},
        ):
            text = chat(ours, messages, **options)
            assert text == theirs.apply_chat_template(messages, tokenize=False, **options)
            expected = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)["input_ids"]
            assert ours.encode(text, add_special_tokens=False) == expected


def test_long_texts_become_the_same_tokens_up_to_a_limit(toy_model: Path) -> None:
    own = Tokenizer(toy_model, max_characters=tokenizer_module.LONG_CHARACTERS + 1)
    text = "a" * tokenizer_module.LONG_CHARACTERS + "b"
    assert own.encode(text, add_special_tokens=False) == [*text.encode()]
    with pytest.raises(InvalidRequestError, match="--max-text-characters") as caught:
        own.encode(text + "c", False, "messages")
    assert caught.value.param == "messages"


def test_the_fields_that_a_template_names_are_searched_once(tmp_path: Path) -> None:
    template = """{{ m['source_lang'] }} {{ m["a-b"] }} {{ m.plain }} {{ 'it' ~ "'s" }}"""
    own = Tokenizer(write_toy_model(tmp_path / "toy", chat_template=template))
    named = [name for name in ("source_lang", "a-b", "plain", "it", "source") if own.names_fields({name}, False)]
    assert named == ["source_lang", "a-b", "it"]
    assert not own.names_fields({str(number) for number in range(1000)}, False)
    assert own._quoted_names.cache_info().misses == 1

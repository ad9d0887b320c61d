"""A small real tokenizer in a Hugging Face folder: byte-level BPE, one token per byte, and three special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

END, USER, ASSISTANT = 256, 257, 258
VOCAB_SIZE = 300
"""More ids than the tokenizer has tokens, as in a padded vocabulary."""
_NAMES = {END: b"<|end|>", USER: b"<|user|>", ASSISTANT: b"<|assistant|>"}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

AGENT_TEMPLATE = """
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>
    {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
    {{- message.content }}
    {%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""
"""A chat template with tools in the form of Hermes, and with reasoning."""

REASONING_TEMPLATE = """
{%- set last = namespace(user=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}<|{{ message.role }}|>
    {%- if message.role == 'assistant' and loop.index0 > last.user %}<think>{{ message.reasoning_content }}</think>
    {%- endif %}
    {{- message.content }}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>
    {%- if enable_thinking is defined and not enable_thinking %}</think>{% endif %}
{%- endif %}"""
"""A chat template that begins answers with a mark of reasoning, and drops mark and reasoning of earlier turns."""


def write_toy_model(folder: Path, *, chat_template: str | None = CHAT_TEMPLATE, **generation_config: Any) -> Path:
    """Write the tokenizer's files to a new folder and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE(_byte_vocabulary(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": END}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END], **generation_config}))
    return folder


MEDIA_TOKENS = ("<|image>", "<|image|>", "<image|>", "<|video|>", "<|audio>", "<|audio|>", "<audio|>")
BOI, IMAGE, EOI, VIDEO, BOA, AUDIO, EOA = range(259, 259 + len(MEDIA_TOKENS))
MEDIA_TEMPLATE = """\
{%- for message in messages -%}
<|{{ message['role'] }}|>
    {%- if message['content'] is string -%}
        {{ message['content'] }}
    {%- else -%}
        {%- for part in message['content'] -%}
            {%- if part['type'] == 'text' -%}
                {{ part['text'] | trim }}
            {%- elif part['type'] == 'image' -%}
                {{ '<|image|>' }}
            {%- elif part['type'] == 'video' -%}
                {{ '<|video|>' }}
            {%- elif part['type'] == 'audio' -%}
                {{ '<|audio|>' }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
"""As Gemma 4's template in all that concerns media."""


def write_toy_media_model(folder: Path) -> Path:
    """Write the files of a toy model that takes images, videos and audio as Gemma 4 does, and return the folder."""
    write_toy_model(folder, chat_template=MEDIA_TEMPLATE)
    _add_tokens(folder, MEDIA_TOKENS)
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": {"vocab_size": VOCAB_SIZE, "eos_token_id": END},
        "vision_config": {"patch_size": 16},
        "audio_config": {"hidden_size": 8},
        "boi_token_id": BOI,
        "image_token_id": IMAGE,
        "eoi_token_id": EOI,
        "video_token_id": VIDEO,
        "boa_token_id": BOA,
        "audio_token_id": AUDIO,
        "eoa_token_index": EOA,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(259, 259 + len(VISION_TOKENS))
VISION_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message.role + '|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if 'image' in part or 'image_url' in part or part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'video' in part or part.type == 'video' %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}"""
"""As Qwen 3-VL's template in all that concerns media."""


def write_toy_vision_model(folder: Path) -> Path:
    """Write the files of a toy model that takes images and videos as Qwen 3-VL does, and return the folder."""
    write_toy_model(folder, chat_template=VISION_TEMPLATE)
    _add_tokens(folder, VISION_TOKENS)
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {"vocab_size": VOCAB_SIZE, "eos_token_id": END},
        "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
        "vision_start_token_id": VISION_START,
        "vision_end_token_id": VISION_END,
        "image_token_id": IMAGE_PAD,
        "video_token_id": VIDEO_PAD,
    }
    (folder / "config.json").write_text(json.dumps(config))
    pixels = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    images = {"size": {"shortest_edge": 4096, "longest_edge": 1 << 24}, **pixels}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {"size": {"shortest_edge": 4096, "longest_edge": 24 << 20}, **pixels}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def _add_tokens(folder: Path, tokens: Iterable[str]) -> None:
    """Add special tokens to the tokenizer in a folder."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([*tokens])
    tokenizer.save(str(folder / "tokenizer.json"))


def text_of(token_ids: Iterable[int]) -> str:
    """Return the text of tokens, special tokens included."""
    return b"".join(_NAMES.get(each) or bytes([each]) for each in token_ids).decode()


def _byte_vocabulary() -> dict[str, int]:
    """Return GPT-2's alphabet in the order of its bytes, so that a token's id equals its byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte) if byte in printable else chr(256 + others.index(byte)): byte for byte in range(256)}

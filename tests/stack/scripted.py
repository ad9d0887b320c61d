"""A model that writes given texts: its next token depends on the position alone.

So a test of parsers, grammars and streams chooses what the model says, on a real stack. A prompt that contains the text
lets prompt lookup draft it, and the drafts are accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END = "<|im_end|>"
POSITIONS = 1536
SPACE = 256
"""Positions for each script: its prompt ends where its place begins, so a prompt may have this many tokens."""

_TEMPLATE = (
    "{% if tools %}{# <tool_call> #}{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    "{% if false %}<think>{% endif %}"
)


def script_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token for each byte and each marker."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in MARKERS])
    return tokenizer


def save_scripted(folder: Path, scripts: Mapping[str, str]) -> None:
    """Save a checkpoint that writes `scripts[name]` after a prompt from `prompt_for`, and then ends."""
    tokenizer = script_tokenizer()
    vocabulary, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(END)
    config = transformers.GPT2Config(
        vocab_size=vocabulary,
        n_positions=POSITIONS,
        n_embd=POSITIONS,
        n_layer=1,
        n_head=16,
        n_inner=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
    )
    model = transformers.GPT2LMHeadModel(config)
    head = torch.zeros(vocabulary, POSITIONS)
    head[end] = 1.0
    for index, text in enumerate(scripts.values()):
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, end]
        assert len(ids) <= SPACE
        for position, token in enumerate(ids, _start(index) - 1):
            head[token, position] = 2.0
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(POSITIONS) * 100)
        model.transformer.ln_f.weight.fill_(1)
        model.lm_head.weight.copy_(head)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "do_sample": False}))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": POSITIONS,
        "chat_template": _TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def prompt_for(scripts: Mapping[str, str], name: str) -> str:
    """Return a prompt after which the model writes `scripts[name]`. It ends with this text, so that drafts find it."""
    text = scripts[name]
    length = len(script_tokenizer().encode(text, add_special_tokens=False).ids)
    return "." * (_start([*scripts].index(name)) - length - 1) + text + "\n"


def _start(index: int) -> int:
    """Return the number of tokens of a script's prompt."""
    return SPACE * (index + 1)

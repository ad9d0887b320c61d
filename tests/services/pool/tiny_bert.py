"""A tiny random BERT in the form of sentence-transformers, with a tokenizer of words of one letter."""

from __future__ import annotations

import json
import string
from pathlib import Path

import tokenizers
import torch
import transformers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = tuple(string.ascii_lowercase)
MAX_TOKENS = 64
SIZE = 32


def write_tiny_bert(folder: Path) -> transformers.BertModel:
    """Write a model whose embeddings are means of the length 1, and return the `transformers` model."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=SIZE,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_TOKENS,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = transformers.BertModel(config).eval()
    model.save_pretrained(folder)
    _write_tokenizer(folder, vocabulary)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    listed = [
        {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for name, path, kind in modules
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": SIZE, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return model


def _write_tokenizer(folder: Path, vocabulary: dict[str, int]) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def token_ids(text: str) -> list[int]:
    """Return the tokens of a text of letters between spaces, with special tokens."""
    names = (*SPECIAL, *WORDS)
    return [names.index(word) for word in ("[CLS]", *text.split(), "[SEP]")]


def expected_embedding(model: transformers.BertModel, text: str) -> torch.Tensor:
    """Return the embedding of a text by `transformers`: fp32 [SIZE]."""
    with torch.no_grad():
        states = model(input_ids=torch.tensor([token_ids(text)])).last_hidden_state
    return torch.nn.functional.normalize(states[0].mean(0), dim=0)

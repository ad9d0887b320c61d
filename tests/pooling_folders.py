"""Files of sentence-transformers about pooling, for tiny checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file

Dense = Callable[[torch.Tensor], torch.Tensor]


def write_modules(
    folder: Path,
    mode: str = "",
    *,
    normalize: bool = False,
    include_prompt: bool = True,
    dense: tuple[int, int] | None = None,
    score_tokens: tuple[int, int] | None = None,
    **settings: object,
) -> Dense:
    """Write modules.json and the modules that it names. Return the Dense layer with its activation, if there is one.

    Args:
        mode: of the Pooling module, such as "mean" or "lasttoken"; "" without one.
        dense: sizes of a Dense layer with tanh after pooling.
        score_tokens: ids of the true and the false token of a module LogitScore.
        settings: of config_sentence_transformers.json.
    """
    kinds: list[tuple[str, dict[str, object]]] = [("Transformer", {})]
    layer: Dense = torch.nn.Identity()
    if mode:
        flag = f"pooling_mode_{mode}_tokens" if mode in ("mean", "max") else f"pooling_mode_{mode}"
        flag = "pooling_mode_cls_token" if mode == "cls" else flag.replace("weightedmean", "weightedmean_tokens")
        kinds.append(("Pooling", {flag: True, "include_prompt": include_prompt}))
    if dense is not None:
        kinds.append(("Dense", {"in_features": dense[0], "out_features": dense[1], "bias": False,
                                "activation_function": "torch.nn.modules.activation.Tanh"}))  # fmt: skip
    if normalize:
        kinds.append(("Normalize", {}))
    if score_tokens is not None:
        kinds.append(("LogitScore", {"true_token_id": score_tokens[0], "false_token_id": score_tokens[1]}))
    listed = []
    for index, (kind, values) in enumerate(kinds):
        path = f"{index}_{kind}" if index else ""
        listed.append({"idx": index, "name": str(index), "path": path,
                       "type": f"sentence_transformers.models.{kind}"})  # fmt: skip
        if index:
            (folder / path).mkdir()
            (folder / path / "config.json").write_text(json.dumps(values))
        if kind == "Dense" and dense is not None:
            weight = torch.randn(dense[1], dense[0], generator=torch.Generator().manual_seed(3)) * dense[0] ** -0.5
            save_file({"linear.weight": weight}, folder / path / "model.safetensors")

            def layer(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
                return torch.tanh(x @ weight.T)

    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return layer


LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
_SPECIAL = ("<pad>", "<unk>", "<end>", "yes", "no", "query", "document")
YES, NO = 3, 4
"""Ids of these words."""


def write_letters(folder: Path, end: bool = True) -> Callable[[str], list[int]]:
    """Write a tokenizer of words that are letters. Return a function from a text to its token ids.

    Args:
        end: whether the tokenizer puts a special token at the end of each text, as that of Qwen3-Embedding does.
    """
    vocabulary = {word: index for index, word in enumerate((*_SPECIAL, *LETTERS))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(["<pad>", "<unk>", "<end>"])
    if end:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="$A <end>", pair="$A $B <end>", special_tokens=[("<end>", vocabulary["<end>"])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return lambda text: tokenizer.encode(text).ids

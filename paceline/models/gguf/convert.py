"""The converter of a GGUF file to a folder: `python -m paceline.models.gguf.convert SOURCE TARGET [MMPROJ]`.

It is a process of its own, so that a parser that crashes on a damaged file ends no other process. It imports neither
torch nor transformers, which take seconds. If it fails, it exits with 1 and prints the reason to standard output.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from gguf import GGUFReader

from paceline.core.errors import ModelError
from paceline.core.progress import Progress
from paceline.models.config import read_config
from paceline.models.files.content import read_content
from paceline.models.gguf.convert_dense import ARCHITECTURES, dense_config, dense_sources
from paceline.models.gguf.convert_gemma4 import GEMMA4_TABLES, gemma4_config, gemma4_sources
from paceline.models.gguf.convert_mmproj import (
    check_mmproj,
    preprocessing,
    text_sources,
    vision_sources,
    with_vision,
)
from paceline.models.gguf.convert_rope import ROPE_FACTORS, scales_rope
from paceline.models.gguf.convert_weights import TensorSource, write_weights
from paceline.models.gguf.metadata import Metadata, check_parts, check_sizes, check_tokenizer
from paceline.models.gguf.parts import link_names, part_names
from paceline.models.gguf.reader import DamagedError, open_gguf
from paceline.models.gguf.tokenizer import SPLITS, write_tokenizer

_GEMMA4 = "gemma4"
_PROGRESS_SECONDS = 0.25

# Head sizes that `convert_dense` assumes, or from which the reader of a config computes the scale of attention.
_HEAD_DIMS = {"gemma3": 256, "qwen3": 128}

# Values that `convert_dense` assumes for a Gemma 3, whatever its file says.
_OF_GEMMA3 = {"rope.freq_base_swa": 10_000.0, "attention.sliding_window_pattern": 6, "final_logit_softcapping": 0.0}

# Ends of the names of biases that are converted.
_BIASES = {"qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias")}

# Tokens after which a Gemma 4's answer ends. A file names at most two of them.
_GEMMA4_STOPS = ("<turn|>", "<|tool_response>")


def convert_gguf(source: Path, target: Path, mmproj: Path | None = None) -> None:
    """Write config, generation config, tokenizer, chat template, small tensors and a reference to the file to `target`.

    If the file is split, `source` is its first part, and the others are beside it.

    Args:
        mmproj: the GGUF file of an encoder, whose tensors are copied; None if the model reads text alone.

    Raises:
        ModelError: the file is not a GGUF file, or the conversion would lose something that the model needs.
    """
    with _named(source):
        parts = part_names(source.name)
        readers = [open_gguf(source.parent / name) for name in parts]
        check_parts(parts, readers)
        metadata = Metadata(readers[0], readers[1:])
        if problem := _problem(metadata):
            raise ModelError(problem)
        check_tokenizer(metadata)
        if metadata.architecture != _GEMMA4:
            check_sizes(metadata)
        target.mkdir(exist_ok=True)
        _write_tokenizer(readers[0], metadata, target)
        links = link_names(len(parts))
        content = read_content({link: source.parent / name for link, name in zip(links, parts)})
        for file in content.files:
            (target / file.name).unlink(missing_ok=True)
            (target / file.name).symlink_to(file.path)
        _write_model(readers, metadata, mmproj, target, {file.name: file.digest for file in content.files})
        content.check()
    for path in target.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o644)  # safetensors writes private files, but users may share a cache
    read_config(target)


def _write_model(
    readers: Sequence[GGUFReader],
    metadata: Metadata,
    mmproj: Path | None,
    target: Path,
    digests: Mapping[str, str],
) -> None:
    """Write the config and the weights.

    Args:
        mmproj: the encoder's file, if there is one.
        digests: digest of each part, by the name of the link to it.
    """
    tensors = {tensor.name: tensor for reader in readers for tensor in reader.tensors}
    file_of = {tensor.name: number for number, reader in enumerate(readers) for tensor in reader.tensors}
    tables: Collection[str] = ()
    if metadata.architecture == _GEMMA4:
        sources, config, tables = gemma4_sources(tensors), gemma4_config(metadata, tensors), GEMMA4_TABLES
    else:
        config = dense_config(metadata, tensors)
        sources = dense_sources(metadata, config, tensors)
    if mmproj is not None:
        tokens = readers[0].fields["tokenizer.ggml.tokens"].contents()
        config, vision = _read_encoder(mmproj, metadata, config, tokens)
        sources, tables = text_sources(sources) | vision, vision.keys()
        (target / "preprocessor_config.json").write_text(json.dumps(preprocessing(config), indent=2))
    (target / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(sources, target, _Shown(), digests, file_of, tables)


def _read_encoder(
    mmproj: Path, text: Metadata, config: Mapping[str, Any], tokens: Sequence[str]
) -> tuple[Mapping[str, Any], dict[str, TensorSource]]:
    """Return the config of the whole model, and the encoder's tensors by their names in safetensors."""
    try:
        reader = open_gguf(mmproj)
        metadata = Metadata(reader)
        check_mmproj(metadata, text)
        config = with_vision(config, metadata, tokens)
        return config, vision_sources(metadata, config, {tensor.name: tensor for tensor in reader.tensors})
    except ModelError as error:
        raise ModelError(f"{mmproj.name}: {error}") from error


def _write_tokenizer(reader: GGUFReader, metadata: Metadata, target: Path) -> None:
    """Write the tokenizer, the chat templates, and the tokens after which an answer ends."""
    write_tokenizer(reader, metadata, target)
    stops = set(_stop_token_ids(metadata))
    if metadata.architecture == _GEMMA4:
        named = {token: number for number, token in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
        stops |= {named[token] for token in _GEMMA4_STOPS if token in named}
    generation = {"eos_token_id": sorted(stops)} if stops else {}
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2))


class _Shown:
    """Prints how much of the model is written, as lines that begin with "\\r", no more than a few each second."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._next = 0.0

    def __call__(self, written: int, total: int) -> None:
        now = time.monotonic()
        if now < self._next and written < total:
            return
        self._progress = self._progress or Progress(total, partial(print, flush=True))
        self._progress.show(written)
        self._next = now + _PROGRESS_SECONDS


@contextmanager
def _named(source: Path) -> Iterator[None]:
    """Add the file's name, and what to do, to a ModelError that says why it cannot be converted."""
    try:
        yield
    except DamagedError as error:
        raise ModelError(
            f"{source.name} is damaged or not a GGUF file: {error}; download it again, or convert the model again with "
            "llama.cpp's convert_hf_to_gguf.py"
        ) from error
    except ModelError as error:
        raise ModelError(f"{source.name} cannot be converted: {error}; use the model's Hugging Face folder") from error


def _problem(metadata: Metadata) -> str:
    """Return why a file cannot be converted without loss; "" if it can, as far as its metadata tell."""
    architecture = metadata.architecture
    known = (*ARCHITECTURES, _GEMMA4)
    if architecture == "clip":
        return "it has encoders of images or audio, and no text model; give it as --mmproj beside the model's file"
    if architecture not in known:
        return f"its architecture {architecture} is not supported (supported are: {', '.join(known)})"
    if architecture == _GEMMA4 and scales_rope(metadata):
        return "its rope scaling would be lost"
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        split = metadata.get("tokenizer.ggml.pre", "none")
        if split not in SPLITS:
            return f"how its tokenizer splits text ({split}) would be lost"
    return "" if architecture == _GEMMA4 else _lost(architecture, metadata)


def _lost(architecture: str, metadata: Metadata) -> str:
    """Return what `convert_dense` would lose without a word; "" if nothing."""
    head_dim = metadata.get(f"{architecture}.attention.key_length")
    if architecture != "llama" and ROPE_FACTORS in metadata.tensors:
        return "its rope scaling would be lost"
    if _HEAD_DIMS.get(architecture, head_dim) != head_dim:
        return "its head size, and so its attention scale, would be lost"
    if architecture != "gemma3" and f"{architecture}.attention.sliding_window" in metadata:
        return "its attention window would be lost"
    if metadata.get("general.name") == "mistral":
        return "whether its attention has a window is not in the file"
    kept = _BIASES.get(architecture, ())
    lost = sorted(name for name in metadata.tensors if name.endswith(".bias") and not name.endswith(kept))
    if lost:
        return f"its biases ({lost[0]}) would be lost"
    if architecture == "gemma3" and (name := _lost_of_gemma3(metadata)):
        return f"its {name} would be lost"
    return ""


def _lost_of_gemma3(metadata: Metadata) -> str:
    """Return a key of a Gemma 3 whose value is not the one that `convert_dense` assumes; "" if there is none."""
    for name, granted in _OF_GEMMA3.items():
        if metadata.get(f"gemma3.{name}", granted) != granted:
            return name
    return "" if "gemma3.attention.sliding_window" in metadata else "attention without a window"


def _stop_token_ids(metadata: Metadata) -> list[int]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return sorted({int(metadata[name]) for name in names if name in metadata})


def main() -> int:
    source, target, *mmproj = map(Path, sys.argv[1:])
    try:
        convert_gguf(source, target, *mmproj)
    except ModelError as error:
        print(error)
        return 1
    except Exception as error:
        # Libraries raise exceptions of any type, and some of their texts fill a screen.
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        print(f"{source.name} cannot be converted: {reason}; use the model's Hugging Face folder")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

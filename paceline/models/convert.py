"""The converter of a GGUF file to a Hugging Face folder: `python -m paceline.models.convert SOURCE TARGET`.

It is a process of its own. So the memory of transformers is free when it ends, and a parser that crashes on a damaged
file ends no other process. If it fails, it exits with 1 and prints the reason to standard output.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.core.errors import ModelError
from paceline.models.config import read_config

if TYPE_CHECKING:
    from gguf import GGUFReader

# Architectures that transformers converts and we compute.
_ARCHITECTURES = ("llama", "gemma3", "qwen2", "qwen3", "qwen3moe")

# Head sizes that transformers takes for granted, or from which it takes the scale of attention.
_HEAD_DIMS = {"gemma3": 256, "qwen3": 128}

# Ends of the names of biases that transformers converts.
_BIASES = {"qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias")}

# Rules by which a byte-level vocabulary splits text before merging (`tokenizer.ggml.pre`). transformers restores these.
# For any other rule it would silently split as GPT-2 does: the model would see token ids that it was not trained on.
_SPLITS_RESTORED = ("gpt-2", "llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
_SPLITS_DIGITS = ("smollm",)
# Qwen's vocabulary expects composed characters (NFC), which transformers does not restore.
_SPLITS_COMPOSED = ("qwen2",)


def convert_gguf(source: Path, target: Path) -> None:
    """Write config, generation config, tokenizer, chat template, bf16 safetensors and the file's blocks to `target`.

    Raises:
        ModelError: the file is not a GGUF file, or the conversion would lose something that the model needs.
    """
    reader = _open(source)
    metadata = _read_metadata(source, reader)
    _refuse_lossy(source, metadata)
    # These imports are slow, and not needed to refuse a file.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    from paceline.models.convert_blocks import write_blocks

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if metadata.get("tokenizer.ggml.pre") in _SPLITS_DIGITS:
        _split_digits(tokenizer)
    if metadata.get("tokenizer.ggml.pre") in _SPLITS_COMPOSED:
        _compose_characters(tokenizer)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=source.name, dequantize=True),
        **_overlooked(metadata),
    )
    # The weights are not quantized any more, whatever the file's type was.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    stops = _stop_token_ids(metadata)
    if stops:
        model.generation_config.eos_token_id = stops
    # transformers saves each matrix of an expert under a name of its own, but not if the model comes from a GGUF file.
    model._weight_conversions = None
    model.save_pretrained(target)
    write_blocks(reader, metadata["general.architecture"], model, target)
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        file.chmod(0o644)  # safetensors writes private files, but users may share a cache
    read_config(target)


def _open(source: Path) -> GGUFReader:
    from gguf import GGUFReader

    with _named(source):
        return GGUFReader(source)


def _read_metadata(source: Path, reader: GGUFReader) -> dict[str, Any]:
    """Return the scalars of a GGUF file, and the names of its tensors under "tensors"."""
    with _named(source):
        metadata = {name: field.contents() for name, field in reader.fields.items() if len(field.data) == 1}
        return {**metadata, "tensors": {tensor.name for tensor in reader.tensors}}


@contextmanager
def _named(source: Path) -> Iterator[None]:
    """Turn the exceptions of GGUF's reader into a ModelError that names the file."""
    try:
        yield
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise ModelError(f"{source.name} is damaged or not a GGUF file: {error}") from error


def _overlooked(metadata: dict[str, Any]) -> dict[str, int]:
    """Return fields of config.json that transformers does not read from the file's metadata."""
    size = metadata.get("qwen3moe.expert_feed_forward_length")
    return {} if size is None else {"moe_intermediate_size": int(size)}


def _refuse_lossy(source: Path, metadata: dict[str, Any]) -> None:
    architecture = str(metadata.get("general.architecture"))
    head_dim = metadata.get(f"{architecture}.attention.key_length")
    problem = ""
    if architecture not in _ARCHITECTURES:
        problem = f"its architecture {architecture} is not supported (supported are: {', '.join(_ARCHITECTURES)})"
    elif metadata.get("split.count", 1) > 1:
        problem = "it is one part of several"
    elif (
        metadata.get(f"{architecture}.rope.scaling.type", "none") != "none"
        or "rope_freqs.weight" in metadata["tensors"]
    ):
        problem = "its rope scaling would be lost"
    elif _HEAD_DIMS.get(architecture, head_dim) != head_dim:
        problem = "its head size, and so its attention scale, would be lost"
    elif architecture != "gemma3" and f"{architecture}.attention.sliding_window" in metadata:
        problem = "its attention window would be lost"
    elif metadata.get("general.name") == "mistral":
        problem = "whether its attention has a window is not in the file"
    elif lost := _lost_biases(architecture, metadata["tensors"]):
        problem = f"its biases ({lost[0]}) would be lost"
    elif metadata.get("tokenizer.ggml.model") == "gpt2":
        split = metadata.get("tokenizer.ggml.pre", "none")
        if split not in (*_SPLITS_RESTORED, *_SPLITS_DIGITS, *_SPLITS_COMPOSED):
            problem = f"how its tokenizer splits text ({split}) would be lost"
    if problem:
        raise ModelError(f"{source.name} cannot be converted: {problem}; use the model's Hugging Face folder")


def _lost_biases(architecture: str, tensors: set[str]) -> list[str]:
    """Return the biases that transformers would leave out without a word."""
    kept = _BIASES.get(architecture, ())
    return sorted(name for name in tensors if name.endswith(".bias") and not name.endswith(kept))


def _compose_characters(tokenizer: Any) -> None:
    from tokenizers import normalizers

    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()


def _split_digits(tokenizer: Any) -> None:
    """Make the tokenizer cut off each digit before it splits the rest of a text: "\\n\\n1" is "\\n\\n" and "1"."""
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _stop_token_ids(metadata: dict[str, Any]) -> list[int]:
    names = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return sorted({int(metadata[name]) for name in names if name in metadata})


def main() -> int:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    try:
        convert_gguf(source, target)
    except ModelError as error:
        print(error)
        return 1
    except Exception as error:
        # transformers lets exceptions of any type of its libraries pass. Only the first line helps a user.
        reason = str(error).strip().split("\n", 1)[0] or type(error).__name__
        print(f"{source.name} cannot be converted: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

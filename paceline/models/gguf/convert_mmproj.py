"""The converter of encoders that llama.cpp keeps in a file beside a model (`mmproj`): the vision tower of Gemma 3."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gguf import ReaderTensor

from paceline.core.errors import ModelError
from paceline.models.gguf.convert_dense import check_tensors
from paceline.models.gguf.convert_weights import TensorSource
from paceline.models.gguf.metadata import Metadata

Config = Mapping[str, Any]

_TEXT = "model.language_model"
"""Prefix of the text model's tensors in a checkpoint that also has encoders."""
_TOWER, _PROJECTOR = "model.vision_tower", "model.multi_modal_projector"
_PATCHES_OF_ROW = 4
"""Number of patches along each side of the square that becomes one row of an encoding, if the file does not say."""
_GREY = [0.5, 0.5, 0.5]
"""The mean and the standard deviation of colors for which the encoder computes."""

_NAMES: Mapping[str, str] = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
"""Names of a layer's parts in GGUF and in safetensors."""


def check_mmproj(metadata: Metadata, text: Metadata) -> None:
    """Check that a file has an encoder that is converted, for this text model.

    Raises:
        ModelError: it has another encoder, or one of another model.
    """
    kind = metadata.get("clip.projector_type", metadata.get("clip.vision.projector_type"))
    if metadata.architecture != "clip":
        raise ModelError(f"its architecture is {metadata.architecture}, and that of files for --mmproj is clip")
    if (kind, text.architecture) != ("gemma3", "gemma3"):
        raise ModelError(
            f"its projector {kind!r:.80} for a {text.architecture} is not supported, only that of Gemma 3 for a Gemma 3"
        )
    for name in ("image_mean", "image_std"):
        if (found := metadata.get(f"clip.vision.{name}", _GREY)) != _GREY:
            raise ModelError(f"its clip.vision.{name} is {found!r:.80}, which would be lost")
    size, wanted = metadata.whole("clip.vision.projection_dim"), text.whole("gemma3.embedding_length")
    if size != wanted:
        raise ModelError(f"its encodings have {size} elements, and the hidden states of the model {wanted}")


def with_vision(config: Config, metadata: Metadata, tokens: Sequence[str]) -> Config:
    """Return the config.json of a model that reads images.

    Args:
        config: that of the text model.
        metadata: those of the encoder, which were checked.
        tokens: the vocabulary.
    """
    place = "clip.vision"
    side, patch = metadata.whole(f"{place}.image_size"), metadata.whole(f"{place}.patch_size")
    patches_of_row = metadata.whole(f"{place}.projector.scale_factor", default=_PATCHES_OF_ROW)
    ids = {token: number for number, token in enumerate(tokens)}
    for token in ("<start_of_image>", "<end_of_image>"):
        if token not in ids:
            raise ModelError(f"the model's tokenizer has no token {token}")
    # The token that stands for a row of an encoding is not in the vocabulary of these files. Any unused one does.
    rows = [token for token in tokens if token.startswith("<unused")]
    row = "<image_soft_token>" if "<image_soft_token>" in ids else rows[-1] if rows else None
    if row is None:
        raise ModelError("the model's tokenizer has no token that could stand for images")
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "dtype": config["dtype"],
        "text_config": {name: value for name, value in config.items() if name != "architectures"},
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": metadata.whole(f"{place}.embedding_length"),
            "intermediate_size": metadata.whole(f"{place}.feed_forward_length"),
            "num_hidden_layers": metadata.whole(f"{place}.block_count"),
            "num_attention_heads": metadata.whole(f"{place}.attention.head_count"),
            "layer_norm_eps": metadata.real(f"{place}.attention.layer_norm_epsilon", 0, 1e-6),
            "image_size": side,
            "patch_size": patch,
        },
        "mm_tokens_per_image": (side // (patch * patches_of_row)) ** 2,
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids[row],
    }


def preprocessing(config: Config) -> Config:
    """Return the preprocessor_config.json of a model that reads images."""
    side = config["vision_config"]["image_size"]
    return {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": side, "width": side}}


def text_sources(sources: Mapping[str, TensorSource]) -> dict[str, TensorSource]:
    """Return the text model's tensors by the names that they have beside encoders."""
    return {f"{_TEXT}{name.removeprefix('model')}" if name.startswith("model.") else name: own
            for name, own in sources.items()}  # fmt: skip


def vision_sources(metadata: Metadata, config: Config, tensors: Mapping[str, ReaderTensor]) -> dict[str, TensorSource]:
    """Return, for each tensor of the encoder in safetensors, its place in the GGUF file.

    Raises:
        ModelError: a tensor is missing, would be lost, or has another shape than the metadata say.
    """
    wanted = dict(_wanted(config))
    inner = config["vision_config"]["intermediate_size"]
    first = metadata.tensors.get("v.blk.0.ffn_up.weight", [0])[0]
    names = {name: name for name in wanted}
    if first != inner:  # older converters swap the two matrices of an MLP
        names = {name: _swapped(name) for name in wanted}
    check_tensors(metadata.tensors, {names[name]: shape for name, (_, shape) in wanted.items()})
    return {
        theirs: TensorSource((tensors[names[name]],), None, 0, -1.0 if "soft_emb_norm" in name else 0.0)
        for name, (theirs, _) in wanted.items()
    }


def _swapped(name: str) -> str:
    if ".ffn_up." in name:
        return name.replace(".ffn_up.", ".ffn_down.")
    return name.replace(".ffn_down.", ".ffn_up.")


def _wanted(config: Config) -> Iterator[tuple[str, tuple[str, list[int]]]]:
    """Yield each tensor of the file: its name, its name in safetensors, its shape."""
    vision, text = config["vision_config"], config["text_config"]["hidden_size"]
    size, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    positions = (vision["image_size"] // patch) ** 2
    embedding = f"{_TOWER}.embeddings"
    yield "v.patch_embd.weight", (f"{embedding}.patch_embedding.weight", [size, 3, patch, patch])
    yield "v.patch_embd.bias", (f"{embedding}.patch_embedding.bias", [size])
    yield "v.position_embd.weight", (f"{embedding}.position_embedding.weight", [positions, size])
    for layer in range(vision["num_hidden_layers"]):
        for name, theirs in _NAMES.items():
            out, into = (inner, size) if name == "ffn_up" else (size, inner) if name == "ffn_down" else (size, size)
            shape = [out] if name.startswith("ln") else [out, into]
            place = f"{_TOWER}.encoder.layers.{layer}.{theirs}"
            yield f"v.blk.{layer}.{name}.weight", (f"{place}.weight", shape)
            yield f"v.blk.{layer}.{name}.bias", (f"{place}.bias", [out])
    for part in ("weight", "bias"):
        yield f"v.post_ln.{part}", (f"{_TOWER}.post_layernorm.{part}", [size])
    yield "mm.input_projection.weight", (f"{_PROJECTOR}.mm_input_projection_weight", [size, text])
    yield "mm.soft_emb_norm.weight", (f"{_PROJECTOR}.mm_soft_emb_norm.weight", [size])

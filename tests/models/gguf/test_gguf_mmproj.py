"""A GGUF file of a Gemma 3 and the file of its encoder are the model of both, as safetensors have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers

from paceline.core.errors import ConfigError, ModelError
from paceline.core.media import MediaKind
from paceline.kernels.reference import ReferenceKernels
from paceline.models.config import read_config, read_encoders
from paceline.models.encoder_config import SiglipConfig
from paceline.models.gguf.convert import convert_gguf
from paceline.models.gguf.file import read_whole
from paceline.models.sources.assets import resolve_model
from paceline.services.gateway.planning.media.processors.families import read_processor
from tests.models.encoder_cases import encode, image, load
from tests.models.gguf_files import SPECIAL, write_gguf
from tests.tiny_checkpoints import write_gemma3_with_vision

VALUE = gguf.GGUFValueType
OF_IMAGES = ["<start_of_image>", "<end_of_image>", "<unused0>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĠĠ", *OF_IMAGES]
TYPES = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - len(OF_IMAGES)) + [3] * len(OF_IMAGES)
SIZES = {"vocab_size": len(TOKENS), "head_dim": 256, "query_pre_attn_scalar": 256, "num_hidden_layers": 1}
TOWER, PROJECTOR = "model.vision_tower", "model.multi_modal_projector"


def write_text(path: Path, reference: Any) -> Path:
    """Write the text model of a Gemma 3 that reads images."""
    state = {name.replace("model.language_model.", "model."): own for name, own in reference.state_dict().items()}
    text = SimpleNamespace(config=reference.config.text_config, state_dict=lambda: state)
    more: dict[str, Any] = {
        "tokenizer__ggml__tokens": (TOKENS, VALUE.ARRAY, VALUE.STRING),
        "tokenizer__ggml__token_type": (TYPES, VALUE.ARRAY, VALUE.INT32),
    }
    return write_gguf(path, text, "gemma3", without="output.weight", **more)  # type: ignore[arg-type]


def write_mmproj(path: Path, reference: Any, swapped: bool = False, without: str = "", **more: Any) -> Path:
    """Write the encoder of a Gemma 3 as llama.cpp does.

    Args:
        swapped: whether the two matrices of an MLP have each other's names, as in older files.
        without: a tensor that the file does not have.
        more: other metadata below `clip.`, with __ instead of dots.
    """
    vision, writer = reference.config.vision_config, gguf.GGUFWriter(path, "clip")
    sizes = {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": vision.num_hidden_layers,
        "attention.head_count": vision.num_attention_heads,
        "projection_dim": reference.config.text_config.hidden_size,
        "projector.scale_factor": 2,
    }
    values: dict[str, Any] = {f"vision.{name}": (value, VALUE.UINT32) for name, value in sizes.items()}
    values["vision.attention.layer_norm_epsilon"] = (vision.layer_norm_eps, VALUE.FLOAT32)
    values |= {f"vision.image_{name}": ([0.5] * 3, VALUE.ARRAY, VALUE.FLOAT32) for name in ("mean", "std")}
    values["projector_type"] = ("gemma3", VALUE.STRING)
    values |= {name.replace("__", "."): value for name, value in more.items()}
    for name, value in values.items():
        writer.add_key_value(f"clip.{name}", *value)
    up, down = ("ffn_down", "ffn_up") if swapped else ("ffn_up", "ffn_down")
    names = {
        "layer_norm1": "ln1",
        "layer_norm2": "ln2",
        "self_attn.out_proj": "attn_out",
        "mlp.fc1": up,
        "mlp.fc2": down,
    }
    names |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"}
    for name, weight in reference.state_dict().items():
        data = weight.float()
        if name.startswith(f"{TOWER}.encoder.layers."):
            _, _, layer, rest = name.removeprefix(f"{TOWER}.").split(".", 3)
            part, kind = rest.rsplit(".", 1)
            theirs = f"v.blk.{layer}.{names[part]}.{kind}"
        elif name.startswith(TOWER):
            theirs = {
                "embeddings.patch_embedding.weight": "v.patch_embd.weight",
                "embeddings.patch_embedding.bias": "v.patch_embd.bias",
                "embeddings.position_embedding.weight": "v.position_embd.weight",
                "post_layernorm.weight": "v.post_ln.weight",
                "post_layernorm.bias": "v.post_ln.bias",
            }[name.removeprefix(f"{TOWER}.")]
        elif name.startswith(PROJECTOR):
            theirs = "mm.input_projection.weight"
            if name.endswith("norm.weight"):
                theirs, data = "mm.soft_emb_norm.weight", data + 1
        else:
            continue
        if theirs != without:
            writer.add_tensor(theirs, np.ascontiguousarray(data.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of a tiny Gemma 3 that reads images, whose weights are numbers of bf16, and the model."""
    folder = tmp_path_factory.mktemp("gemma3")
    reference = write_gemma3_with_vision(folder, **SIZES)
    for name, weight in reference.named_parameters():
        weight.data.copy_(weight.bfloat16())
        if name.endswith("soft_emb_norm.weight"):
            weight.data.fill_(0.5)  # so that one more is a number of bf16, too
    reference.save_pretrained(folder)
    return folder, reference


@pytest.mark.parametrize("swapped", [False, True])
def test_both_files_are_the_model_of_the_safetensors(tmp_path: Path, model: tuple[Path, Any], swapped: bool) -> None:
    folder, reference = model
    source, mmproj = write_text(tmp_path / "model.gguf", reference), tmp_path / "mmproj.gguf"
    write_mmproj(mmproj, reference, swapped)
    (tmp_path / "out").mkdir()
    convert_gguf(source, tmp_path / "out", mmproj)
    found, expected = read_whole(tmp_path / "out"), reference.state_dict()
    assert found.keys() == expected.keys() - {"lm_head.weight"}
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in found)
    both = tmp_path / "out", folder
    ours, theirs = (encode(load(each, ReferenceKernels()), MediaKind.IMAGE, image(56, 56)) for each in both)
    assert torch.equal(ours, theirs)
    first, second = (read_encoders(each) for each in both)
    assert first is not None
    assert second is not None
    assert isinstance(first.vision, SiglipConfig)
    # A GGUF file has 1e-6 in fp32.
    assert replace(first, vision=replace(first.vision, norm_eps=1e-6)) == second
    # The family's sizes of the text model are those that GGUF files of Gemma 3 imply.
    assert read_config(tmp_path / "out").attention["full"].looks_ahead
    processor = read_processor(tmp_path / "out")
    assert processor is not None
    assert processor.tokens.reserved == {TOKENS.index(token) for token in OF_IMAGES}


def test_a_model_with_its_encoder_is_another_one_than_without(tmp_path: Path, model: tuple[Path, Any]) -> None:
    _, reference = model
    source, mmproj = write_text(tmp_path / "model.gguf", reference), write_mmproj(tmp_path / "mmproj.gguf", reference)
    cache = tmp_path / "cache"
    whole = resolve_model(str(source), cache, lambda _: None, mmproj=str(mmproj))
    assert read_encoders(whole) is not None
    text = resolve_model(str(source), cache, lambda _: None)
    assert text != whole
    assert read_encoders(text) is None
    assert resolve_model(str(source), cache, lambda _: None, mmproj=str(mmproj)) == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"projector_type": ("qwen2vl_merger", VALUE.STRING)},
            "its projector 'qwen2vl_merger' for a gemma3 is not supp",
        ),
        (
            {"vision__projection_dim": (41, VALUE.UINT32)},
            "its encodings have 41 elements, and the hidden states of the",
        ),
        (
            {"vision__image_mean": ([0.4] * 3, VALUE.ARRAY, VALUE.FLOAT32)},
            "its clip.vision.image_mean is .*would be lost",
        ),
        ({"vision__block_count": (2, VALUE.UINT32)}, r"it has no tensor v\.blk\.1\.\S+ \(and 15 more\)"),
        ({"without": "v.post_ln.bias"}, "it has no tensor v.post_ln.bias"),
    ],
)
def test_an_encoder_that_does_not_fit_is_refused(
    tmp_path: Path, model: tuple[Path, Any], more: dict[str, Any], message: str
) -> None:
    _, reference = model
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", reference, **more)
    with pytest.raises(ModelError, match=rf"model\.gguf cannot be converted: mmproj\.gguf: {message}"):
        convert_gguf(write_text(tmp_path / "model.gguf", reference), tmp_path / "out", mmproj)


def test_only_gguf_files_take_an_encoder(tmp_path: Path, model: tuple[Path, Any]) -> None:
    folder, reference = model
    for name in (str(folder), "smollm2-135m-instruct"):
        with pytest.raises(ConfigError, match="--mmproj is for models that are GGUF files"):
            resolve_model(name, tmp_path / "cache", lambda _: None, mmproj="x.gguf")
    with pytest.raises(ModelError, match=r"--mmproj x\.gguf is no file"):
        resolve_model(str(write_text(tmp_path / "a.gguf", reference)), tmp_path, lambda _: None, mmproj="x.gguf")

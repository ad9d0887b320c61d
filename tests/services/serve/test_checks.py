"""A configuration that cannot work gives an error before anything starts, and the error names the flag that helps."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.core.config import ServeConfig
from paceline.core.errors import ConfigError
from paceline.models.files.gguf_reference import GgufReference
from paceline.services.serve.checks import (
    LEAST_KV_BYTES,
    PROCESS_BYTES,
    check_config,
    check_memory,
    check_model,
    check_port,
    check_roles,
    named_roles,
    roles_of,
)
from tests.pooling_folders import write_modules
from tests.services.gateway.toy_pooling import write_toy_encoder
from tests.tiny_checkpoints import write_gemma4_with_media, write_tiny

MIB = 1 << 20


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"decode": 0}, "--decode"),
        ({"prefill": -1}, "--prefill"),
        ({"max_seqs": 0}, "--max-seqs"),
        ({"max_batched_tokens": 0}, "--max-batched-tokens"),
        ({"max_batched_tokens": 31, "max_seqs": 32}, "--max-batched-tokens 31 is less than --max-seqs 32"),
        ({"max_model_len": -1}, "--max-model-len"),
        ({"port": 65536}, "--port"),
        ({"threads": -1}, "--threads"),
        ({"drain_seconds": float("nan")}, "--drain-seconds"),
        ({"drain_seconds": -1.0}, "--drain-seconds"),
        ({"dtype": "int3"}, "--dtype"),
        ({"cache_policy": "lur"}, "'lur'; --cache-policy takes one of adaptive, forecast, arc, lru"),
        ({"kv_memory": "lots"}, "'lots' is not an amount of memory"),
        ({"model_impl": "vllm"}, "--model-impl must be auto, native or transformers"),
        ({"model_impl": "native", "trust_remote_code": True}, "--trust-remote-code needs --model-impl auto or"),
        ({"model_impl": "transformers", "quantization": "gguf"}, "--quantization gguf needs --model-impl native or"),
    ],
)
def test_numbers_that_make_no_stack_are_refused(options: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check_config(ServeConfig(**options))


def drafting(folder: Path, **fields: Any) -> ServeConfig:
    return ServeConfig(speculative_config=json.dumps({"method": "draft_model", "model": str(folder)} | fields))


@pytest.fixture
def draft_folder(model_folder: Path) -> Path:
    return Path(shutil.copytree(model_folder, model_folder.with_name("draft")))


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_draft_model_that_fits_passes(model_folder: Path, draft_folder: Path) -> None:
    check_config(drafting(draft_folder))
    check_model(drafting(draft_folder), model_folder)
    check_model(ServeConfig(speculative_config='{"method": "early_layers", "num_layers": 1}'), two_layers(model_folder))


def test_options_are_checked_for_a_model_that_runs_in_transformers(model_folder: Path, draft_folder: Path) -> None:
    change(draft_folder, architectures=["OtherForCausalLM"], text_config={"vocab_size": 7, "dtype": "bfloat16"})
    check_config(drafting(draft_folder))
    with pytest.raises(ConfigError, match="the vocabulary of the draft model has 7 tokens"):
        check_model(drafting(draft_folder), model_folder)
    early = ServeConfig(speculative_config='{"method": "early_layers", "num_layers": 1}')
    with pytest.raises(ConfigError, match="early_layers needs a native model"):
        check_model(early, draft_folder)
    check_memory([(ServeConfig(), draft_folder)], 1 << 40)


def two_layers(folder: Path) -> Path:
    change(folder, num_hidden_layers=2)
    return folder


def test_a_draft_model_that_cannot_be_loaded_is_refused_whatever_the_model(draft_folder: Path) -> None:
    change(draft_folder, architectures=["OtherForCausalLM"], quantization_config={"bits": 4})
    with pytest.raises(ConfigError, match=r"--speculative-config: .*quantized checkpoints need a native"):
        check_config(drafting(draft_folder))
    (draft_folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"--speculative-config: .*has no weights"):
        check_config(drafting(draft_folder))


def test_a_draft_model_is_a_folder_after_it_was_prepared(model_folder: Path, draft_folder: Path) -> None:
    for config in (drafting(draft_folder / "nothing"), drafting(draft_folder, revision="v1")):
        check_config(config)
        with pytest.raises(ConfigError, match=r"--speculative-config: model .* is not a folder; .*paceline prepare"):
            check_model(config, model_folder)


def test_a_draft_model_of_another_vocabulary_is_refused(model_folder: Path, draft_folder: Path) -> None:
    change(draft_folder, vocab_size=65)
    check_config(drafting(draft_folder))
    with pytest.raises(ConfigError, match="draft model has 65 tokens and the model's 64; choose one with the same"):
        check_model(drafting(draft_folder), model_folder)


def test_early_layers_are_fewer_than_all(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="num_layers must be below the model's 1"):
        check_model(ServeConfig(speculative_config='{"method": "early_layers", "num_layers": 1}'), model_folder)


def test_a_hybrid_may_draft_and_be_drafted_for(tmp_path: Path, model_folder: Path) -> None:
    hybrid = tmp_path / "hybrid"
    write_tiny(hybrid, "granite_hybrid", vocab_size=64)
    check_model(ServeConfig(speculative_config='{"method": "early_layers", "num_layers": 1}'), hybrid)
    check_model(drafting(model_folder), hybrid)
    check_model(drafting(hybrid), model_folder)


def test_keys_of_a_model_or_a_draft_model_without_tiles_are_refused(tmp_path: Path, model_folder: Path) -> None:
    write_tiny(tmp_path / "latent", "deepseek_v2")
    write_tiny(tmp_path / "small", "llama", vocab_size=64, head_dim=20)
    write_tiny(tmp_path / "fine", "llama", vocab_size=64, head_dim=16)
    check_model(drafting(tmp_path / "fine").model_copy(update={"kv_cache_dtype": "int8"}), tmp_path / "fine")
    check_model(drafting(tmp_path / "small"), tmp_path / "fine")
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is not available for latent vectors"):
        check_model(ServeConfig(kv_cache_dtype="int8"), tmp_path / "latent")
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8_e4m3 needs heads of a multiple of 16"):
        check_model(drafting(tmp_path / "small").model_copy(update={"kv_cache_dtype": "fp8_e4m3"}), tmp_path / "fine")


def test_encode_workers_need_a_model_with_encoders(tmp_path: Path, model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="has no encoders"):
        check_model(ServeConfig(encode=1), model_folder)
    write_gemma4_with_media(tmp_path, "edge")
    check_model(ServeConfig(encode=1), tmp_path)
    with pytest.raises(ConfigError, match="has no encoders"):
        check_model(ServeConfig(encode=1, model_impl="transformers"), tmp_path)


def test_workers_of_a_role_that_a_model_does_not_have_are_refused(tmp_path: Path, model_folder: Path) -> None:
    encoder = write_toy_encoder(tmp_path / "encoder")
    embedder = tmp_path / "embedder"
    write_tiny(embedder, "qwen3", head="Model")
    write_modules(embedder, "lasttoken", normalize=True)
    for folder, options, message in (
        (model_folder, {"pool": 2}, "makes text and has no pool workers; its workers are: prefill, decode, encode"),
        (encoder, {"prefill": 1}, "makes no text and has no prefill workers; its workers are: pool"),
        (encoder, {"decode": 1, "pool": 2}, "has no decode workers"),
        (encoder, {"encode": 1}, "has no encode workers"),
        (embedder, {"decode": 1}, "makes no text and has no decode workers; its workers are: prefill, encode"),
        (embedder, {"pool": 1}, "has no pool workers"),
    ):
        config = ServeConfig.model_validate({"model": str(folder), **options})
        roles = roles_of(config, folder)
        with pytest.raises(ConfigError, match=message):
            check_roles(config, roles, named_roles(config, ()))
        # With --models-file, numbers on the command line are for the models that have such workers.
        check_roles(config, roles, named_roles(config, {"prefill", "decode", "encode", "pool"}))
    for folder, options in ((encoder, {"pool": 3, "encode": 0}), (model_folder, {"prefill": 2}), (embedder, {})):
        config = ServeConfig.model_validate({"model": str(folder), **options})
        check_roles(config, roles_of(config, folder), named_roles(config, ()))


POOLS = {"kv_pool": "device", "kv_pool_memory": "32MiB", "kv_memory": "64MiB"}


def test_decode_workers_alone_make_a_stack() -> None:
    check_config(ServeConfig(prefill=0, decode=3))


def test_a_free_port_passes_and_a_taken_one_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} .* is taken.*--port"):
            check_port("127.0.0.1", port)
    check_port("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("203.0.113.1", 80), ("no such host", 80)])
def test_an_address_that_is_not_ours_is_refused(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        check_port(host, port)


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        # All workers map the weights from one file: the model's own file, or one with the packed weights.
        ({}, 1 * MIB + 2 * PROCESS_BYTES + LEAST_KV_BYTES),
        ({"dtype": "bfloat16", "prefill": 2}, 1 * MIB + 3 * PROCESS_BYTES + LEAST_KV_BYTES),
        ({"dtype": "float32"}, 2 * MIB + 2 * PROCESS_BYTES + LEAST_KV_BYTES),
        # Plain torch converts the weights in each worker, so each has a copy.
        ({"dtype": "float32", "kernels": "reference"}, 2 * 2 * MIB + 2 * PROCESS_BYTES + LEAST_KV_BYTES),
        # Quantized weights are shared, too. Plain torch dequantizes them.
        ({"quantization": "int8"}, MIB // 32 * 17 + 2 * PROCESS_BYTES + LEAST_KV_BYTES),
        ({"quantization": "int8", "kernels": "reference"}, 2 * 1 * MIB + 2 * PROCESS_BYTES + LEAST_KV_BYTES),
        ({"prefill": 0, "kv_memory": "1GiB"}, 1 * MIB + PROCESS_BYTES + 1024 * MIB),
        ({"prefill": 0, "device": "cuda"}, PROCESS_BYTES + LEAST_KV_BYTES),
        # On a CPU each worker's pool is memory of the same machine.
        (POOLS, 1 * MIB + 2 * PROCESS_BYTES + 64 * MIB + 2 * 32 * MIB),
    ],
)
def test_memory_is_weights_processes_and_kv(model_folder: Path, options: dict[str, Any], needed: int) -> None:
    check_memory([(ServeConfig(**options), model_folder)], needed)
    with pytest.raises(ConfigError, match=r"needs .* GiB .* are free; lower .*--prefill or --decode"):
        check_memory([(ServeConfig(**options), model_folder)], needed - 1)


def test_workers_share_the_blocks_of_a_gguf_file(model_folder: Path) -> None:
    (model_folder / "weights.gguf").write_bytes(bytes(MIB // 2))
    GgufReference({"weights.gguf": ""}, {}, {}).write(model_folder)
    needed = MIB // 2 + 2 * PROCESS_BYTES + LEAST_KV_BYTES
    check_memory([(ServeConfig(quantization="gguf"), model_folder)], needed)
    with pytest.raises(ConfigError, match="this stack needs"):
        check_memory([(ServeConfig(quantization="gguf"), model_folder)], needed - 1)


def test_nothing_is_refused_where_the_system_does_not_tell(model_folder: Path) -> None:
    check_memory([(ServeConfig(kv_memory="900TiB"), model_folder)], None)


def test_experts_that_no_token_uses_may_stay_on_the_disk(model_folder: Path) -> None:
    change(model_folder, architectures=["Qwen3MoeForCausalLM"], num_experts=16, num_experts_per_tok=4,
           moe_intermediate_size=64, num_hidden_layers=2, mlp_only_layers=[0])  # fmt: skip
    needed = 1 * MIB + 2 * PROCESS_BYTES + LEAST_KV_BYTES
    idle = 12 * 3 * 64 * 32 * 2
    assert check_memory([(ServeConfig(), model_folder)], needed) == ""
    for available in (needed - 1, needed - idle):
        assert "experts that a token needs are often read from the disk" in check_memory(
            [(ServeConfig(), model_folder)], available
        )
    with pytest.raises(ConfigError, match="this stack needs"):
        check_memory([(ServeConfig(), model_folder)], needed - idle - 1)
    quantized = ServeConfig(quantization="int8")
    assert "are often read from the disk" in check_memory([(quantized, model_folder)], needed - MIB // 2)
    with pytest.raises(ConfigError, match="this stack needs"):
        check_memory([(ServeConfig(kernels="reference"), model_folder)], needed - 1)

"""Options of prefill, decode, encode and pool workers."""

from __future__ import annotations

from pydantic import model_validator

from paceline.core.adapters import LoraDType
from paceline.core.config.gateway import GatewayConfig
from paceline.core.config.service import (
    DType,
    KVCacheDType,
    KVPool,
    ModelImpl,
    Quantization,
    ServiceConfig,
    check_adapters,
    check_model_code,
    check_step_size,
)
from paceline.core.kv_coding import KVCoding
from paceline.core.options import AutoSize, option, same_option
from paceline.core.pooling_choice import Convert, pooling_choice
from paceline.core.speculative import speculative_help


class WorkerConfig(ServiceConfig):
    """Options of a prefill, decode or encode worker."""

    model: str = option("", "Hugging Face folder of the model", "model")
    dtype: DType = option(
        "auto",
        "type of weights and activations, and of KV with --kv-cache-dtype auto; auto takes the checkpoint's",
        "model",
    )
    kv_cache_dtype: KVCacheDType = option(
        "auto",
        "type of keys and values in the KV cache. auto: that of --dtype. int8, or fp8_e4m3 (fp8 for short): codes of 8 "
        "bits with a scale for each token and head. Nearly twice as many tokens fit, and half of the "
        "bytes are handed over and read. States of recurrent layers, which are most of a hybrid model's memory, and "
        "encodings keep their type. All workers of a model need the same value",
        "model",
    )
    kv_cache_dtype_skip_layers: str = option(
        "",
        "layers whose keys and values keep the type of --dtype in spite of --kv-cache-dtype, separated by commas: "
        "numbers of layers, from 0, and sliding_window for all layers with a sliding window. All workers of a model "
        "need the same value",
        "model",
    )
    packed_dir: str = option(
        "",
        "folder in which the workers of a host share one copy of the packed weights; default: each worker has its own "
        "copy in memory",
        "model",
    )
    quantization: Quantization = option(
        "auto",
        "format of the model's matrices in memory. auto: the checkpoint's, if it is quantized in safetensors (AWQ, "
        "GPTQ, compressed-tensors, FP8, MXFP4, bitsandbytes, ModelOpt), else none. none: the type of --dtype. gguf: "
        "the blocks of the GGUF file from which the model was converted. The others round linear layers and experts of "
        "a whole model when it is loaded. int8: signed bytes in blocks of 32, also the embedding and the head. int4: 4 "
        "bits in blocks of 32. fp8: E4M3 with a scale for each output. mxfp8, mxfp4: blocks of 32 of the Microscaling "
        "specification",
        "model",
    )
    quantization_config: str = option(
        "",
        "JSON object that says which layers are rounded when the model is loaded, over --quantization, e.g. "
        '{"linear": "mxfp8", "moe": "mxfp4", "ignore": ["lm_head", "re:.*down_proj"]}. Formats are those of '
        '--quantization; a kind of layers stays as it is with {"weight": null}. ignore has names of layers in the '
        "checkpoint, also with wildcards or as regular expressions after re:",
        "model",
    )
    model_impl: ModelImpl = option(
        "auto",
        "code that computes the model. native: Paceline's own, which is faster and has the architectures that are "
        "native in docs/architectures.md. transformers: the model's code in the package transformers, with Paceline's "
        "attention and matrix products. auto: native if it has the model's architecture, else transformers",
        "model",
    )
    trust_remote_code: bool = option(
        False,
        "with --model-impl auto or transformers: run the Python code in the model's folder if its config.json names "
        "such code (auto_map). It can do whatever the user of this process can do. Native models never need it",
        "model",
    )
    convert: Convert = same_option(GatewayConfig, "convert")
    pooler_config: str = same_option(GatewayConfig, "pooler_config")
    enable_lora: bool = same_option(GatewayConfig, "enable_lora")
    lora_modules: str = same_option(
        GatewayConfig,
        "lora_modules",
        help="adapters that are read once when the worker starts, so that errors are found: NAME=FOLDER,OTHER=FOLDER, "
        "or JSON objects with name and path. Requests may name others, which gateways know",
    )
    max_loras: int = option(8, "adapters of one step at most", "model", at_least=1)
    max_lora_rank: int = option(64, "largest rank of an adapter", "model", at_least=1, at_most=512)
    max_cpu_loras: int = option(
        0,
        "adapters in a worker's memory at most; those that were used longest ago make room. 0: four times --max-loras",
        "model",
        at_least=0,
    )
    lora_dtype: LoraDType = option(
        "auto", "type of adapters in memory: auto is that of the model, as --dtype says; sums are in float32", "model"
    )
    lora_target_modules: str = option(
        "",
        "names of modules, separated by commas, such as o_proj,qkv_proj: adapters change only these modules, and what "
        "they say about others is left out. Default: all modules",
        "model",
    )
    max_model_len: int = option(
        0,
        "longest context in tokens (prompt and output); 0 takes the model's limit, or less if the KV memory is too "
        "small for it",
        "model",
        at_least=0,
    )
    kvtransfer_address: str = option("127.0.0.1:7300", "address of this host's kvtransfer service", "network")
    worker_id: str = option("", "unique name of this worker; default: a generated name", "cluster")
    max_seqs: int = option(
        64,
        "sequences that one worker runs at the same time; further ones wait in the gateway's queue",
        "limits",
        at_least=1,
    )
    max_batched_tokens: int = option(
        512,
        "tokens that one step computes at most, over all sequences; longer prompts take several steps, but an image "
        "whose tokens see each other is computed in one step",
        "limits",
        at_least=1,
    )
    device: str = option("cpu", "torch device to compute on: cpu, cuda, or cuda:1 for the second GPU", "compute")
    kv_pool: KVPool = option(
        "auto",
        "memory that holds the KV blocks of running requests. arena: the worker reads and writes blocks directly in "
        "the memory that all workers of the host share (--kv-memory of kvtransfer). device: the worker has a pool of "
        "its own on its device and copies blocks between the pool and the shared memory; if the pool is full, requests "
        "are swapped out to the shared memory. auto: arena on a CPU, device on a GPU",
        "memory",
    )
    kv_pool_memory: AutoSize = option(
        "auto",
        "size of the worker's own pool, e.g. 4GiB; auto has room for 24,576 tokens or the longest context, whichever "
        "is more",
        "memory",
    )
    kernels: str = option(
        "auto",
        "kernels to compute with. native: C++, for CPUs. reference: plain torch, slow. triton: for GPUs. "
        "triton-invariant: triton, but a result does not depend on the other requests of a step. auto: native on a "
        "CPU, triton on a GPU, reference if these are not available",
        "compute",
    )
    threads: int = option(0, "CPU threads; 0 takes all cores that the worker may use", "compute", at_least=0)
    itl_target_ms: float = option(
        0.0,
        "intended time between two tokens of a running request, in milliseconds. It matters only while prompts wait "
        "and prefill and decode workers share the cores of a host: prefill gets the part of this time that a decode "
        "step leaves. A lower target makes running requests faster and first tokens later. 0 follows the machine: 28 "
        "ms, or two and a half decode steps if that is longer",
        "compute",
        at_least=0,
    )
    turns_file: str = option(
        "",
        "file by which workers of several models on one machine take turns on its cores, such as those of a chat model "
        "and of an embedding model; default: the workers of one kvtransfer take turns with each other alone",
        "compute",
    )
    async_scheduling: bool = option(
        True,
        "plan and launch the next step while the present one computes, so that the device does not wait between "
        "steps. Tokens are the same either way; turn it off only to compare or to debug",
        "compute",
    )
    speculative_config: str = option(
        "",
        "JSON object that turns on speculative decoding, which drafts tokens and verifies several in one step, e.g. "
        '{"method": "ngram", "num_speculative_tokens": 4}\n' + speculative_help(),
        "compute",
    )

    @model_validator(mode="after")
    def _check_together(self) -> WorkerConfig:
        check_step_size(self.max_batched_tokens, self.max_seqs)
        check_model_code(self)
        KVCoding.parse(self.kv_cache_dtype, self.kv_cache_dtype_skip_layers)
        pooling_choice(self)
        check_adapters(self)
        return self

    @property
    def max_adapters(self) -> int:
        """Largest number of adapters in a worker's memory."""
        return self.max_cpu_loras or 4 * self.max_loras

    @property
    def kv_coding(self) -> KVCoding:
        """The choice of --kv-cache-dtype and --kv-cache-dtype-skip-layers."""
        return KVCoding.parse(self.kv_cache_dtype, self.kv_cache_dtype_skip_layers)


class PoolConfig(WorkerConfig):
    """Options of a pool worker. Those about KV blocks have no effect."""

    max_seqs: int = same_option(
        WorkerConfig,
        "max_seqs",
        default=256,
        help="calls that the worker computes at the same time; further ones wait in the gateway's queue",
    )
    max_batched_tokens: int = same_option(
        WorkerConfig,
        "max_batched_tokens",
        default=512,
        help="tokens that one step computes at most, over the inputs of all calls; an input with more has its own step",
    )

"""Options of a whole stack on one machine."""

from __future__ import annotations

from pydantic import model_validator

from paceline.core import env
from paceline.core.adapters import LoraDType
from paceline.core.config.gateway import GatewayConfig
from paceline.core.config.kvtransfer import KVTransferConfig
from paceline.core.config.planner import PlannerOptions
from paceline.core.config.service import (
    DType,
    GenerationConfig,
    KVCacheDType,
    KVPool,
    LogLevel,
    ModelImpl,
    Quantization,
    ServiceConfig,
    check_adapters,
    check_http,
    check_model_code,
    check_step_size,
    has_pools,
)
from paceline.core.config.worker import WorkerConfig
from paceline.core.errors import ConfigError
from paceline.core.kv_coding import KVCoding
from paceline.core.options import AutoSize, Size, help_of, option, same_option
from paceline.core.pooling_choice import Convert
from paceline.core.telemetry import LogFormat


class ServeConfig(PlannerOptions):
    """Options of a whole stack on one machine."""

    model: str = option(
        "smollm2-135m-instruct",
        "bundled name, Hugging Face folder, GGUF file, or a model of the Hugging Face hub: org/name or "
        "org/name/file.gguf. A folder or file of this machine takes precedence over the hub",
        "model",
    )
    mmproj: str = option(
        "",
        "GGUF file with the encoder of images for a MODEL that is a GGUF file, as llama.cpp has it; Gemma 3",
        "model",
    )
    revision: str = option("", "branch, tag or commit of a model on the hub; default: its main branch", "model")
    served_model_name: str = same_option(GatewayConfig, "served_model_name")
    models_file: str = same_option(
        GatewayConfig,
        "models_file",
        help="TOML file with a table for each model, instead of MODEL: its heading is the name in the API, its keys "
        "are options of this model and its fleet, such as model, decode, kv-memory and, with a planner, most-decode",
    )
    dtype: DType = same_option(WorkerConfig, "dtype")
    kv_cache_dtype: KVCacheDType = same_option(WorkerConfig, "kv_cache_dtype")
    kv_cache_dtype_skip_layers: str = same_option(WorkerConfig, "kv_cache_dtype_skip_layers")
    quantization: Quantization = same_option(WorkerConfig, "quantization")
    quantization_config: str = same_option(WorkerConfig, "quantization_config")
    model_impl: ModelImpl = same_option(WorkerConfig, "model_impl")
    trust_remote_code: bool = same_option(WorkerConfig, "trust_remote_code")
    enable_lora: bool = same_option(GatewayConfig, "enable_lora")
    lora_modules: str = same_option(GatewayConfig, "lora_modules")
    lora_dir: str = same_option(GatewayConfig, "lora_dir")
    max_loras: int = same_option(WorkerConfig, "max_loras")
    max_lora_rank: int = same_option(WorkerConfig, "max_lora_rank")
    max_cpu_loras: int = same_option(WorkerConfig, "max_cpu_loras")
    lora_dtype: LoraDType = same_option(WorkerConfig, "lora_dtype")
    lora_target_modules: str = same_option(WorkerConfig, "lora_target_modules")
    max_model_len: int = same_option(WorkerConfig, "max_model_len")
    sleep_after: float = same_option(GatewayConfig, "sleep_after")
    chat_template: str = same_option(GatewayConfig, "chat_template")
    shared_prompts: str = same_option(GatewayConfig, "shared_prompts")
    generation_config: GenerationConfig = same_option(GatewayConfig, "generation_config")
    tool_call_parser: str = same_option(GatewayConfig, "tool_call_parser")
    reasoning_parser: str = same_option(GatewayConfig, "reasoning_parser")
    convert: Convert = same_option(GatewayConfig, "convert")
    pooler_config: str = same_option(GatewayConfig, "pooler_config")
    score_tokens: str = same_option(GatewayConfig, "score_tokens")
    score_template: str = same_option(GatewayConfig, "score_template")
    max_logprobs: int = same_option(GatewayConfig, "max_logprobs", group="model")
    return_tokens_as_token_ids: bool = same_option(GatewayConfig, "return_tokens_as_token_ids")
    enable_force_include_usage: bool = same_option(GatewayConfig, "enable_force_include_usage")
    cache_dir: str = option(
        str(env.default_cache_dir()), "folder that keeps converted models and packed weights", "model"
    )
    cache_size: AutoSize = option(
        "auto",
        "disk space for converted models and packed weights, e.g. 50GiB; the least recently used ones are removed when "
        "a stack is ready, but none in use. auto: half of the disk's free space and what they take together",
        "model",
    )
    prefill: int = option(1, "prefill workers; with 0, decode workers compute all prompts", "fleet", at_least=0)
    decode: int = option(1, "decode workers; 0 only with --planner", "fleet", at_least=0)
    encode: int = option(
        0,
        "encode workers, which compute only the encodings of images, videos and audio; with 0, the workers that "
        "compute prompts do it",
        "fleet",
        at_least=0,
    )
    pool: int = option(
        1,
        "pool workers, if the model is an encoder of texts, which makes vectors, scores or labels and no text: such a "
        "model has no other workers, and other models have no pool workers",
        "fleet",
        at_least=1,
    )
    planner: bool = option(
        False,
        "let a planner add and drain workers, from --prefill and --decode (or --pool) on, so that requests meet the "
        "objectives of --ttft-seconds and --itl-seconds",
        "fleet",
    )
    kv_pool: KVPool = same_option(
        WorkerConfig, "kv_pool", help=help_of(WorkerConfig, "kv_pool").replace(" of kvtransfer", ""), group="fleet"
    )
    kv_memory: AutoSize = same_option(KVTransferConfig, "kv_memory", group="fleet")
    kv_pool_memory: AutoSize = same_option(
        WorkerConfig,
        "kv_pool_memory",
        help="with --kv-pool device, " + help_of(WorkerConfig, "kv_pool_memory"),
        group="fleet",
    )
    kv_disk_size: Size = same_option(KVTransferConfig, "kv_disk_size", group="fleet")
    kv_disk_dir: str = same_option(KVTransferConfig, "kv_disk_dir", group="fleet")
    cache_policy: str = same_option(KVTransferConfig, "cache_policy", group="fleet")
    local_prefill_tokens: int = same_option(GatewayConfig, "local_prefill_tokens", group="fleet")
    max_seqs: int = same_option(WorkerConfig, "max_seqs", group="fleet")
    max_batched_tokens: int = same_option(WorkerConfig, "max_batched_tokens", group="fleet")
    device: str = same_option(WorkerConfig, "device", group="fleet")
    kernels: str = same_option(WorkerConfig, "kernels", group="fleet")
    threads: int = same_option(WorkerConfig, "threads", group="fleet")
    itl_target_ms: float = same_option(WorkerConfig, "itl_target_ms", group="fleet")
    async_scheduling: bool = same_option(WorkerConfig, "async_scheduling", group="fleet")
    speculative_config: str = same_option(WorkerConfig, "speculative_config", group="fleet")
    host: str = same_option(GatewayConfig, "host", help="address of the HTTP API")
    port: int = same_option(GatewayConfig, "port", help="port of the HTTP API; 0 takes a free port")
    uds: str = same_option(GatewayConfig, "uds")
    root_path: str = same_option(GatewayConfig, "root_path")
    ssl_certfile: str = same_option(GatewayConfig, "ssl_certfile")
    ssl_keyfile: str = same_option(GatewayConfig, "ssl_keyfile")
    ssl_ca_certs: str = same_option(GatewayConfig, "ssl_ca_certs")
    ssl_cert_reqs: int = same_option(GatewayConfig, "ssl_cert_reqs")
    api_key: str = same_option(GatewayConfig, "api_key")
    admin_key: str = same_option(GatewayConfig, "admin_key")
    api_keys_file: str = same_option(GatewayConfig, "api_keys_file")
    share_cache: bool = same_option(GatewayConfig, "share_cache")
    classes_file: str = same_option(GatewayConfig, "classes_file")
    record_trace: str = same_option(GatewayConfig, "record_trace")
    record_trace_size: Size = same_option(GatewayConfig, "record_trace_size")
    allowed_origins: str = same_option(GatewayConfig, "allowed_origins")
    allowed_methods: str = same_option(GatewayConfig, "allowed_methods")
    allowed_headers: str = same_option(GatewayConfig, "allowed_headers")
    allow_credentials: bool = same_option(GatewayConfig, "allow_credentials")
    store: str = same_option(GatewayConfig, "store")
    limit_mm_per_prompt: str = same_option(GatewayConfig, "limit_mm_per_prompt")
    mm_processor_kwargs: str = same_option(GatewayConfig, "mm_processor_kwargs")
    allowed_media_domains: str = same_option(GatewayConfig, "allowed_media_domains")
    allow_private_media: bool = same_option(GatewayConfig, "allow_private_media")
    allowed_local_media_path: str = same_option(GatewayConfig, "allowed_local_media_path")
    redis: str = option("", "URL of a Redis server to use; default: this command starts one", "network", is_secret=True)
    redis_password_file: str = same_option(ServiceConfig, "redis_password_file", group="network")
    vllm_metric_names: bool = same_option(GatewayConfig, "vllm_metric_names")
    log_level: LogLevel = same_option(ServiceConfig, "log_level", default="warning")
    log_format: LogFormat = same_option(ServiceConfig, "log_format")
    drain_seconds: float = same_option(ServiceConfig, "drain_seconds", default=10.0)

    @property
    def kv_coding(self) -> KVCoding:
        """The choice of --kv-cache-dtype and --kv-cache-dtype-skip-layers."""
        return KVCoding.parse(self.kv_cache_dtype, self.kv_cache_dtype_skip_layers)

    @model_validator(mode="after")
    def _check_together(self) -> ServeConfig:
        check_step_size(self.max_batched_tokens, self.max_seqs)
        check_model_code(self)
        check_adapters(self)
        KVCoding.parse(self.kv_cache_dtype, self.kv_cache_dtype_skip_layers)
        check_http(self)
        if self.planner:
            self.objectives({})
        if not (self.decode or self.planner):
            raise ConfigError("--decode must be at least 1 without --planner, which starts workers when requests come")
        if has_pools(self) and self.kv_pool_memory == "auto" != self.kv_memory:
            raise ConfigError(
                "with --kv-pool device, --kv-memory is the size of the shared memory below the pools and not, as "
                "earlier, of each worker's pool: give --kv-pool-memory, too"
            )
        if not has_pools(self) and self.kv_pool_memory != "auto":
            raise ConfigError(
                "--kv-pool-memory needs --kv-pool device; without it, workers compute in the shared memory, whose size "
                "is --kv-memory"
            )
        return self


PREPARE_OPTIONS = (
    "mmproj",
    "revision",
    "cache_dir",
    "cache_size",
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "model_impl",
    "trust_remote_code",
    "enable_lora",
    "lora_modules",
)
"""Options of `serve` that its command `prepare` also has."""
CACHE_OPTIONS = ("cache_dir", "cache_size")
"""Options of `serve` that the command `cache` also has."""

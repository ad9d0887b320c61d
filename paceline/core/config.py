"""Options of all services: one class for each service, in which each field is a flag and a key of the TOML file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from paceline.core import env
from paceline.core.errors import ConfigError
from paceline.core.options import AutoSize, Options, Size, help_of, option, same_option
from paceline.core.speculative import speculative_help
from paceline.core.telemetry import LogFormat

GIB = 1 << 30

KV_TOKENS = 24 * 1024
"""Tokens for which "auto" makes room in KV memory."""

Quantization = Literal["none", "int8", "gguf"]
"""Format of a model's matrices in memory."""
KVPool = Literal["auto", "arena", "device"]
"""Memory in which workers compute."""
RouterMode = Literal["kv", "round-robin"]
"""How the gateway chooses workers."""
TransportChoice = Literal["auto", "ucx", "grpc"]
"""How KV blocks travel between hosts."""
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(str.lower)]
"""Least severity of messages in the log."""
DType = Literal["auto", "bfloat16", "float32"]
"""Type in which a model computes."""


class ServiceConfig(Options):
    """Options of every service."""

    cluster: str = option("default", "name of the stack; stacks with different names can share one Redis", "cluster")
    redis: str = option("redis://127.0.0.1:6379/0", "URL of the Redis in which services find each other", "cluster")
    host: str = option("127.0.0.1", "address to listen on", "network")
    port: int = option(0, "port to listen on; 0 takes a free one", "network", at_least=0, at_most=65535)
    auth_token_file: str = option(
        "",
        "file with the secret that all services of a cluster share (paceline token FILE makes one); "
        "without it, this service trusts everybody who can connect to it",
        "network",
    )
    advertise: str = option("", "host name by which other services reach this one; default: --host", "network")
    log_level: LogLevel = option("info", "least severity of messages in the log", "logs")
    log_format: LogFormat = option("text", "format of the log: text for people, json for machines", "logs")
    drain_seconds: float = option(
        30.0,
        "time that running requests get to end after SIGTERM or Ctrl-C",
        "limits",
        at_least=0,
        at_most=86400,
    )
    ready_fd: int = option(
        -1, "open file descriptor to which this service writes its address when it is ready", "network"
    )


class GatewayConfig(ServiceConfig):
    """Options of the HTTP API."""

    port: int = option(8000, "port to listen on", "network", at_least=0, at_most=65535)
    model: str = option("", "Hugging Face folder of the model; its tokenizer and chat template are read", "model")
    served_model_name: str = option("", "name of the model in the API; default: the name of MODEL", "model")
    chat_template: str = option("", "file with a Jinja chat template, for a model that has none", "model")
    api_key: str = option("", "keys that clients may send, separated by commas; default: no key is needed", "network")
    max_body_bytes: int = option(8 << 20, "size of the largest request body, in bytes", "limits", at_least=1)
    max_waiting: int = option(256, "requests that may wait for a worker; further ones get 429", "limits", at_least=1)
    queue_seconds: float = option(
        60.0, "longest time that a request waits for a free worker; then it gets 429", "limits", at_least=0.1
    )
    request_seconds: float = option(1800.0, "longest time that a request may take in all", "limits", at_least=0.1)
    stall_seconds: float = option(
        120.0,
        "time without a sign of life from a worker after which its requests go to another one; a worker is silent "
        "during a step, so this must be longer than any step",
        "limits",
        at_least=0.1,
    )
    router_mode: RouterMode = option(
        "kv",
        "how workers are chosen: kv compares cached prefixes, queues, load and transfers; round-robin takes each in "
        "turn",
        "cluster",
    )
    local_prefill_tokens: int = option(
        32,
        "a decode worker may compute a prompt itself if at most this many of its tokens are not cached and the answer "
        "begins sooner so; 0 sends all prompts to prefill workers, if there are any",
        "limits",
        at_least=0,
    )
    supervisor_socket: str = option("", "Unix socket of the supervisor that adds and removes workers", "network")
    max_attempts: int = option(
        5,
        "attempts at a request that may fail one after another before the client gets an error; an attempt that "
        "decoded a token starts the count again",
        "limits",
        at_least=1,
    )


class WorkerConfig(ServiceConfig):
    """Options of a prefill or decode worker."""

    model: str = option("", "Hugging Face folder of the model", "model")
    dtype: DType = option("auto", "type in which the model computes; auto takes that of the checkpoint", "model")
    packed_dir: str = option(
        "",
        "folder in which the workers of a host share packed weights; default: each worker has a copy of its own",
        "model",
    )
    quantization: Quantization = option(
        "none",
        "format of the model's matrices in memory: none keeps them in --dtype, int8 rounds them to blocks of signed "
        "bytes, gguf keeps the blocks of the GGUF file that the model came from",
        "model",
    )
    max_model_len: int = option(
        0,
        "tokens of the longest context; 0 takes the model's limit, or less if the KV memory is too small for it",
        "model",
        at_least=0,
    )
    kvtransfer_address: str = option("127.0.0.1:7300", "address of this host's kvtransfer service", "network")
    worker_id: str = option("", "unique name of this worker; default: a generated one", "cluster")
    max_seqs: int = option(64, "requests that run at the same time on one worker", "limits", at_least=1)
    max_batched_tokens: int = option(
        512, "tokens of one step; longer prompts are computed in several steps", "limits", at_least=1
    )
    device: str = option("cpu", "torch device to compute on: cpu, cuda, or cuda:1 for the second GPU", "compute")
    kv_pool: KVPool = option(
        "auto",
        "memory in which a worker computes. arena: the worker reads and writes KV blocks directly in the memory that "
        "all workers of the host share (--kv-memory of kvtransfer). device: the worker has a pool of its own on its "
        "device and copies blocks between the pool and the shared memory; a request that does not fit into the pool "
        "is swapped out. auto: arena on a CPU, device on a GPU",
        "memory",
    )
    kv_pool_memory: AutoSize = option(
        "auto",
        "size of the worker's own pool, e.g. 512MiB or 4GiB; auto makes room for 24,576 tokens, or for the longest "
        "context if that is longer",
        "memory",
    )
    kernels: str = option(
        "auto",
        "kernels to compute with: native (C++), reference (plain torch), triton, triton-invariant; auto takes the "
        "fastest that runs here",
        "compute",
    )
    threads: int = option(0, "CPU threads; 0 takes all cores that the worker may use", "compute", at_least=0)
    itl_target_ms: float = option(
        28.0,
        "time in milliseconds between two tokens of a running request, while prompts wait and prefill and decode "
        "workers share the cores of a host; a lower target makes running requests faster and first tokens later",
        "compute",
        at_least=0,
    )
    async_scheduling: bool = option(True, "plan and launch the next step while one is computed", "compute")
    speculative_config: str = option(
        "",
        'JSON object: how to draft tokens, e.g. {"method": "ngram", "num_speculative_tokens": 4}\n'
        + speculative_help(),
        "compute",
    )

    @model_validator(mode="after")
    def _check_step(self) -> WorkerConfig:
        check_step_size(self.max_batched_tokens, self.max_seqs)
        return self


class KVTransferConfig(ServiceConfig):
    """Options of the service that owns a host's KV memory."""

    port: int = option(7300, "port to listen on; 0 takes a free one", "network", at_least=0, at_most=65535)
    kv_memory: AutoSize = option(
        "auto",
        "shared memory of this host for KV blocks, e.g. 512MiB or 4GiB; auto makes room for 24,576 tokens, or for the "
        "longest context if that is longer, but takes at most 2 GiB and a quarter of the free memory",
        "memory",
    )
    kv_disk_size: Size = option(
        "",
        "size of a file for blocks that the shared memory evicts, e.g. 64GiB, taken at once; default: no file",
        "memory",
    )
    kv_disk_dir: str = option("/var/tmp", "folder of that file, on a fast disk", "memory")
    cache_policy: str = option(
        "forecast",
        "policy by which the shared memory evicts blocks: forecast (first the block that is least likely to be asked "
        "for soon), lru, arc, priority, or the name of an installed policy",
        "memory",
    )
    arena_dir: str = option("/dev/shm", "folder of the shared memory; all workers of the host must see it", "memory")
    transport: TransportChoice = option(
        "auto",
        "how KV blocks travel between hosts: over UCX, or over gRPC alone; auto takes ucx if it is installed and works "
        "and --host is not a local address (UCX listens on all addresses of the machine)",
        "network",
    )
    host_id: str = option("", "unique name of this host; default: a generated one", "cluster")
    lease_seconds: float = option(
        10.0, "time after which a lease on blocks ends if it is not renewed", "limits", at_least=0.1
    )


class ServeConfig(Options):
    """Options of a whole stack on one machine."""

    model: str = option("smollm2-135m-instruct", "name of a bundled model, Hugging Face folder or GGUF file", "model")
    served_model_name: str = same_option(GatewayConfig, "served_model_name")
    dtype: DType = same_option(WorkerConfig, "dtype")
    quantization: Quantization = same_option(WorkerConfig, "quantization")
    max_model_len: int = same_option(WorkerConfig, "max_model_len")
    chat_template: str = same_option(GatewayConfig, "chat_template")
    cache_dir: str = option(str(env.default_cache_dir()), "folder for converted models", "model")
    prefill: int = option(1, "prefill workers; with 0, the decode workers compute prompts", "fleet", at_least=0)
    decode: int = option(1, "decode workers", "fleet", at_least=1)
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
    port: int = same_option(GatewayConfig, "port", help="port of the HTTP API; 0 takes a free one")
    api_key: str = same_option(GatewayConfig, "api_key")
    redis: str = option("", "URL of a Redis to use; default: one is started", "network")
    log_level: LogLevel = same_option(ServiceConfig, "log_level", default="warning")
    log_format: LogFormat = same_option(ServiceConfig, "log_format")
    drain_seconds: float = same_option(ServiceConfig, "drain_seconds", default=10.0)

    @model_validator(mode="after")
    def _check_together(self) -> ServeConfig:
        check_step_size(self.max_batched_tokens, self.max_seqs)
        if has_pools(self) and self.kv_pool_memory == "auto" != self.kv_memory:
            raise ConfigError(
                "with --kv-pool device, --kv-memory is the shared memory below the pools, and --kv-pool-memory the "
                "size of a worker's pool (which --kv-memory was before): give --kv-pool-memory, too"
            )
        if not has_pools(self) and self.kv_pool_memory != "auto":
            raise ConfigError(
                "--kv-pool-memory needs --kv-pool device; without it, workers compute in the shared memory: give its "
                "size with --kv-memory"
            )
        return self


def has_pools(config: WorkerConfig | ServeConfig) -> bool:
    """Return whether workers compute in pools of their own, above the arena."""
    return config.kv_pool == "device" or (config.kv_pool == "auto" and config.device.partition(":")[0] != "cpu")


def check_step_size(max_batched_tokens: int, max_seqs: int) -> None:
    """Raise ConfigError if a step has fewer tokens than running requests."""
    if max_batched_tokens < max_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-seqs {max_seqs}: "
            "a step has to give every running request a token; raise the first or lower the second"
        )

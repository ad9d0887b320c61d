"""What can be configured: one frozen dataclass a service. Each field is a flag and a line of TOML."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, Literal

from paceline.core import env
from paceline.core.errors import ConfigError
from paceline.core.speculative import speculative_help
from paceline.core.telemetry import LogFormat

GIB = 1 << 30

KV_TOKENS = 24 * 1024
"""As many are enough where nobody says how much KV memory there is to be."""

Quantization = Literal["none", "int8", "gguf"]
"""How a model's matrices lie in memory."""
KVPool = Literal["auto", "arena", "device"]
"""What workers compute in."""
RouterMode = Literal["kv", "round-robin"]
"""How requests find their workers."""
TransportChoice = Literal["auto", "ucx", "grpc"]
"""How KV blocks come from other hosts."""


def option(
    default: Any, help: str, group: str = "options", *, at_least: float = -math.inf, at_most: float = math.inf
) -> Any:
    """A field that is a flag: `max_seqs` is --max-seqs and `max-seqs`. Numbers outside of their range are refused."""
    metadata = {"help": help, "group": group, "range": (at_least, at_most)}
    if isinstance(default, (list, dict, set)):
        raise TypeError("options are immutable")
    return dataclasses.field(default=default, metadata=metadata)


def same_option(
    service: type[ServiceConfig], name: str, *, default: Any = None, help: str = "", group: str = ""
) -> Any:
    """The option of this name that `service` has, except for what is given here."""
    (field,) = (field for field in dataclasses.fields(service) if field.name == name)
    changes = {key: value for key, value in (("help", help), ("group", group)) if value}
    return dataclasses.field(
        default=field.default if default is None else default, metadata={**field.metadata, **changes}
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig:
    """What every service has."""

    cluster: str = option("default", "name that separates stacks that share one Redis", "cluster")
    redis: str = option("redis://127.0.0.1:6379/0", "URL of the Redis that knows who is alive", "cluster")
    host: str = option("127.0.0.1", "address to listen on", "network")
    port: int = option(0, "port to listen on; 0 takes a free one", "network", at_least=0, at_most=65535)
    auth_token_file: str = option(
        "",
        "file with the secret that all services of a cluster share (paceline token FILE makes one); "
        "empty trusts whoever reaches this service",
        "network",
    )
    advertise: str = option("", "host name under which other services reach this one; empty takes --host", "network")
    log_level: str = option("info", "debug, info, warning or error", "logs")
    log_format: LogFormat = option("text", "text for people, json for machines", "logs")
    drain_seconds: float = option(
        30.0, "after SIGTERM or Ctrl-C, time for running requests to end", "limits", at_least=0, at_most=86400
    )
    ready_fd: int = option(-1, "open file descriptor that is told this service's address once it is ready", "network")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig(ServiceConfig):
    """The HTTP API."""

    port: int = option(8000, "port to listen on", "network", at_least=0, at_most=65535)
    model: str = option("", "Hugging Face folder of the model (tokenizer and chat template are read)", "model")
    served_model_name: str = option("", "name of the model in the API; empty takes that of MODEL", "model")
    chat_template: str = option("", "file with a Jinja chat template, for a model that has none", "model")
    api_key: str = option("", "keys that clients must send, separated by commas; empty lets everybody in", "network")
    max_body_bytes: int = option(8 << 20, "largest request body", "limits", at_least=1)
    max_waiting: int = option(256, "requests that may wait for a worker before clients get 429", "limits", at_least=1)
    queue_seconds: float = option(
        60.0, "longest wait for a free worker before a client gets 429", "limits", at_least=0.1
    )
    request_seconds: float = option(1800.0, "longest life of a request", "limits", at_least=0.1)
    stall_seconds: float = option(
        120.0,
        "longest silence of a worker before its request moves to another; workers are silent while a step takes long, "
        "so no step may take this long",
        "limits",
        at_least=0.1,
    )
    router_mode: RouterMode = option(
        "kv",
        "how requests find their workers: kv weighs cached prefixes, queues, load and transfers; round-robin takes one "
        "after the other",
        "cluster",
    )
    local_prefill_tokens: int = option(
        32,
        "prompts of which no more tokens than this are not cached may be computed by decode workers, where that is "
        "sooner; 0 leaves all to prefill workers, where there are any",
        "limits",
        at_least=0,
    )
    supervisor_socket: str = option("", "Unix socket of the supervisor that adds and removes workers", "network")
    max_attempts: int = option(
        5, "tries in a row at one request when workers fail, each before it has decoded a token", "limits", at_least=1
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(ServiceConfig):
    """A prefill or decode worker."""

    model: str = option("", "Hugging Face folder of the model", "model")
    dtype: str = option("auto", "bfloat16, float32, or auto for that of the checkpoint", "model")
    packed_dir: str = option(
        "", "folder where the workers of a host share packed weights; empty keeps a copy in each", "model"
    )
    quantization: Quantization = option(
        "none",
        "how the model's matrices lie in memory: none in --dtype, int8 rounded to blocks of signed bytes, gguf as in "
        "the GGUF file that the model came from",
        "model",
    )
    max_model_len: int = option(
        0, "longest context in tokens; 0 takes the model's, as far as the KV memory allows", "model", at_least=0
    )
    kvtransfer_address: str = option("127.0.0.1:7300", "address of this host's kvtransfer service", "network")
    worker_id: str = option("", "unique name of this worker; empty makes one", "cluster")
    max_seqs: int = option(64, "requests that run at the same time on one worker", "limits", at_least=1)
    max_batched_tokens: int = option(
        512, "tokens of one step; longer prompts are computed in chunks of this", "limits", at_least=1
    )
    device: str = option("cpu", "torch device to compute on: cpu, or cuda with a number", "compute")
    kv_pool: KVPool = option(
        "auto",
        "what KV blocks are computed in: arena, the shared memory of the host, or device, a pool of each worker's own "
        "with the arena as a tier below; auto takes the arena on a CPU and the device's memory on a GPU",
        "memory",
    )
    kv_memory: str = option(
        "auto",
        "with a pool of the worker's own, its size, e.g. 512MiB or 4GiB; auto takes what 24,576 tokens or the longest "
        "context need",
        "memory",
    )
    kernels: str = option("auto", "kernel backend: auto, native, reference, triton or triton-invariant", "compute")
    threads: int = option(0, "CPU threads; 0 takes all cores that the worker may use", "compute", at_least=0)
    itl_target_ms: float = option(
        28.0,
        "where prefill and decode share all cores of a host: time between two tokens of a request that decode may take "
        "while prompts wait; less favours those who read, more those who wait for their first token",
        "compute",
        at_least=0,
    )
    async_scheduling: bool = option(True, "plan and launch the next step while one is computed", "compute")
    speculative_config: str = option(
        "",
        'JSON: how to guess tokens ahead, e.g. {"method": "ngram", "num_speculative_tokens": 4}\n' + speculative_help(),
        "compute",
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig(ServiceConfig):
    """The owner of a host's KV memory."""

    port: int = option(7300, "port to listen on; 0 takes a free one", "network", at_least=0, at_most=65535)
    kv_memory: str = option(
        "auto",
        "KV memory of this host, e.g. 512MiB or 4GiB; auto takes what 24,576 tokens or the longest context need, "
        "at most 2 GiB and a quarter of what is free",
        "memory",
    )
    kv_tier_memory: str = option(
        "", "instead of --kv-memory, where that is the size of the pools that workers have", "memory"
    )
    kv_disk_size: str = option(
        "",
        "size of a file below the shared memory, for what this evicts, e.g. 64GiB; taken at once, empty has none",
        "memory",
    )
    kv_disk_dir: str = option("/var/tmp", "folder of that file, on a fast disk", "memory")
    cache_policy: str = option(
        "forecast",
        "what the shared memory evicts first: forecast (what is least likely to be asked for soon), lru, "
        "arc, priority, or the name of an installed one",
        "memory",
    )
    arena_dir: str = option("/dev/shm", "folder of the shared memory; all workers of the host must see it", "memory")
    transport: TransportChoice = option(
        "auto",
        "how KV blocks come from other hosts: ucx, or grpc alone; auto takes ucx where it is installed, works, and "
        "--host is reached from outside, because it listens on all addresses of the machine",
        "network",
    )
    host_id: str = option("", "unique name of this host; empty makes one", "cluster")
    lease_seconds: float = option(10.0, "a hold that is not renewed for this long ends", "limits", at_least=0.1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """A whole stack on one machine."""

    model: str = option("smollm2-135m-instruct", "bundled name, Hugging Face folder or GGUF file", "model")
    served_model_name: str = same_option(GatewayConfig, "served_model_name")
    dtype: str = same_option(WorkerConfig, "dtype")
    quantization: Quantization = same_option(WorkerConfig, "quantization")
    max_model_len: int = same_option(WorkerConfig, "max_model_len")
    chat_template: str = same_option(GatewayConfig, "chat_template")
    cache_dir: str = option(str(env.default_cache_dir()), "folder of converted models", "model")
    prefill: int = option(1, "prefill workers; 0 lets the decode workers compute prompts", "fleet", at_least=0)
    decode: int = option(1, "decode workers", "fleet", at_least=1)
    kv_pool: KVPool = same_option(WorkerConfig, "kv_pool", group="fleet")
    kv_memory: str = option(
        "auto",
        "memory for KV blocks, e.g. 512MiB or 4GiB; with --kv-pool device that of each worker's pool; auto takes what "
        "24,576 tokens or the longest context need, for shared memory at most 2 GiB and a quarter of what is free",
        "fleet",
    )
    kv_tier_memory: str = option(
        "", "with --kv-pool device, memory of the tier below the pools; empty is like --kv-memory auto", "fleet"
    )
    kv_disk_size: str = same_option(KVTransferConfig, "kv_disk_size", group="fleet")
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
    redis: str = option("", "URL of a Redis to use; empty starts one", "network")
    log_level: str = same_option(ServiceConfig, "log_level", default="warning")
    log_format: LogFormat = same_option(ServiceConfig, "log_format")
    drain_seconds: float = same_option(ServiceConfig, "drain_seconds", default=10.0)


def has_pools(config: WorkerConfig | ServeConfig) -> bool:
    """Whether workers compute in pools of their own, above the arena."""
    return config.kv_pool == "device" or (config.kv_pool == "auto" and config.device.partition(":")[0] != "cpu")


def parse_bytes(text: str) -> int:
    """`512MiB`, `4GiB`, `4G` or a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    if match is None:
        raise ConfigError(f"{text!r} is not an amount of memory; write it like 512MiB or 4GiB")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2] or " "))

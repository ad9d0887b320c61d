"""Options of every service, the types of options that several services have, and checks of options that contradict."""

from __future__ import annotations

from typing import Annotated, Literal, Protocol, Self

from pydantic import BeforeValidator, model_validator

from paceline.core.adapters import LoraOptions, adapter_folders
from paceline.core.errors import ConfigError
from paceline.core.online_quantization import OnlineQuantization, read_online_quantization
from paceline.core.options import Options, check_all_or_none, option
from paceline.core.telemetry import LogFormat

GIB = 1 << 30

KV_TOKENS = 24 * 1024
"""Number of tokens for which KV memory of the size "auto" has room."""

Quantization = Literal["auto", "none", "int8", "int4", "fp8", "mxfp8", "mxfp4", "gguf"]
"""Format of a model's matrices in memory, as the user names it."""
ChosenQuantization = Quantization | OnlineQuantization
"""Format of a model's matrices in memory, as the user chooses it with all options."""
WeightForm = Literal["none", "gguf", "checkpoint"] | OnlineQuantization
"""Format of a model's matrices in memory. "checkpoint" is the format of the quantized weights on disk."""
KVPool = Literal["auto", "arena", "device"]
"""Memory that holds the KV blocks with which a worker computes."""
RouterMode = Literal["kv", "round-robin"]
"""The gateway's rule for choosing workers."""
TransportChoice = Literal["auto", "ucx", "grpc"]
"""The transport that copies KV blocks between hosts."""
LogLevel = Annotated[Literal["debug", "info", "warning", "error", "critical"], BeforeValidator(str.lower)]
"""The lowest severity of messages that are logged."""
GenerationConfig = Literal["auto", "none"]
"""The source of the sampling parameters that a request leaves out."""
ModelImpl = Literal["auto", "native", "transformers"]
"""The code that computes a model: the files of `paceline/models`, or the model's own code in `transformers`."""
DType = Literal["auto", "bfloat16", "float32"]
"""Data type of weights, activations and, by default, KV blocks."""
KVCacheDType = Annotated[
    Literal["auto", "int8", "fp8_e4m3"], BeforeValidator(lambda name: "fp8_e4m3" if name == "fp8" else name)
]
"""Data type of keys and values in the KV cache; auto is that of activations. fp8 is another name of fp8_e4m3."""


class ServiceConfig(Options):
    """Options of every service."""

    cluster: str = option("default", "name of the stack; stacks with different names can share one Redis", "cluster")
    redis: str = option(
        "redis://127.0.0.1:6379/0",
        "URL of the Redis by which services find each other; with TLS: rediss://USER@HOST:PORT/0?ssl_ca_certs=FILE",
        "cluster",
        is_secret=True,
    )
    redis_password_file: str = option(
        "",
        "file with the password of --redis, which only the user of this service may read (paceline token FILE makes "
        "one). In a URL on the command line, other users see the password",
        "cluster",
    )
    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all addresses of the machine", "network")
    port: int = option(0, "port to listen on; 0 takes a free port", "network", at_least=0, at_most=65535)
    auth_token_file: str = option(
        "",
        "file with the secret that all services of the cluster share (paceline token FILE makes one); "
        "without it, this service accepts calls from everybody who can connect to it",
        "network",
    )
    advertise: str = option(
        "",
        "address by which other services reach this one; default: --host, or this machine's own if that is 0.0.0.0",
        "network",
    )
    cluster_certfile: str = option(
        "",
        "PEM file with this service's certificate for TLS between services, and any intermediate ones below it. Its "
        "subject alternative names must include the address at which others reach this service, unless "
        "--cluster-cert-name is given. Both sides of a connection show and check certificates. All services of a "
        "cluster must have these options, or none; the files are read again when they change. HTTP clients get the "
        "certificate of --ssl-certfile",
        "cluster",
    )
    cluster_keyfile: str = option("", "PEM file with the private key of --cluster-certfile", "cluster")
    cluster_ca_certs: str = option(
        "",
        "PEM file with the certificates of the authorities that sign the certificates of the cluster's services; every "
        "certificate that they sign lets its owner in, so take an authority of your own for each cluster",
        "cluster",
    )
    cluster_cert_name: str = option(
        "",
        "name that the certificates of all services have, for services whose addresses are not known beforehand, such "
        "as containers; default: a service's certificate must have the address by which it is called",
        "cluster",
    )
    log_level: LogLevel = option("info", "lowest severity of messages that are logged", "logs")
    log_format: LogFormat = option("text", "format of log lines: text for people, json for machines", "logs")
    drain_seconds: float = option(
        30.0,
        "after SIGTERM or Ctrl-C, this service takes no new requests and waits this many seconds for running ones; "
        "then it ends those that still run",
        "limits",
        at_least=0,
        at_most=86400,
    )
    ready_fd: int = option(
        -1, "open file descriptor; this service writes its address there when it is ready", "network"
    )

    @model_validator(mode="after")
    def _check_cluster_files(self) -> Self:
        check_all_or_none(
            cluster_certfile=self.cluster_certfile,
            cluster_keyfile=self.cluster_keyfile,
            cluster_ca_certs=self.cluster_ca_certs,
        )
        if self.cluster_cert_name and not self.cluster_certfile:
            raise ConfigError("--cluster-cert-name needs --cluster-certfile")
        return self


class _WorkerAdapters(LoraOptions, Protocol):
    """The options about adapters that a worker and `serve` have."""

    max_loras: int
    max_cpu_loras: int


class _HttpServer(Protocol):
    """The options of an HTTP server, which a gateway and `serve` have."""

    root_path: str
    ssl_certfile: str
    ssl_keyfile: str
    ssl_ca_certs: str
    ssl_cert_reqs: int


class _Compute(Protocol):
    """The options of a worker that computes, which a worker and `serve` have."""

    device: str
    kv_pool: KVPool
    model_impl: ModelImpl
    quantization: Quantization
    quantization_config: str
    trust_remote_code: bool


def has_pools(config: _Compute) -> bool:
    """Return whether each worker computes with KV blocks in a pool of its own, rather than in the host's arena."""
    return config.kv_pool == "device" or (config.kv_pool == "auto" and config.device.partition(":")[0] != "cpu")


def quantization_of(config: _Compute) -> ChosenQuantization:
    """Return the format of matrices that --quantization and --quantization-config choose. Raises ConfigError."""
    return read_online_quantization(config.quantization, config.quantization_config) or config.quantization


def check_step_size(max_batched_tokens: int, max_seqs: int) -> None:
    """Raise ConfigError if a step may have fewer tokens than sequences."""
    if max_batched_tokens < max_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-seqs {max_seqs}: "
            "each step computes a token of every running sequence; raise the first or lower the second"
        )


def check_adapters(config: _WorkerAdapters) -> None:
    """Raise ConfigError if the options about adapters contradict each other."""
    adapter_folders(config)
    if config.max_cpu_loras and config.max_cpu_loras < config.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {config.max_cpu_loras} is less than --max-loras {config.max_loras}: the adapters of a "
            "step are among those in memory; raise the first or lower the second"
        )


def check_http(config: _HttpServer) -> None:
    """Raise ConfigError if the options of the HTTP server contradict each other."""
    check_all_or_none(ssl_certfile=config.ssl_certfile, ssl_keyfile=config.ssl_keyfile)
    if config.ssl_ca_certs and not config.ssl_certfile:
        raise ConfigError("--ssl-ca-certs needs --ssl-certfile")
    if bool(config.ssl_cert_reqs) != bool(config.ssl_ca_certs):
        raise ConfigError(
            "--ssl-cert-reqs 1 or 2 needs --ssl-ca-certs, and the other way round: one says whether clients show "
            "certificates, the other who must have signed them"
        )
    if config.root_path and (not config.root_path.startswith("/") or config.root_path.endswith("/")):
        raise ConfigError(f"--root-path must begin with / and not end with it, not be {config.root_path!r}")


def check_model_code(config: _Compute) -> None:
    """Raise ConfigError if --model-impl contradicts other options."""
    if config.trust_remote_code and config.model_impl == "native":
        raise ConfigError(
            "--trust-remote-code needs --model-impl auto or transformers; native models need no such code"
        )
    if config.quantization == "gguf" and config.model_impl == "transformers":
        raise ConfigError(
            "--quantization gguf needs --model-impl native or auto; with transformers, choose int8 or none"
        )
    if isinstance(quantization_of(config), OnlineQuantization) and config.device.partition(":")[0] != "cpu":
        raise ConfigError(
            f"--quantization {config.quantization} rounds matrices for the kernels of CPUs, not for --device "
            f"{config.device}; leave it out, and --quantization-config too"
        )

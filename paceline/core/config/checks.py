"""Checks of options that contradict each other, for several services."""

from __future__ import annotations

from typing import Protocol

from paceline.core.config.service import KVPool, ModelImpl, Quantization
from paceline.core.errors import ConfigError
from paceline.core.options import check_all_or_none


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
    trust_remote_code: bool


def has_pools(config: _Compute) -> bool:
    """Return whether each worker computes in its own pool, rather than in the arena."""
    return config.kv_pool == "device" or (config.kv_pool == "auto" and config.device.partition(":")[0] != "cpu")


def check_step_size(max_batched_tokens: int, max_seqs: int) -> None:
    """Raise ConfigError if a step may have fewer tokens than sequences."""
    if max_batched_tokens < max_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-seqs {max_seqs}: "
            "each step computes a token of every running sequence; raise the first or lower the second"
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

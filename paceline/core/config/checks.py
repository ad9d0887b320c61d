"""Checks of options that contradict each other, for several services."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.errors import ConfigError
from paceline.core.options import Options, flag

if TYPE_CHECKING:
    from paceline.core.config.http import HttpOptions
    from paceline.core.config.serve import ServeConfig
    from paceline.core.config.worker import WorkerConfig


def has_pools(config: WorkerConfig | ServeConfig) -> bool:
    """Return whether each worker computes in a pool of its own, rather than in the arena."""
    return config.kv_pool == "device" or (config.kv_pool == "auto" and config.device.partition(":")[0] != "cpu")


def check_step_size(max_batched_tokens: int, max_seqs: int) -> None:
    """Raise ConfigError if a step may have fewer tokens than sequences."""
    if max_batched_tokens < max_seqs:
        raise ConfigError(
            f"--max-batched-tokens {max_batched_tokens} is less than --max-seqs {max_seqs}: "
            "each step computes a token of every running sequence; raise the first or lower the second"
        )


def check_all_or_none(config: Options, *names: str) -> None:
    """Raise ConfigError if some of the options `names` are given and others are not."""
    given = [name for name in names if getattr(config, name)]
    if given and len(given) < len(names):
        missing = next(name for name in names if name not in given)
        raise ConfigError(f"{flag(given[0])} needs {flag(missing)}")


def check_http(config: HttpOptions | ServeConfig) -> None:
    """Raise ConfigError if the options of the HTTP server contradict each other."""
    check_all_or_none(config, "ssl_certfile", "ssl_keyfile")
    if config.ssl_ca_certs and not config.ssl_certfile:
        raise ConfigError("--ssl-ca-certs needs --ssl-certfile")
    if bool(config.ssl_cert_reqs) != bool(config.ssl_ca_certs):
        raise ConfigError(
            "--ssl-cert-reqs 1 or 2 needs --ssl-ca-certs, and the other way round: one says whether clients show "
            "certificates, the other who must have signed them"
        )
    if config.root_path and (not config.root_path.startswith("/") or config.root_path.endswith("/")):
        raise ConfigError(f"--root-path must begin with / and not end with it, not be {config.root_path!r}")


def check_model_code(config: WorkerConfig | ServeConfig) -> None:
    """Raise ConfigError if --model-impl contradicts other options."""
    if config.trust_remote_code and config.model_impl == "native":
        raise ConfigError(
            "--trust-remote-code needs --model-impl auto or transformers; native models need no such code"
        )
    if config.quantization == "gguf" and config.model_impl == "transformers":
        raise ConfigError(
            "--quantization gguf needs --model-impl native or auto; with transformers, choose int8 or none"
        )

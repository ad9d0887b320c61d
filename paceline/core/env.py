"""The only file that reads the environment. Everything else is a flag or a line of TOML."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Folder of converted models: $PACELINE_CACHE, else `paceline` in the user's cache folder."""
    if own := os.environ.get("PACELINE_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline"


def api_keys() -> tuple[str, ...]:
    """$PACELINE_API_KEY, so that a key need not stand in a command line: keys separated by commas."""
    return tuple(key.strip() for key in os.environ.get("PACELINE_API_KEY", "").split(",") if key.strip())


def exports_traces() -> bool:
    """Whether the standard OpenTelemetry variables name a collector."""
    return bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def child_environment(**variables: str) -> dict[str, str]:
    """This process's environment with some variables set, for a child process."""
    return {**os.environ, **variables}


def share_cores() -> None:
    """Lets OpenMP threads sleep while they wait for each other; call it before torch is imported.

    By default they spin. Where prefill and decode workers share cores, a thread then burns the time slice that the one
    it waits for needs, and a step takes ten times as long (docs/decisions/0001-openmp-wait-policy.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet_grpc() -> None:
    """Keep gRPC from logging that a peer has ended, unless the user wants it; call it before gRPC is imported.

    What fails comes as an error, which is reported where it belongs.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def quiet_ucx() -> None:
    """Lets UCX say nothing on its own, unless the user wants it to; call it before UCX is loaded.

    What fails comes as an error, which is reported where it belongs.
    """
    for variable, value in (("UCX_LOG_LEVEL", "fatal"), ("UCXX_LOG_LEVEL", "fatal"), ("UCX_WARN_UNUSED_ENV_VARS", "n")):
        os.environ.setdefault(variable, value)

"""Environment variables, and the commands and environments of child processes. No other file reads such variables; all
other settings are flags or lines of TOML."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from paceline.core.options import listed


def default_cache_dir() -> Path:
    """Return the folder of converted models: $PACELINE_CACHE, else `paceline` in the user's cache folder."""
    if chosen := os.environ.get("PACELINE_CACHE"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "paceline"


def api_keys() -> tuple[str, ...]:
    """Return the keys in $PACELINE_API_KEY, which are separated by commas. They are no flag, because other users can
    see command lines.
    """
    return listed(os.environ.get("PACELINE_API_KEY", ""))


def admin_keys() -> tuple[str, ...]:
    """Return the keys in $PACELINE_ADMIN_KEY, which are separated by commas."""
    return listed(os.environ.get("PACELINE_ADMIN_KEY", ""))


def instruction_set() -> str:
    """Return $PACELINE_ISA, the instruction set that the native kernels shall use; "auto" if it is not set."""
    return os.environ.get("PACELINE_ISA") or "auto"


def visible_gpus() -> str | None:
    """Return $CUDA_VISIBLE_DEVICES, which names the GPUs that this process may use; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def with_gpu(name: str) -> dict[str, str]:
    """Return this process's environment with $CUDA_VISIBLE_DEVICES set to one GPU, for a child process."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": name}


def exports_traces() -> bool:
    """Return whether the standard OpenTelemetry variables name a collector."""
    return bool(os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"))


def kubernetes_api() -> str | None:
    """Return host:port of the Kubernetes API server if this process is in a pod; None otherwise."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    return f"[{host}]:{port}" if host and ":" in host else f"{host}:{port}" if host and port else None


def child_command(*arguments: str) -> list[str]:
    """Return the command `paceline ARGUMENTS` for a child process, which imports nothing from the current folder."""
    return [sys.executable, "-P", "-m", "paceline", *arguments]


def child_environment(**variables: str) -> dict[str, str]:
    """Return this process's environment with some variables set, for a child process."""
    return {**os.environ, **variables}


def bare_environment(**variables: str) -> dict[str, str]:
    """Return the environment of a child process that handles hostile input: the paths of its code, and no secrets."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ}
    return {**kept, **variables}


def share_cores() -> None:
    """Let OpenMP threads sleep while they wait for each other. Must be called before torch is imported.

    By default they spin. If prefill and decode workers share cores, a spinning thread uses up the time slice of the
    thread that it waits for, and a step takes ten times as long (docs/decisions/0001-openmp-wait-policy.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def quiet_grpc() -> None:
    """Keep gRPC from logging that a peer has ended, and from acting in forked processes. Settings of the user stay.

    Must be called before gRPC is imported. No failure is lost: each raises an error, which our own code logs. A forked
    process here only starts another program, whose standard error would show gRPC's messages.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def quiet_ucx() -> None:
    """Keep UCX from logging anything, unless the user set its log level.

    Must be called before UCX is loaded. No failure is lost: each raises an error, which our own code logs.
    """
    for variable, value in (("UCX_LOG_LEVEL", "fatal"), ("UCXX_LOG_LEVEL", "fatal"), ("UCX_WARN_UNUSED_ENV_VARS", "n")):
        os.environ.setdefault(variable, value)

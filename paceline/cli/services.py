"""The commands that run a service."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.core import env, telemetry
from paceline.core.config import (
    GatewayConfig,
    KVTransferConfig,
    PlannerConfig,
    PoolConfig,
    ServeConfig,
    ServiceConfig,
    WorkerConfig,
)
from paceline.core.config_source import load_config
from paceline.core.errors import ConfigError
from paceline.services.common.redis_url import with_password


@dataclasses.dataclass(frozen=True)
class Service:
    """A command that runs `paceline.services.<name>.main.run` with a config until a signal stops it.

    The commands of workers for text run `paceline.services.text_worker.run`, because such a worker may change its role.
    """

    config: type[ServiceConfig | ServeConfig]
    arguments: str
    summary: str
    extra: str
    """The pip extra with the dependencies of the service."""
    role: str = ""
    """The role in which a worker for text starts; "" for all other services."""


SERVICES = {
    "serve": Service(ServeConfig, "[MODEL]", "Start a whole stack on this machine; Ctrl-C stops it.", "serve"),
    "gateway": Service(GatewayConfig, "MODEL", "The HTTP API.", "gateway"),
    "prefill": Service(WorkerConfig, "MODEL", "A worker that turns prompts into KV blocks.", "worker", "prefill"),
    "decode": Service(WorkerConfig, "MODEL", "A worker that turns KV blocks into tokens.", "worker", "decode"),
    "worker": Service(WorkerConfig, "MODEL", "A worker that waits until it is given a role.", "worker", "standby"),
    "encode": Service(WorkerConfig, "MODEL", "A worker that turns images, frames and audio into encodings.", "worker"),
    "pool": Service(PoolConfig, "MODEL", "A worker that turns texts into vectors, scores and labels.", "worker"),
    "kvtransfer": Service(KVTransferConfig, "", "The owner of a host's KV memory.", "worker"),
    "planner": Service(
        PlannerConfig, "", "The planner, which adds and drains workers as the load asks.", "compose,kubernetes"
    ),
}


def run_service(name: str, config: ServiceConfig | ServeConfig) -> None:
    """Run the service of a command until a signal stops it."""
    # Until the service handles signals itself, there is nothing to clean up. Without this handler, SIGTERM would not
    # end the first process of a container.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    env.share_cores()
    env.quiet_grpc()
    role = SERVICES[name].role
    run = importlib.import_module(f"paceline.services.{'text_worker' if role else f'{name}.main'}").run
    # A worker's name in its logs and traces is its name in the cluster.
    telemetry.setup(getattr(config, "worker_id", "") or name, config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run(config, role) if role else run(config))


def load_service_config(name: str, file: Path | None, flags: dict[str, Any]) -> ServiceConfig | ServeConfig:
    """Return the config of a command's service.

    Args:
        file: a TOML file with options, if there is one.
        flags: options of the command line, which override the options of the file.

    Raises:
        ConfigError: an option is unknown or wrong, or there is no usable MODEL.
    """
    config = load_config(SERVICES[name].config, name, file, flags)
    if file_of_password := config.redis_password_file:
        # `serve` hands the URL with the password on to its processes in a file of a private folder.
        redis = with_password(config.redis, file_of_password)
        config = config.model_copy(update={"redis": redis, "redis_password_file": ""})
    model = getattr(config, "model", None)
    if getattr(config, "models_file", ""):
        if "model" in flags:
            raise ConfigError("MODEL and --models-file exclude each other: the file names the models")
        return config
    if model == "":
        raise ConfigError(f"{name} needs a model: paceline {name} MODEL")
    if model and name != "serve" and not Path(model).is_dir():
        raise ConfigError(f"{name} takes the folder of a model; run: paceline prepare {model}, which prints the folder")
    return config


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop

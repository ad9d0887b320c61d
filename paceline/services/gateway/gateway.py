"""One gateway process: everything that it owns, from start to close."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from paceline.core import env
from paceline.core.config import GatewayConfig, model_configs
from paceline.core.errors import ConfigError
from paceline.core.options import listed
from paceline.core.pooling_choice import pooling_choice
from paceline.core.pooling_folder import read_pooling_config
from paceline.core.request_classes import read_classes
from paceline.services.common.credentials import read_credentials
from paceline.services.common.lifecycle import collect_when_idle
from paceline.services.common.registry import connect
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.http.access.keys import AccessBook
from paceline.services.gateway.http.access.limiter import Gateways, Limiter
from paceline.services.gateway.http.errors import ApiError, LeavingError, NoWorkerError, Reason
from paceline.services.gateway.http.fair_pool import FairPool
from paceline.services.gateway.model_fleet import ModelFleet, Shared
from paceline.services.gateway.planning.constraints.compiler import ConstraintCompiler
from paceline.services.gateway.planning.media.items import NO_MEDIA
from paceline.services.gateway.planning.media.loader import MediaService
from paceline.services.gateway.planning.media.processors.families import read_processor
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.telemetry.gateway_metrics import GatewayMetrics

log = logging.getLogger(__name__)

LoadedModel: TypeAlias = tuple[GatewayConfig, Tokenizer]
"""The options for one model (the gateway's options, overridden by the model's own), and the model's tokenizer."""

_SHOWN = 300
"""Characters of an unknown model's name that an error shows."""


class Gateway:
    """One gateway with all its parts: the parts that its models share, and each model with its fleet.

    Args:
        models: the options and the tokenizer of each model, from `load_models`.
        address: the host:port at which others reach the HTTP API. It is written to Redis.
    """

    def __init__(self, config: GatewayConfig, models: Sequence[LoadedModel], address: str = "") -> None:
        self.config = config
        client_keys = listed(config.api_key) or env.api_keys()
        classes = read_classes(config.classes_file)
        admin_keys = listed(config.admin_key) or env.admin_keys()
        self.keys = AccessBook(client_keys, admin_keys, config.api_keys_file, classes)
        self.limiter = Limiter(self.keys, self._gateways, self._count_limited)
        self.started = int(time.time())
        self.draining = False
        """Whether new requests are refused."""
        self.metrics = GatewayMetrics(classes, config.vllm_metric_names)
        self.bodies = FairPool()
        """Pool of threads for work on the bodies of requests."""
        self._redis = connect(config.redis)
        self._shared = shared = Shared(
            redis=self._redis,
            credentials=read_credentials(config),
            classes=classes,
            metrics=self.metrics,
            media=MediaService(config, metrics=self.metrics.media),
            address=address,
            key_uses=self.limiter.report,
            constraints=ConstraintCompiler(config, models),
        )
        self.constraints = shared.constraints
        self.traces = shared.traces
        fleets = (ModelFleet(own, tokenizer, shared, index) for index, (own, tokenizer) in enumerate(models))
        self.models = {fleet.name: fleet for fleet in fleets}
        """The models by their names in the API, without their adapters."""
        self._check_names()
        self._tasks: list[asyncio.Task[None]] = []

    async def prepare(self) -> None:
        """Start helper processes and load data that the first request of a kind would otherwise wait for.

        If a process cannot be started now, the first request that needs it starts it.
        """
        starting = [self.constraints.start()]
        if any(model.media_preparer.kinds for model in self.models.values()):
            starting.append(self._shared.media.pool.start())
        for model in self.models.values():
            model.tokenizer.prepare()
        for outcome in await asyncio.gather(*starting, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.warning("not prepared: %s", outcome)

    async def start(self) -> None:
        """Read the fleets, and register this gateway in each of them."""
        self._tasks = [
            asyncio.create_task(self.keys.watch(), name="keys"),
            asyncio.create_task(collect_when_idle(self.running_sequences), name="garbage"),
        ]
        await asyncio.gather(*(model.start() for model in self.models.values()))

    async def close(self) -> None:
        """End all requests and release everything that the gateway owns."""
        await end_tasks(*self._tasks)
        await asyncio.gather(*(model.close() for model in self.models.values()))
        await self._shared.media.close()
        await self.constraints.close()
        await asyncio.to_thread(self.bodies.close)
        await self._redis.aclose()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and let running requests end. Requests that still run after `seconds` fail."""
        self.draining = True
        for model in self.models.values():
            model.begin_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for model in self.models.values():
                    await model.runner.sequences.wait_until_idle()
                await self.traces.requests.wait_until_idle()  # slow clients may still read
        for model in self.models.values():
            model.runner.abort()

    def abort(self, request_id: str, may_end: Callable[[str], bool]) -> None:
        """End all requests with this id, of any model, whose owner `may_end` accepts."""
        for model in self.models.values():
            model.requests.abort(request_id, may_end)

    def running_sequences(self) -> int:
        """Return the number of sequences of all models that wait or run."""
        return sum(model.runner.sequences.count for model in self.models.values())

    def check_ready(self, name: str | None = None) -> None:
        """Raise UnavailableError while draining, or if no model can be served now or soon.

        Args:
            name: the only model to check; None if any model is enough.
        """
        self._check_stays()
        if not any(model.is_ready for model in self.named(name)):
            raise NoWorkerError

    def pick(self, name: str | None) -> ModelFleet:
        """Return the model that a request names. Raises LeavingError while draining, and the errors of `find`."""
        self._check_stays()
        return self.find(name)

    def find(self, name: str | None) -> ModelFleet:
        """Return a model by its name; None is enough if there is only one. Raises ApiError if it is not served here."""
        if name is None and len(self.models) == 1:
            return next(iter(self.models.values()))
        if name is not None and (model := self.models.get(name)) is not None:
            return model
        if name is not None and (base := self.base_of(name)) is not None:
            adapter = base.adapters.find(name)
            assert adapter is not None
            return base.under(adapter)
        served = ", ".join(map(repr, self.names()))
        if name is None:
            raise ApiError(400, f"this server serves several models; say which one: {served}", param="model")
        raise ApiError(
            404,
            f"the model {name[:_SHOWN]!r} does not exist here; this server serves {served}",
            param="model",
            code="model_not_found",
        )

    def base_of(self, name: str) -> ModelFleet | None:
        """Return the model that has an adapter with this name; None if there is none."""
        return next((model for model in self.models.values() if model.adapters.find(name) is not None), None)

    def names(self) -> list[str]:
        """Return the names of all models, and of their adapters."""
        return [*self.models, *(adapter.name for model in self.models.values() for adapter in model.adapters)]

    def _check_names(self) -> None:
        """Raise ConfigError if an adapter has the name of a model or of another model's adapter."""
        names = self.names()
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ConfigError(f"--lora-modules: {twice!r} is the name of another model or adapter; choose another name")

    def named(self, name: str | None) -> list[ModelFleet]:
        """Return the model with this name, or all models if it is None. Raises ApiError if it is not served here."""
        return list(self.models.values()) if name is None else [self.find(name)]

    def _check_stays(self) -> None:
        if self.draining:
            raise LeavingError

    def _count_limited(self, request_class: str, reason: Reason) -> None:
        """Count a request that a limit of its key refuses. Its body, which names the model, has not been read."""
        only = next(iter(self.models)) if len(self.models) == 1 else ""
        self.metrics.count_refusal(only, request_class, reason)

    def _gateways(self) -> Gateways:
        """Return the reports of all gateways about keys. A gateway sends its report to the fleets of all its models."""
        fleets = [model.fleet for model in self.models.values()]
        uses = {member.worker_id: member.keys for fleet in fleets for member in fleet.gateways}
        return Gateways(self._shared.gateway_id, uses, all(fleet.redis_answers for fleet in fleets))


def load_models(config: GatewayConfig) -> list[LoadedModel]:
    """Return the options and the tokenizer of each model. Raises ConfigError or ModelError if a file cannot be read."""
    return [(own, load_tokenizer(own)) for own in map(_with_real_folder, model_configs(config))]


def _with_real_folder(config: GatewayConfig) -> GatewayConfig:
    """Return the config with symbolic links in `model` resolved, so that all files are read from the same folder."""
    if not config.model:
        return config
    folder = Path(config.model)
    own = {"model": str(folder.resolve()), "served_model_name": config.served_model_name or folder.absolute().name}
    return config.model_copy(update=own)


def load_tokenizer(config: GatewayConfig) -> Tokenizer:
    """Return the tokenizer of the model's folder. Raises ConfigError or ModelError if it cannot be read."""
    if not config.model:
        raise ConfigError("the gateway needs the Hugging Face folder of the model: paceline gateway MODEL")
    folder = Path(config.model)
    if not folder.is_dir():
        raise ConfigError(f"{config.model} is not a folder")
    chat_template = Path(config.chat_template) if config.chat_template else None
    processor = read_processor(folder)
    media_tokens = NO_MEDIA if processor is None else processor.tokens
    pooling = read_pooling_config(folder, pooling_choice(config))
    generates = pooling is None or pooling.generates
    longest = config.max_text_characters
    return Tokenizer(folder, chat_template, config.generation_config, media_tokens, longest, generates)

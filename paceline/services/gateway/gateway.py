"""All that one gateway process owns, from start to close."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from redis.exceptions import RedisError

from paceline.core import env
from paceline.core.config import GatewayConfig
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.model_folder import model_digest
from paceline.core.options import listed, parse_bytes
from paceline.core.planner.reports import Role
from paceline.core.request_classes import read_classes
from paceline.proto import common_pb2
from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common.credentials import read_credentials
from paceline.services.common.garbage import collect_when_idle
from paceline.services.common.lifecycle import unique_name
from paceline.services.common.pins import release_pins, write_pins
from paceline.services.common.registry import Member, Registrar, connect
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.access.book import AccessBook
from paceline.services.gateway.access.limiter import Gateways, Limiter
from paceline.services.gateway.answers.registry import choose_forms
from paceline.services.gateway.block_feed import BlockFeed
from paceline.services.gateway.console.feed import Feed
from paceline.services.gateway.errors import ApiError, LeavingError, NoWorkerError
from paceline.services.gateway.fleet import Fleet
from paceline.services.gateway.kinds import KINDS
from paceline.services.gateway.media.items import NO_MEDIA
from paceline.services.gateway.media.loader import MediaService
from paceline.services.gateway.media.preparation import MediaPreparer
from paceline.services.gateway.media.processors.families import read_processor
from paceline.services.gateway.metrics import Metrics
from paceline.services.gateway.placements import PlacementLog
from paceline.services.gateway.plan import Kind, Plan, ServedModel
from paceline.services.gateway.prefix_index import PrefixIndex
from paceline.services.gateway.runner import SequenceRunner
from paceline.services.gateway.running import RunningRequests
from paceline.services.gateway.sampling import LogprobRules
from paceline.services.gateway.scoring import Scoring
from paceline.services.gateway.tokenizer import Tokenizer
from paceline.services.gateway.trace_book import TraceBook
from paceline.services.gateway.trace_recorder import TraceRecorder


class Gateway:
    """One gateway with all its parts.

    Args:
        tokenizer: the tokenizer of the model that the workers serve.
        address: the host:port at which others reach the HTTP API. It is written to Redis.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer, address: str = "") -> None:
        self.config = config
        self.tokenizer = tokenizer
        client_keys = listed(config.api_key) or env.api_keys()
        self.classes = read_classes(config.classes_file)
        admin_keys = listed(config.admin_key) or env.admin_keys()
        self.keys = AccessBook(client_keys, admin_keys, config.api_keys_file, self.classes)
        self.limiter = Limiter(self.keys, self._gateways)
        self._watch: asyncio.Task[None] | None = None
        self._collecting: asyncio.Task[None] | None = None
        self.forms = choose_forms(
            config.tool_call_parser,
            config.reasoning_parser,
            tokenizer.chat_template_source,
            tokenizer.vocabulary.added_tokens,
        )
        self._logprob_rules = LogprobRules(config.max_logprobs, config.return_tokens_as_token_ids)
        self.scoring = Scoring(tokenizer, config.score_tokens, config.score_template)
        self.model = config.served_model_name or Path(config.model).name
        self.started = int(time.time())
        self.draining = False
        """Whether new requests are refused."""
        self._redis = connect(config.redis)
        digest, credentials = model_digest(Path(config.model)), read_credentials(config)
        self.fleet = Fleet(self._redis, config.cluster, digest, credentials, return_seconds=config.queue_seconds)
        self._placements = PlacementLog(self._redis, config.cluster)
        self._prefixes = PrefixIndex()
        self._block_feed = BlockFeed(self._redis, config.cluster, self.fleet.hosts, self._prefixes)
        self.runner = SequenceRunner(config, self.fleet, self._placements, self._prefixes, self.classes)
        self.metrics = Metrics(self.model, self.fleet.workers, self.runner, config.vllm_metric_names, self.classes)
        self.runner.queue.on_refused = self.limiter.on_refused = self.metrics.queue.count_refusal
        self.media = MediaService(config, metrics=self.metrics.media)
        self.media_preparer = MediaPreparer(config, read_processor(Path(config.model)), self.media)
        self.traces = TraceBook()
        self.recorder = _recorder(config, self._prefixes)
        """None if no trace is recorded."""
        self.requests = RunningRequests()
        about = {"model": self.model, "media": sorted(self.media_preparer.kinds)}
        self.console = Feed(self.metrics.history, self.fleet, self.runner, about)
        self._worker_id = unique_name("gateway")
        self._epoch = time.time_ns()
        self._address = address
        self._registrar = Registrar(config.redis, config.cluster, self._describe)
        self.runner.first_worker.on_wait = self._registrar.announce

    async def start(self) -> None:
        """Read the fleet, and register this gateway in it."""
        self._watch = asyncio.create_task(self.keys.watch(), name="keys")
        self._collecting = asyncio.create_task(collect_when_idle(lambda: self.runner.sequences.count), name="garbage")
        await self.fleet.start()
        if self.config.router_mode == "kv":
            self._block_feed.start()
        self._placements.start()
        self.runner.hints.start()
        self.console.start()
        await self._registrar.start()

    async def close(self) -> None:
        """End all requests and release everything that the gateway owns."""
        self.runner.abort()
        await self.console.close()
        await end_tasks(*(task for task in (self._watch, self._collecting) if task is not None))
        await self.media.close()
        await self._registrar.stop()
        await self._placements.close()
        await self.runner.hints.close()
        await self._block_feed.close()
        await self.fleet.close()
        await self._redis.aclose()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    async def drain(self, seconds: float) -> None:
        """Refuse new requests and let running ones end. Requests that still run after `seconds` fail."""
        self.draining = True
        self._registrar.announce()
        self.console.end_streams()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.runner.sequences.wait_until_idle()
                await self.traces.requests.wait_until_idle()  # slow clients may still read
        self.runner.abort()

    def cached_blocks(self) -> dict[str, list[tuple[bytes, int]]]:
        """Return for each host id the name and the tokens of its cached blocks, as far as this gateway knows."""
        hosts = {host_id: self._prefixes.host(host_id) for host_id in self._prefixes.hosts()}
        return {host_id: list(own.blocks()) for host_id, own in hosts.items() if own is not None}

    async def _wait_for_workers(self) -> None:
        """Wait until the first workers have loaded the model, but no longer than a request may wait for a worker.

        Raises BusyError or UnavailableError if a planner has started no worker in time.
        """
        if self.fleet.awaits_first_worker:
            with self.runner.traffic.early():
                await self.runner.first_worker.wait(self.config.request_seconds)
        if not self.fleet.has_served.is_set() and self.fleet.is_starting:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.queue_seconds):
                    await self.fleet.has_served.wait()

    async def plan(self, make: Callable[[ServedModel], Plan], kind: Kind = common_pb2.WORK_KIND_GENERATE) -> Plan:
        """Return a request's plan, after the first workers have loaded the model.

        Args:
            make: returns the plan. It runs on a thread, because to tokenize a long prompt takes a while.
            kind: as for `served_model`.

        Raises the errors of `make`.
        """
        return await asyncio.to_thread(make, await self.served_model(kind))

    async def served_model(self, kind: Kind = common_pb2.WORK_KIND_GENERATE) -> ServedModel:
        """Return what plans are made for, after the first workers have loaded the model.

        Args:
            kind: the kind of work, which says whose context the request has to fit into.
        """
        await self._wait_for_workers()
        longest = self.fleet.max_model_len(KINDS[kind].decodes)
        return ServedModel(self.tokenizer, longest, self.forms, self._logprob_rules)

    def check_ready(self) -> None:
        """Raise UnavailableError while draining, or if no decode worker is ready and no planner starts one."""
        self._check_stays()
        ready = any(c.member.role == "decode" and c.member.state == "ready" for c in self.fleet.snapshot())
        if not ready and not self.fleet.may_be_empty:
            raise NoWorkerError

    def check_request(self, model: str | None) -> None:
        """Raise UnavailableError while draining, and ApiError if the requested model is not served here."""
        self._check_stays()
        if model is not None and model != self.model:
            raise ApiError(
                404,
                f"the model {model!r} does not exist here; this server serves {self.model!r}",
                param="model",
                code="model_not_found",
            )

    def waiting_requests(self) -> int:
        """Return how many sequences wait for a worker, at all gateways. What others say is up to a second old."""
        members = (worker.member for worker in self.fleet.workers())
        others = (each for each in members if each.role == "gateway" and each.worker_id != self._worker_id)
        return len(self.runner.queue) + sum(other.load.waiting for other in others)

    async def pin(self, numbers: Mapping[Role, int], release: Sequence[Role]) -> None:
        """Tell the planner to keep so many workers of some roles, and that it may scale others again.

        Raises UnavailableError if Redis does not answer.
        """
        try:
            if numbers:
                await write_pins(self._redis, self.config.cluster, numbers)
            if release:
                await release_pins(self._redis, self.config.cluster, release)
        except (RedisError, OSError) as error:
            raise UnavailableError(f"the planner cannot be told, because Redis does not answer ({error})") from error

    def _check_stays(self) -> None:
        if self.draining:
            raise LeavingError

    def _gateways(self) -> Gateways:
        uses = {member.worker_id: member.keys for member in self.fleet.gateways}
        return Gateways(self._worker_id, uses, self.fleet.redis_answers)

    def _describe(self) -> Member:
        waiting = len(self.runner.queue)
        return Member(
            worker_id=self._worker_id,
            role="gateway",
            epoch=self._epoch,
            address=self._address,
            host_id="",
            state="draining" if self.draining else "ready",
            load=LoadReport(running=self.runner.sequences.count - waiting, waiting=waiting),
            keys=self.limiter.report(),
            traffic=self.runner.traffic.report(),
        )


def _recorder(config: GatewayConfig, prefixes: PrefixIndex) -> TraceRecorder | None:
    if not config.record_trace:
        return None
    secret = read_credentials(config).secret
    path, size = Path(config.record_trace).expanduser(), parse_bytes(config.record_trace_size)
    return TraceRecorder(path, size, secret, prefixes.layouts)


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
    return Tokenizer(folder, chat_template, config.generation_config, media_tokens)

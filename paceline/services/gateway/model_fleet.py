"""One model with its fleet at one gateway, independent of the gateway's other models."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.requests import Request

from paceline.core.adapters import Adapter, adapter_folders
from paceline.core.config import GatewayConfig
from paceline.core.errors import UnavailableError
from paceline.core.options import parse_bytes
from paceline.core.planner.reports import Role
from paceline.core.pooling import PoolTask
from paceline.core.pooling_choice import pooling_choice
from paceline.core.pooling_folder import read_pooling_config
from paceline.core.request_classes import Classes
from paceline.proto import common_pb2
from paceline.proto.fleet_pb2 import KeyUse, LoadReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.lifecycle import unique_name
from paceline.services.common.pins import write_pins
from paceline.services.common.registry import Member, Registrar
from paceline.services.common.seals import Seal
from paceline.services.common.secret import Secret
from paceline.services.gateway.fleet.adapter_book import AdapterBook
from paceline.services.gateway.fleet.adapter_watch import AdapterWatch
from paceline.services.gateway.fleet.block_feed import BlockFeed
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.sleep_keeper import SleepKeeper
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import until_disconnect
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.planning.answers.registry import choose_forms
from paceline.services.gateway.planning.constraints.compiler import ConstraintCompiler
from paceline.services.gateway.planning.media.loader import MediaService
from paceline.services.gateway.planning.media.preparation import MediaPreparer
from paceline.services.gateway.planning.media.processors.families import read_processor
from paceline.services.gateway.planning.plan import Kind, Plan, ServedModel, timeout_of
from paceline.services.gateway.planning.sampling import LogprobRules
from paceline.services.gateway.planning.scoring import Scoring
from paceline.services.gateway.planning.sharing import CacheSalts, SharedPrompts, read_shared_prompts
from paceline.services.gateway.planning.tokenizer import Tokenizer
from paceline.services.gateway.routing.prefix_index import PrefixIndex
from paceline.services.gateway.sequences.kinds import KINDS
from paceline.services.gateway.sequences.notices import PlacementLog
from paceline.services.gateway.sequences.patience import life_seconds
from paceline.services.gateway.sequences.runner import SequenceRunner
from paceline.services.gateway.telemetry.adapter_use import AdapterUse
from paceline.services.gateway.telemetry.feed import Feed
from paceline.services.gateway.telemetry.gateway_metrics import GatewayMetrics
from paceline.services.gateway.telemetry.metrics import Metrics
from paceline.services.gateway.telemetry.trace_book import RunningRequests, TraceBook
from paceline.services.gateway.telemetry.trace_recorder import TraceRecorder


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of a gateway that all of its models use."""

    redis: Redis
    credentials: Credentials
    classes: Classes
    metrics: GatewayMetrics
    media: MediaService
    address: str
    """host:port at which others reach the HTTP API; it is written to Redis."""
    key_uses: Callable[[], Sequence[KeyUse]]
    """Function that returns this gateway's report about the use of each API key's limits."""
    constraints: ConstraintCompiler
    abilities: dict[str, list[str]] = field(default_factory=dict)
    """What each model can do, by its name in the API."""
    traces: TraceBook = field(default_factory=TraceBook)
    gateway_id: str = field(default_factory=partial(unique_name, "gateway"))
    """This gateway's name in every fleet."""
    epoch: int = field(default_factory=time.time_ns)


class ModelFleet:
    """The parts of a gateway that belong to one model, from `start` to `close`.

    Args:
        config: the gateway's options, overridden by this model's own options.
        index: number of the model at its gateway, from 0.
    """

    def __init__(self, config: GatewayConfig, tokenizer: Tokenizer, shared: Shared, index: int = 0) -> None:
        self.config = config
        self._index = index
        self.name = config.served_model_name or Path(config.model).name
        self.tokenizer = tokenizer
        self.media, self.traces, self.requests = shared.media, shared.traces, RunningRequests()
        self.adapters = AdapterBook(adapter_folders(config))
        self.adapter: Adapter | None = None
        """The adapter that a request names in place of the model; see `under`."""
        self.forms = choose_forms(
            config.tool_call_parser,
            config.reasoning_parser,
            tokenizer.tool_template_source,
            tokenizer.vocabulary.added_tokens,
        )
        self._logprob_rules = LogprobRules(config.max_logprobs, config.return_tokens_as_token_ids)
        self.cache_salts = CacheSalts(shared.credentials.secret, config.share_cache)
        self._shared_prompts = SharedPrompts(read_shared_prompts(config.shared_prompts), tokenizer, self.forms)
        self.pooling = read_pooling_config(Path(config.model), pooling_choice(config)) if config.model else None
        """How the model makes vectors, scores or labels; None if it only generates."""
        shared.abilities[self.name] = self.abilities
        self.scoring = Scoring(tokenizer, config.score_tokens, config.score_template)
        self._shared = shared
        self._seal = Seal(shared.credentials.secret)
        self._draining = False
        self.metrics = Metrics(self.name, shared.classes)
        self.fleet = Fleet(
            shared.redis,
            config.cluster,
            tokenizer.files,
            shared.credentials,
            count_ignored=self.metrics.members_ignored.inc,
            on_refresh=self._follow_fleet,
        )
        models = shared.abilities.keys()
        self._watch = AdapterWatch(config, self.fleet, self.adapters, models, self.name_adapter, self.forget_adapter)
        self._placements = PlacementLog(shared.redis, config.cluster)
        self._prefixes = PrefixIndex()
        self._block_feed = BlockFeed(
            shared.redis, config.cluster, self.fleet.hosts, self._prefixes, shared.credentials.secret
        )
        self._registrar = Registrar(config.redis, config.cluster, self._describe, self.fleet.signatures)
        self.runner = SequenceRunner(
            config,
            self.fleet,
            self._placements,
            self._prefixes,
            shared.classes,
            count_refusal=partial(shared.metrics.count_refusal, self.name),
            announce=self._note_waiting,
            observe_search=self.metrics.search.observe,
        )
        self.sleep = SleepKeeper(
            self.fleet,
            config.sleep_after,
            is_used=lambda: self.runner.sequences.count + self.runner.waiting > 0,
            abort=self.requests.abort_all,
            announce=self._registrar.announce,
        )
        self.metrics.read_from(self.fleet.workers, self.runner)
        self.adapter_use = AdapterUse(self.adapters, self.runner.traffic, self.fleet.workers)
        shared.metrics.add(self.name, self.metrics.registry, self.adapter_use.names)
        self.media_preparer = MediaPreparer(config, read_processor(Path(config.model)), shared.media)
        self.recorder = _recorder(config, shared.credentials.secret, self._prefixes)
        """None if no trace is recorded."""
        about = {"model": self.name, "media": sorted(self.media_preparer.kinds)}
        self.console = Feed(self.metrics.history, self.fleet, self.runner, self.adapter_use, about)

    def _follow_fleet(self) -> None:
        for gateway in self.fleet.gateways:
            self.adapters.merge(gateway.adapters)
        self.runner.follow_fleet()
        self.sleep.follow_fleet()

    def _note_waiting(self) -> None:
        """Note that a request begins to wait for a ready worker while no other request does."""
        self._registrar.announce()
        self.sleep.wake_if_used()

    def name_adapter(self, adapter: Adapter) -> None:
        """Give an adapter a name, here and at the model's other gateways. Raises BusyError if there are too many."""
        self.adapters.put(adapter)
        self._registrar.announce()

    def forget_adapter(self, name: str) -> None:
        """Take a name away from an adapter, here and at the model's other gateways."""
        self.adapters.remove(name)
        self._registrar.announce()

    def under(self, adapter: Adapter) -> ModelFleet:
        """Return the model under the name of one of its adapters. It shares all other parts with this object."""
        view = copy.copy(self)
        view.name, view.adapter = adapter.name, adapter
        return view

    async def start(self) -> None:
        """Read the fleet, and register this gateway in it."""
        await self.fleet.start()
        if self.config.router_mode == "kv":
            self._block_feed.start()
        self._placements.start()
        self.console.start()
        await self._registrar.start()
        self._watch.start()

    async def close(self) -> None:
        """End all requests of this model and release everything that belongs to it."""
        self.runner.abort()
        await self._watch.close()
        await self.console.close()
        await self.sleep.close()
        await self._registrar.stop()
        await self._placements.close()
        await self.runner.hints.close()
        await self._block_feed.close()
        await self.fleet.close()
        if self.recorder is not None:
            await asyncio.to_thread(self.recorder.close)

    def begin_drain(self) -> None:
        """Tell the fleet that this gateway drains, and end the console's streams."""
        self._draining = True
        self._registrar.announce()
        self.console.end_streams()

    @property
    def tasks(self) -> frozenset[PoolTask]:
        """The tasks of pooling that the model has; none if it only generates."""
        return frozenset() if self.pooling is None else self.pooling.tasks

    @property
    def is_ready(self) -> bool:
        """Whether a worker is ready for the requests of this model or sleeps, or a planner will start one."""
        return self.fleet.has_worker(self.generates) or self.fleet.may_be_empty or self.fleet.sleeps

    @property
    def generates(self) -> bool:
        """Whether the model generates text."""
        return self.pooling is None or self.pooling.generates

    @property
    def abilities(self) -> list[str]:
        """What the model can do: tasks of pooling, and "generate"."""
        own: list[str] = ["generate"] if self.generates else []
        return own if self.pooling is None else own + sorted(self.pooling.tasks)

    def models_for(self, *tasks: str) -> list[str]:
        """Return the names of the models at this gateway that have one of these tasks."""
        return [name for name, own in self._shared.abilities.items() if not set(tasks).isdisjoint(own)]

    @property
    def is_encoder(self) -> bool:
        """Whether the model cannot generate, so that it has pool workers."""
        return self.pooling is not None and self.pooling.is_encoder

    def cached_blocks(self) -> dict[str, list[tuple[bytes, int]]]:
        """Return the name and the length in tokens of each host's cached blocks, as far as known, by host id."""
        hosts = {host_id: self._prefixes.host(host_id) for host_id in self._prefixes.hosts()}
        return {host_id: list(own.blocks()) for host_id, own in hosts.items() if own is not None}

    async def plan(
        self, request: Request, make: Callable[[ServedModel], Plan], kind: Kind = common_pb2.WORK_KIND_GENERATE
    ) -> Plan:
        """Wait until a worker is ready, then return a request's plan. Its constraints are not compiled yet.

        Args:
            request: the request to be planned. The wait ends if its client disconnects.
            make: function that makes the plan. It runs on a thread, because tokenizing a long prompt takes long.
            kind: the kind of work, on which depends whether the context of decode or prefill workers is the limit.

        Raises the errors of `make` and `served_model`.
        """
        return await aside(request, make, await self.served_model(request, kind))

    async def constrained(self, plan: Plan, owner: str) -> Plan:
        """Return a plan with its constraints, after they have been compiled once to find errors.

        Args:
            owner: digest of the key of the request's sender.

        Raises the errors of `ConstraintCompiler.make`.
        """
        prompts = []
        for prompt in plan.prompts:
            if prompt.wanted is not None:
                constraint = await self._shared.constraints.make(self._index, prompt.wanted, owner)
                prompt = replace(prompt, sampling=replace(prompt.sampling, constraint=constraint))
            prompts.append(prompt)
        return replace(plan, prompts=prompts)

    async def served_model(self, request: Request, kind: Kind = common_pb2.WORK_KIND_GENERATE) -> ServedModel:
        """Wait until a worker is ready, then return the model's properties that plans need, such as its context length.

        Args:
            request: the request to be planned. The wait ends if its client disconnects.
            kind: the kind of work, on which depends whether the context of decode or prefill workers is the limit.

        Raises:
            ApiError: a header of the request is not valid, or the model does not do such work.
            RefusedError, UnavailableError: no worker was ready in time.
            ClientLeftError: the client disconnected before a worker was ready.
        """
        if kind != common_pb2.WORK_KIND_POOL and not self.generates:
            raise self._no_text()
        decodes = KINDS[kind].decodes
        if not self.fleet.has_worker(decodes):
            scope = scope_of(request)
            seconds = life_seconds(self.config.request_seconds, timeout_of(request), scope.is_background)
            wait = self.runner.worker_wait.until_ready(
                scope.arrived + seconds, decodes=decodes, request_class=scope.request_class, waited=scope.waited
            )
            with self.runner.traffic.unplanned():
                scope.waited = await until_disconnect(request.receive, wait)
        longest = self.fleet.max_model_len(decodes)
        rules = self._logprob_rules
        return ServedModel(self.tokenizer, longest, self.forms, rules, shared_prompts=self._shared_prompts)

    def _no_text(self) -> ApiError:
        """Return the error for a request for text to a model that makes none."""
        assert self.pooling is not None
        routes = {"embed": "/v1/embeddings", "score": "/v1/rerank", "classify": "/classify"}
        route = next((routes[task] for task in routes if task in self.pooling.tasks), "/pooling")
        others = self.models_for("generate")
        advice = f"; for text, name {' or '.join(map(repr, others))}" if others else "; no other model is served here"
        does = ", ".join(self.abilities)
        message = f"the model {self.name!r} makes no text ({does}): send its inputs to {route}{advice}"
        return ApiError(400, message, param="model", code="unsupported_task")

    def waiting_requests(self) -> int:
        """Return the number of sequences that wait for a worker to have room, at all gateways of the model's cluster.

        The numbers of other gateways are up to a second old.
        """
        others = (each for each in self.fleet.gateways if each.worker_id != self._shared.gateway_id)
        return len(self.runner.queue) + sum(other.load.waiting for other in others)

    async def pin(self, numbers: Mapping[Role, int], release: Sequence[Role]) -> None:
        """Tell the planner to keep fixed numbers of workers of some roles, and to scale other roles again.

        Args:
            numbers: number of workers to keep, by role.
            release: roles that the planner scales again.

        Raises UnavailableError if Redis does not answer.
        """
        redis, cluster = self._shared.redis, self.config.cluster
        try:
            await write_pins(redis, cluster, self._seal, {**numbers, **dict.fromkeys(release)})
        except (RedisError, OSError) as error:
            raise UnavailableError(f"the planner cannot be told, because Redis does not answer ({error})") from error

    def _describe(self) -> Member:
        return Member(
            worker_id=self._shared.gateway_id,
            role="gateway",
            epoch=self._shared.epoch,
            address=self._shared.address,
            host_id="",
            state="draining" if self._draining else "ready",
            model=self.fleet.model,
            load=LoadReport(running=self.runner.running, waiting=len(self.runner.queue)),
            keys=self._shared.key_uses(),
            traffic=self.runner.traffic.report(),
            adapters=self.adapters.changes,
            sleep=self.sleep.book.wish,
        )


def _recorder(config: GatewayConfig, secret: Secret, prefixes: PrefixIndex) -> TraceRecorder | None:
    if not config.record_trace:
        return None
    path, size = Path(config.record_trace).expanduser(), parse_bytes(config.record_trace_size)
    return TraceRecorder(path, size, secret, prefixes.layouts)

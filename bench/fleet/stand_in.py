"""Stand-in workers: they speak the real protocol and compute nothing. Their steps take as long as a profile says.

A prefill worker computes one prompt after the other, in chunks. A decode worker gives each of its requests one token in
each step. A worker registers, drains, and changes its role as a real one does.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from bench.fleet.stand_in_host import FINGERPRINT, StandInHost
from paceline.core.errors import BusyError, UnavailableError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.metrics import Sample
from paceline.core.step_loads import StepLoads
from paceline.core.step_times import StepTimes
from paceline.core.types import Token
from paceline.proto import common_pb2, worker_pb2, worker_pb2_grpc
from paceline.proto.fleet_pb2 import LoadReport, WorkReport
from paceline.services.common.credentials import Credentials
from paceline.services.common.member_signatures import UNSIGNED
from paceline.services.common.registry import Member, Registrar, Role, State, metrics_to_pb
from paceline.services.common.rpc import RpcServer
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.tasks import InUse
from paceline.services.common.wire import load_to_pb
from paceline.services.decode.outbox import Outbox, Outboxes

CHUNK = 512
"""Tokens of a prompt that one step computes."""
KV_TOKENS = 200_000
DRAIN_SECONDS = 10.0
"""Longest time that the requests of a draining worker may take to move."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(eq=False)
class _Prompt:
    """A prompt that is being computed."""

    tokens: int
    left: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Answer:
    """A request that gets tokens."""

    number: int
    outbox: Outbox
    context: int
    left: int
    next_id: int
    done: asyncio.Event = field(default_factory=asyncio.Event)


class StandIn(worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer):
    """A stand-in for one worker.

    Args:
        model: digest of the gateway's model.
        first_id: the answer to every request is the ids from this one on.
        host: the host whose cache it uses; by default it caches nothing.
        samples: its metrics.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        times: StepTimes,
        model: str,
        max_seqs: int = 64,
        first_id: int = 1000,
        host: StandInHost | None = None,
        samples: Sequence[Sample] = (),
    ) -> None:
        self.name = name
        self.role: Role = role
        self.wanted_role: Role = role
        """The role that the worker has, or is about to get."""
        self.state: State = "starting"
        self.outboxes = Outboxes()
        self._times = times
        self._model = model
        self._max_seqs = max_seqs
        self._first_id = first_id
        self._host = host
        self._metrics = metrics_to_pb(samples)
        self._epoch = time.time_ns()
        self._rpc = RpcServer("127.0.0.1", 0, Credentials(), name)
        self._registrar: Registrar | None = None
        self._port = 0
        self._prompts: deque[_Prompt] = deque()
        self._answers: set[_Answer] = set()
        self._calls = InUse()
        self._has_work = asyncio.Event()
        self._computing: asyncio.Task[None] | None = None
        self._loads = StepLoads()
        self._startup_seconds = 0.0
        self._since = time.monotonic()

    async def start(self, redis: str, cluster: str, seconds: float) -> None:
        """Register at once, and serve after `seconds`, as a worker that reads its weights."""
        began = time.monotonic()
        worker_pb2_grpc.add_PrefillServicer_to_server(self, self._rpc.server)
        worker_pb2_grpc.add_DecodeServicer_to_server(self, self._rpc.server)
        self._port = await self._rpc.start()
        self._registrar = Registrar(redis, cluster, self._describe, UNSIGNED)
        await self._registrar.start()
        await asyncio.sleep(seconds)
        await self._rpc.set_ready(True)
        self._computing = asyncio.create_task(self._compute())
        self._startup_seconds = time.monotonic() - began
        self._set_state("ready")

    async def flip(self, role: Role, times: StepTimes) -> None:
        """Drain, and continue in another role under a new epoch, with the step times of that role."""
        self.wanted_role = role
        await self._drain()
        self.role, self._epoch, self._times = role, time.time_ns(), times
        self._loads = StepLoads()
        self._set_state("ready")

    async def stop(self) -> None:
        """Drain and end."""
        await self._drain()
        if self._registrar is not None:
            await self._registrar.stop()
        await self._rpc.close(0)
        if self._computing is not None:
            self._computing.cancel()

    async def _drain(self) -> None:
        self._set_state("draining")
        self.outboxes.tell_draining()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await self._calls.wait_until_idle()

    def _set_state(self, state: State) -> None:
        self.state, self._since = state, time.monotonic()
        if self._registrar is not None:
            self._registrar.announce()

    def _describe(self) -> Member:
        used = sum(answer.context for answer in self._answers)
        queued = sum(prompt.left for prompt in self._prompts)
        work = WorkReport(
            startup_seconds=self._startup_seconds,
            kv_pressure=min(1.0, used / KV_TOKENS),
            kv_tokens=KV_TOKENS,
            computed_tokens=used,
            steps=[load_to_pb(load) for load in self._loads.all()],
        )
        per_token = self._times.prefill_seconds(CHUNK, CHUNK * CHUNK / 2) / CHUNK
        return Member(
            worker_id=self.name,
            role=self.role,
            epoch=self._epoch,
            address=f"127.0.0.1:{self._port}",
            host_id="host" if self._host is None else self._host.name,
            state=self.state,
            model=self._model,
            layout=FINGERPRINT,
            max_model_len=16384,
            max_seqs=self._max_seqs,
            load=LoadReport(running=self._calls.count, queued_tokens=queued, prefill_tokens_per_second=1 / per_token),
            work=work,
            metrics=self._metrics,
        )

    # ---- the protocol

    async def Run(self, request: worker_pb2.PrefillRequest, context: Context) -> None:  # type: ignore[override]
        work = request.work
        async with mapped_errors(context), self._called():
            cached = self._cached_tokens(work)
            await context.write(worker_pb2.PrefillEvent(opened=worker_pb2.Opened(key=work.key, cached_tokens=cached)))
            await self._compute_prompt(work, cached)
            position = len(work.token_ids) - work.prompt_tokens
            is_last = position + 1 >= work.sampling.max_tokens
            reason = common_pb2.FINISH_REASON_LENGTH if is_last else common_pb2.FINISH_REASON_NONE
            token = common_pb2.Token(id=self._first_id + position)
            first = worker_pb2.FirstToken(token=token, finish_reason=reason)
            await context.write(worker_pb2.PrefillEvent(first_token=first))
            if not is_last:
                key = common_pb2.Key(
                    request_id=work.key.request_id, attempt=work.key.attempt, generation=work.key.generation + 1
                )
                await context.write(worker_pb2.PrefillEvent(filled=worker_pb2.Filled(key=key)))

    async def Events(self, request: worker_pb2.EventsRequest, context: Context) -> None:  # type: ignore[override]
        await self.outboxes.serve(request.stream, context.write)

    async def Generate(  # type: ignore[override]
        self, commands: AsyncIterator[worker_pb2.DecodeCommand], context: Context
    ) -> None:
        command = await anext(commands)
        work, number = command.admit, command.recipient.attempt
        outbox = self.outboxes.of(command.recipient)
        async with mapped_errors(context), self._called():
            cached = self._cached_tokens(work)
            admitted = worker_pb2.Admitted(key=work.key, cached_tokens=cached)
            await context.write(worker_pb2.DecodeEvent(admitted=admitted))
            if (then := await anext(commands, None)) is None:
                raise asyncio.CancelledError  # the gateway has cancelled the call
            position = len(work.token_ids) - work.prompt_tokens
            if then.HasField("handoff"):
                position += 1
            else:
                await self._compute_prompt(work, cached)
            answer = _Answer(
                number,
                outbox,
                len(work.token_ids),
                work.sampling.max_tokens - position,
                self._first_id + position,
            )
            self._answers.add(answer)
            self._has_work.set()
            try:
                await answer.done.wait()
            finally:
                self._answers.discard(answer)
            outbox.event(number).finished.reason = common_pb2.FINISH_REASON_LENGTH
            await outbox.flush()

    @contextlib.asynccontextmanager
    async def _called(self) -> AsyncIterator[None]:
        """Count a call of a gateway. Raises an error if the worker takes no more."""
        if self.state == "draining":
            raise UnavailableError("this worker is draining")
        if self._calls.count >= self._max_seqs:
            raise BusyError("this worker is full")
        with self._calls.running():
            yield

    def _cached_tokens(self, work: common_pb2.Work) -> int:
        """Return the tokens of a context that need not be computed: those of an earlier attempt, and those that the
        host has cached."""
        tokens = len(work.token_ids)
        earlier = (tokens - 1) // BASE_TOKENS * BASE_TOKENS if tokens > work.prompt_tokens else 0
        return max(earlier, 0 if self._host is None else self._host.cached_tokens(work))

    async def _compute_prompt(self, work: common_pb2.Work, cached: int) -> None:
        tokens = len(work.token_ids)
        prompt = _Prompt(tokens, tokens - cached)
        self._prompts.append(prompt)
        self._has_work.set()
        try:
            await prompt.done.wait()
        finally:
            if prompt in self._prompts:
                self._prompts.remove(prompt)
        if self._host is not None:
            self._host.store(work)

    # ---- steps

    async def _compute(self) -> None:
        """Compute one step after the other while there is work."""
        ends = time.perf_counter()
        while True:
            if not (self._prompts or self._answers):
                self._has_work.clear()
                await self._has_work.wait()
                ends = time.perf_counter()
            prompt = self._prompts[0] if self._prompts else None
            answers = list(self._answers)
            chunk = 0 if prompt is None else min(prompt.left, CHUNK)
            before = 0 if prompt is None else prompt.tokens - prompt.left
            context = sum(answer.context for answer in answers)
            seconds = self._times.mixed_seconds(chunk, chunk * (before + chunk / 2), len(answers), context)
            ends += seconds
            await asyncio.sleep(max(0.0, ends - time.perf_counter()))
            self._loads.count(chunk + len(answers), context + before + chunk, seconds)
            if prompt is not None:
                prompt.left -= chunk
                if not prompt.left and prompt in self._prompts:
                    self._prompts.remove(prompt)
                    prompt.done.set()
            for answer in answers:
                answer.outbox.token(answer.number, Token(answer.next_id))
                answer.context += 1
                answer.next_id += 1
                answer.left -= 1
                if not answer.left:
                    self._answers.discard(answer)
                    answer.done.set()

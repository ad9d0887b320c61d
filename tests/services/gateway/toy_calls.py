"""How a toy worker answers calls: it recites a text, and a test sets attributes to make it silent, failing or full.

As with real workers, a token depends only on seed and position: it is byte (seed + position) of the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from paceline.core.errors import BusyError, PacelineError
from paceline.core.telemetry import carrier_of
from paceline.proto import common_pb2, worker_pb2
from paceline.services.common.rpc_errors import mapped_errors
from paceline.services.common.wire import token_from_pb
from paceline.services.decode.outbox import Outbox, Outboxes
from tests.services.gateway.toy_model import END, text_of

ADMISSION = -1
"""Used instead of a number of tokens: the moment before a call is admitted."""


@dataclass
class Call:
    """A worker's record of one call."""

    work: common_pb2.Work
    metadata: dict[str, str]
    commands: list[str] = field(default_factory=list)
    source: str = ""
    """The source named in the last `fetch` command to a decode worker."""
    number: int = 0
    """Number of the attempt on the gateway's stream of events, for decode calls."""
    outbox: Outbox = field(default_factory=Outbox)
    outcome: str = "running"
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def tell(self, **event: Any) -> None:
        self.outbox.event(self.number).MergeFrom(worker_pb2.DecodeEvent(**event))


class ToyCalls:
    """The calls that a toy worker has received, and how it answers them."""

    def __init__(self, host_id: str, text: str, max_seqs: int) -> None:
        self.host_id = host_id
        self.calls: list[Call] = []
        self.active = 0
        """Calls that run now."""
        self.outboxes = Outboxes()
        self.streams: list[asyncio.Task[None]] = []
        """Tasks that serve the streams of events. To cancel one breaks its stream."""
        self.script = text.encode()
        self.max_seqs = max_seqs
        self.token_delay = 0.0
        """Seconds before each token."""
        self.pause_after: int | None = None
        """Number of tokens of a call after which the worker is silent until `resume` is set, or ADMISSION."""
        self.resume = asyncio.Event()
        self.alive_seconds: float | None = None
        """Seconds between the `alive` messages of a paused decode worker; None sends none."""
        self.fail_after: int | None = None
        """Number of tokens after which every call fails with `fail_code`, or ADMISSION."""
        self.fail_code = grpc.StatusCode.UNAVAILABLE
        self.loses_transfers = False
        """Whether all fetches of blocks fail."""
        self.refusal: PacelineError | None = None
        """Error that the worker raises instead of admitting a call."""
        self.stop_at: int | None = None
        """Output position at which the end token comes."""
        self.answer: Callable[[str], str] | None = None
        """Returns the whole answer to a prompt, which is recited instead of the text, whatever the seed is."""
        self.encodings: set[bytes] = set()
        """Digests of the encodings that its host has."""
        self.fails_to_encode = False
        self.hangs_at = ""
        """The calls for encodings that get no answer: "encode" or "ready"; "" are none."""
        self.told: dict[bytes, str] = {}
        """For each digest that `Media.Ready` named, the address of the host with the encoding."""
        self.was_told = asyncio.Event()

    @contextlib.asynccontextmanager
    async def admit(self, work: common_pb2.Work, context: grpc.aio.ServicerContext) -> AsyncIterator[Call]:
        """Admit a call, and record its outcome. Errors are sent as a real worker sends them."""
        call = Call(work, carrier_of(context.invocation_metadata()))
        self.calls.append(call)
        full = BusyError("this toy is full") if self.active >= self.max_seqs else None
        async with mapped_errors(context):
            if (refusal := self.refusal or full) is not None:
                call.outcome = "refused"
                call.ended.set()
                raise refusal
            self.active += 1
            try:
                yield call
                call.outcome = "finished"
            except BaseException as error:
                call.outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
                call.tell()
                raise
            finally:
                self.active -= 1
                call.ended.set()

    def outcomes(self) -> list[str]:
        return [call.outcome for call in self.calls]

    async def progress(self, call: Call, count: int, context: grpc.aio.ServicerContext) -> None:
        """Fail or pause, if the worker is to do so after `count` tokens of a call."""
        if self.fail_after == count:
            await context.abort(self.fail_code, "the toy was told to fail")
        if self.pause_after == count:
            while not self.resume.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.alive_seconds):
                        await self.resume.wait()
                if self.alive_seconds is not None:
                    call.tell(alive=common_pb2.Alive())
        await asyncio.sleep(self.token_delay)

    async def recite(self, call: Call, work: common_pb2.Work, position: int, context: grpc.aio.ServicerContext) -> None:
        """Send the tokens of a decode call from a position on, and its end."""
        for count in itertools.count():
            await self.progress(call, count, context)
            token, reason = self.token(work, position + count)
            call.outbox.token(call.number, token_from_pb(token))
            await call.outbox.flush()
            if reason != common_pb2.FINISH_REASON_NONE:
                effort = worker_pb2.Effort(steps=count + 1, drafts=4, draft_tokens=9, accepted_tokens=5, preemptions=2)
                call.tell(finished=worker_pb2.Finished(reason=reason), report=worker_pb2.Report(effort=effort))
                await call.outbox.flush()
                return

    async def read_encodings(self, work: common_pb2.Work) -> None:
        """Wait until all encodings have been named that the context needs."""
        needed = {span.digest for span in work.media if span.start + span.length > cached_tokens(work)}
        while not needed <= self.told.keys():
            self.was_told.clear()
            await self.was_told.wait()

    def token(self, work: common_pb2.Work, position: int) -> tuple[common_pb2.Token, int]:
        """Return the token at a position of the answer, and the finish reason."""
        sampling = work.sampling
        if self.answer is not None:
            text = self.answer(text_of(work.token_ids[: work.prompt_tokens])).encode()
            token_id = text[position] if position < len(text) else END
        else:
            token_id = END if self.stop_at == position else self.script[(sampling.seed + position) % len(self.script)]
        reason = common_pb2.FINISH_REASON_NONE
        if token_id in sampling.stop_token_ids or token_id in sampling.constraint.end_token_ids:
            reason = common_pb2.FINISH_REASON_STOP
        elif position + 1 >= sampling.max_tokens:
            reason = common_pb2.FINISH_REASON_LENGTH
        report = _report(token_id, sampling.logprobs) if sampling.HasField("logprobs") else []
        named = sampling.logprob_token_ids
        scores = {each: -each * work.prompt_tokens / 10_000 for each in named}
        report += [common_pb2.Logprob(token_id=each, logprob=score, rank=each + 1) for each, score in scores.items()]
        return common_pb2.Token(id=token_id, logprobs=report), reason

    def scores(self, work: common_pb2.Work) -> list[common_pb2.PromptLogprobs]:
        """Return the logprobs of the prompt in messages of four tokens; [] if they are not wanted."""
        if not work.sampling.HasField("prompt_logprobs"):
            return []
        count = work.sampling.prompt_logprobs
        tokens = [common_pb2.Token(id=id, logprobs=_report(id, count)) for id in work.token_ids[1 : work.prompt_tokens]]
        return [
            common_pb2.PromptLogprobs(first=1 + start, tokens=tokens[start : start + 4])
            for start in range(0, len(tokens), 4)
        ]


def cached_tokens(work: common_pb2.Work) -> int:
    """Return how many tokens of a prompt the worker says to have found in its cache."""
    return min(16, work.prompt_tokens - 1)


def _report(token_id: int, count: int) -> list[common_pb2.Logprob]:
    """Return `count` + 1 logprobs: the token itself at rank 2, then the most likely tokens "A", the token, "B", …"""
    chosen = common_pb2.Logprob(token_id=token_id, logprob=-1.0, rank=2)
    others = [common_pb2.Logprob(token_id=65 + rank, logprob=-0.5 * (rank + 1), rank=rank + 1) for rank in range(count)]
    if count > 1:
        others[1] = chosen
    return [chosen, *others]

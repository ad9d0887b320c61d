"""The stream of events that every open console reads.

An event is encoded once for all viewers. While no console is open, only one sample of the fleet is taken for each bin
of the history; no other data is read or encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import grpc.aio

import paceline
from paceline.core.errors import UnavailableError
from paceline.proto.kvtransfer_pb2 import LedgerReply, LedgerRequest
from paceline.proto.kvtransfer_pb2_grpc import KVTransferStub
from paceline.services.common.tasks import end_tasks, is_cancelled
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.http.event_streams import event
from paceline.services.gateway.sequences.runner import SequenceRunner
from paceline.services.gateway.telemetry.adapter_use import AdapterUse
from paceline.services.gateway.telemetry.history import (
    BIN_SECONDS,
    BINS,
    COLUMNS,
    Cell,
    ConsoleHistory,
    Counters,
    Levels,
    Service,
)
from paceline.services.gateway.telemetry.metrics import figures

LEDGER_SECONDS = 1.0
"""Deadline of one host's answer, in seconds."""


_SHOWN_FIGURES = (
    "sampled_tokens",
    "busy_seconds",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "queued_tokens",
    "pooled_tokens",
    "pool_waiting_tokens",
    "encodings_computed",
    "encodings_waiting",
)
"""Figures of workers that the console shows, if the worker reports them."""


async def read_ledger(host: RemoteWorker, request: LedgerRequest) -> LedgerReply:
    """Ask a host for its ledger, the owners of its KV blocks. Raises UnavailableError if the host does not answer."""
    try:
        reply: LedgerReply = await KVTransferStub(host.channel).Ledger(request, timeout=LEDGER_SECONDS)
    except grpc.aio.AioRpcError as error:
        raise UnavailableError(error.details() or error.code().name) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        # The gateway closes the channel of a member that leaves, which cancels its calls.
        raise UnavailableError("it has left") from None
    return reply


def rate(hits: int, queries: int) -> float | None:
    """Return the share of hits; None if there were no queries."""
    return hits / queries if queries else None


def levels_of(members: Sequence[RemoteWorker], running: int, waiting: int) -> Levels:
    """Return the present state of the fleet.

    Args:
        running: number of sequences of this gateway that run.
        waiting: number of sequences of this gateway that wait.
    """
    hosts = [figures(each.member.metrics) for each in members if each.member.role == "kvtransfer"]

    def blocks(*states: str) -> int:
        return int(sum(host.get(f"blocks_{state}", 0) for host in hosts for state in states))

    return Levels(running, waiting, blocks("total"), blocks("held", "in_flight"), blocks("cached"))


def counters_of(members: Sequence[RemoteWorker]) -> dict[Service, Counters]:
    """Return the counters in each member's last heartbeat."""
    counters = {}
    for each in members:
        stats = figures(each.member.metrics)
        counters[each.member.worker_id, each.member.epoch] = Counters(
            generated_tokens=stats.get("sampled_tokens", 0),
            prompt_tokens=stats.get("prefix_queries_tokens", 0),
            found_tokens=stats.get("prefix_hits_tokens", 0),
            draft_tokens=stats.get("draft_tokens", 0),
            accepted_tokens=stats.get("accepted_tokens", 0),
        )
    return counters


async def describe_fleet(members: Sequence[RemoteWorker]) -> Json:
    """Return the JSON of all workers, and of all hosts with the owners of their KV blocks. Asks each host for them."""
    hosts = [each for each in members if each.member.role == "kvtransfer"]
    return {
        "workers": [_worker(each) for each in members if each.member.role != "kvtransfer"],
        "hosts": await asyncio.gather(*(_host(host) for host in hosts)),
    }


def _worker(worker: RemoteWorker) -> Json:
    member = worker.member
    stats = figures(member.metrics)
    return {
        "id": member.worker_id,
        "role": member.role,
        "epoch": member.epoch,
        "host": member.host_id,
        "state": worker.state,
        "max_seqs": member.max_seqs,
        "running": member.load.running,
        "waiting": member.load.waiting,
        "numerics": member.numerics and str(member.numerics),
        "stats": {name: round(stats[name], 3) for name in _SHOWN_FIGURES if name in stats},
    }


async def _host(host: RemoteWorker) -> Json:
    try:
        ledger = await read_ledger(host, LedgerRequest(brief=True))
    except UnavailableError as error:
        return {"id": host.member.host_id, "error": str(error)}
    return _ledger(ledger)


def _ledger(ledger: LedgerReply) -> Json:
    return {
        "id": ledger.host_id,
        "balanced": ledger.balanced,
        "block_bytes": ledger.slot_bytes,
        "blocks": {
            "held": ledger.held,
            "in_flight": ledger.in_flight,
            "cached": ledger.cached,
            "free": ledger.free,
        },
        "owners": [{"owner": each.owner, "state": each.state, "blocks": each.blocks} for each in ledger.owners],
        "found_tokens": ledger.prefix_hits_tokens,
        "prompt_tokens": ledger.prefix_queries_tokens,
    }


LIVE_SECONDS = 2.0
"""Interval between two snapshots of the fleet while a console is open, in seconds."""
RECENT_SECONDS = 300
"""Length of the latest part of the history, in seconds. The console shows its percentiles beside those of the hour."""
_BEHIND = 16
"""Largest number of unsent events of a slow viewer. Beyond it the stream ends, and the browser opens a new stream."""

_PART = 100
"""Number of members whose figures are read at a time, so that reading a large fleet does not delay streams."""

Json = dict[str, Any]

log = logging.getLogger(__name__)


class Feed:
    """Sends the console's events, from `start` to `close`.

    Args:
        about: facts about the model that do not change. They are sent in the first event.
    """

    def __init__(
        self, history: ConsoleHistory, fleet: Fleet, runner: SequenceRunner, adapters: AdapterUse, about: Json
    ) -> None:
        self._history = history
        self._fleet = fleet
        self._runner = runner
        self._adapters = adapters
        self._about = about | {"version": paceline.__version__, "columns": ["at", *COLUMNS]}
        self._epoch = time.time() - time.monotonic()
        self._viewers: set[asyncio.Queue[bytes]] = set()
        self._watched = asyncio.Event()
        self._is_open = False
        self._tasks: list[asyncio.Task[None]] = []
        self._live = b""
        """The newest event about the fleet; empty while no console is open."""

    def start(self) -> None:
        self._is_open = True
        self._tasks = [asyncio.create_task(self._sample()), asyncio.create_task(self._show())]

    def end_streams(self) -> None:
        """End the streams of all present and later viewers, so that they do not delay the end of the server."""
        self._is_open = False
        self._publish(b"")
        self._viewers.clear()

    async def close(self) -> None:
        self.end_streams()
        await end_tasks(*self._tasks)

    async def watch(self, about: Json | None = None) -> AsyncGenerator[bytes]:
        """Yield server-sent events: `history` once, then `live` every LIVE_SECONDS and `rows` after each bin.

        Args:
            about: further facts to send in the first event.

        The stream ends if the viewer is too slow, or when the gateway ends. If this feed has not been started, the
        stream ends after `history`.
        """
        viewer: asyncio.Queue[bytes] = asyncio.Queue(_BEHIND)
        if self._is_open:
            self._viewers.add(viewer)
            self._watched.set()
        try:
            yield event(self._about | (about or {}) | self._history_part(self._history.rows()), "history") + self._live
            while viewer in self._viewers and (events := await viewer.get()):
                yield events
        finally:
            self._viewers.discard(viewer)

    def _publish(self, events: bytes) -> None:
        for viewer in list(self._viewers):
            try:
                viewer.put_nowait(events)
            except asyncio.QueueFull:
                self._viewers.discard(viewer)

    async def _sample(self) -> None:
        """Add a sample of the fleet to the history once for each bin, until cancelled."""
        while True:
            with _logged_errors():
                members = self._fleet.workers()
                levels = levels_of(members, self._runner.running, self._runner.waiting)
                counters: dict[Service, Counters] = {}
                for start in range(0, len(members), _PART):
                    counters |= counters_of(members[start : start + _PART])
                    await asyncio.sleep(0)
                self._history.sample(time.monotonic(), levels, counters)
                changed = self._history.take_changed()
                if self._viewers:
                    self._publish(event(self._history_part(changed), "rows"))
            await asyncio.sleep(BIN_SECONDS - time.monotonic() % BIN_SECONDS)

    async def _show(self) -> None:
        """Send snapshots of the fleet every LIVE_SECONDS while a console is open, until cancelled."""
        while True:
            await self._watched.wait()
            with _logged_errors():
                self._live = event(await self._snapshot(), "live")
                self._publish(self._live)
            await asyncio.sleep(LIVE_SECONDS)
            if not self._viewers:
                self._live = b""
                self._watched.clear()

    async def _snapshot(self) -> Json:
        return {
            "at": round(self._epoch + time.monotonic(), 1),
            "running": self._runner.running,
            "waiting": self._runner.waiting,
            "adapters": self._adapters.describe(),
            **await describe_fleet(self._fleet.workers()),
        }

    def _history_part(self, rows: list[list[Cell]]) -> Json:
        """Return the JSON of rows, with the times of their bins in seconds since 1970, and the present latencies'
        percentiles."""
        now = time.monotonic()
        return {
            "rows": [[round(self._epoch + (row[0] or 0) * BIN_SECONDS), *row[1:]] for row in rows],
            "recent": self._history.latencies(now, RECENT_SECONDS),
            "hour": self._history.latencies(now, BINS * BIN_SECONDS),
        }


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    try:
        yield
    except Exception:
        log.exception("unexpected error in the console's feed")

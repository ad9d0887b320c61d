"""Sends hints about contexts to the hosts that cache them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import grpc.aio

from paceline.core.cache_policy.hints import Hint
from paceline.core.context import Context
from paceline.core.kv_layout import BASE_TOKENS
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common.tasks import end_tasks, is_cancelled
from paceline.services.gateway.fleet.remote_worker import RemoteWorker

ANSWER_SECONDS = 2.0
"""Deadline of a message with hints, in seconds. Later hints for the same host wait for its end and are sent in the next
message."""
MOST_WAITING = 4096
"""Largest number of contexts whose hints wait to be sent to a host. Beyond it, the oldest hints are dropped: losing a
hint does no harm but a cache miss."""
MOST_WAITING_BYTES = 16 << 20
"""Largest total size of the hashes of contexts that wait for one host, in bytes. There is a hash for each token. Hosts
accept a message of this size."""

log = logging.getLogger(__name__)


class WaitingHints:
    """Hints that wait to be sent to one host."""

    def __init__(self) -> None:
        self.expectations: deque[pb.Expectation] = deque()
        self._bytes = 0

    def add(self, expectation: pb.Expectation) -> None:
        self.expectations.append(expectation)
        self._bytes += len(expectation.hashes)
        while len(self.expectations) > MOST_WAITING or self._bytes > MOST_WAITING_BYTES:
            self._bytes -= len(self.expectations.popleft().hashes)


class HintSender:
    """Sends hints in batches, until `close`. A host that does not answer does not delay hints for other hosts.

    Args:
        host: a function that returns the kvtransfer service of a host by its id; None if the host is not known.
    """

    def __init__(self, host: Callable[[str], RemoteWorker | None]) -> None:
        self._host = host
        self._waiting: defaultdict[str, WaitingHints] = defaultdict(WaitingHints)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The task that sends hints to a host, by host id, while there are hints for the host."""
        self._is_closed = False

    async def close(self) -> None:
        """Drop all hints that were not sent. Hints that are queued after this are dropped, too."""
        self._is_closed = True
        await end_tasks(*self._tasks.values())

    def put(self, layouts: Mapping[str, str], context: Context, hints: Sequence[Hint]) -> None:
        """Queue hints about a context.

        Args:
            layouts: the hosts that get the hints, by their ids, with the fingerprint of each host's KV layout.
        """
        most = max((hint.tokens for hint in hints), default=0) // BASE_TOKENS
        for host_id, layout in layouts.items() if most and not self._is_closed else ():
            hashes = b"".join(context.links(layout)[:most])
            self._waiting[host_id].add(pb.Expectation(hashes=hashes, hints=map(_hint_to_pb, hints)))
            if host_id not in self._tasks:
                # At once: if the next request is faster than the hints, it may evict their blocks.
                self._tasks[host_id] = asyncio.create_task(self._send_all(host_id), name="hint sender")

    async def _send_all(self, host_id: str) -> None:
        """Send the hints for a host until none wait."""
        try:
            while (waiting := self._waiting.pop(host_id, None)) is not None:
                await self._send(host_id, waiting.expectations)
        finally:
            del self._tasks[host_id]

    async def _send(self, host_id: str, expected: Iterable[pb.Expectation]) -> None:
        if (host := self._host(host_id)) is None:
            return
        try:
            stub = pb_grpc.KVTransferStub(host.channel)
            await stub.Expect(pb.ExpectRequest(expectations=expected), timeout=ANSWER_SECONDS)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:  # the latter if the channel is closed
            log.debug("hints were not sent to %s: %s", host, error)
        except asyncio.CancelledError:
            if is_cancelled():
                raise  # otherwise the gateway has closed the channel of a host that leaves


def _hint_to_pb(hint: Hint) -> pb.Hint:
    return pb.Hint(tokens=hint.tokens, within_ms=round(hint.seconds * 1000), source=hint.source)

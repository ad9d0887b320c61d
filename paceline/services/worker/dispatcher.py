"""The dispatcher of the engine's events: it turns them into operations on blocks, and passes them to the handlers of
requests.
"""

from __future__ import annotations

import asyncio
import time

from paceline.core.errors import BusyError, PacelineError, StaleError
from paceline.core.types import Key
from paceline.engine.engine import Engine
from paceline.engine.step import (
    Event,
    Failed,
    Filled,
    Kept,
    NeedsBlocks,
    Preempted,
    Removed,
    Sampled,
    Sealed,
    SpareUnused,
    Trimmed,
)
from paceline.services.worker.event_stream import EventStreams, RequestEvent
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.leases import Reservation
from paceline.services.worker.request_media import RequestMediaTable


class Dispatcher:
    """Takes the engine's events on the event loop.

    Args:
        engine: the engine that sends the events.
        streams: the event streams of requests in the engine.
        media: the encodings that requests read.
    """

    def __init__(self, engine: Engine, kv: KVClient, streams: EventStreams, media: RequestMediaTable) -> None:
        kv.listen(self._on_lease_lost)
        self._engine = engine
        self._kv = kv
        self._streams = streams
        self._media = media

    def take(self, events: list[Event]) -> None:
        """Carry out operations on blocks in the engine's order, then give the other events to the requests' handlers.

        Handlers come last, because they write to gRPC, which takes longer than a handoff.
        """
        came = time.time()
        for event in events:
            match event:
                case Sealed(key, group, first_block, hashes):
                    self._kv.seal(key, group, first_block, hashes)
                case Trimmed(key, group, first_kept_block):
                    self._kv.trim(key, group, first_kept_block)
                case Kept(key, tail, copied):
                    self._kv.keep(key, tail, copied)
                case SpareUnused(key):
                    self._kv.release_spare(key)
                case NeedsBlocks(key, token_count):
                    self._extend(key, token_count)
                case Removed(key):
                    self._kv.release(key)
                    self._media.close(key)
                case Filled():
                    self._fill(event, came)
                    self._media.close(event.key)
                case Preempted(key):
                    # The blocks are released at once, so that the request that lacked blocks gets them when it asks
                    # again.
                    self._kv.release(key)
                    self._media.pause(key)
                case Sampled(key):
                    self._media.finish(key)
        for event in events:
            if isinstance(event, Failed):
                self._streams.put(event.key, event.error)
            elif isinstance(event, RequestEvent) and not isinstance(event, Filled):
                self._streams.put(event.key, event)
                if isinstance(event, Preempted):
                    self._streams.remove(event.key)

    def _fill(self, filled: Filled, came: float) -> None:
        """Give the blocks to the decode worker at once. The request's handler gets the event when they are filled."""
        if (stream := self._streams.get(filled.key)) is None:
            return  # the request is leaving the engine, and its blocks will be released
        stream.sealed_at = came

        def tell(done: asyncio.Future[None]) -> None:
            error = done.exception()
            stream.put(error if isinstance(error, PacelineError) else filled)

        self._kv.fill(filled.key, filled.length, filled.context_hash, stream.traceparent).add_done_callback(tell)

    def _on_lease_lost(self, key: Key) -> None:
        if key not in self._streams:
            return  # the lease is of an encoding, or of a request that is not in the engine; it is released later
        self._engine.remove(key)
        self._streams.put(key, lost(key))

    def _extend(self, key: Key, token_count: int) -> None:
        def answer(outcome: Reservation | PacelineError) -> None:
            if key not in self._streams:
                return  # the request has left the engine meanwhile, and its blocks are released
            if isinstance(outcome, Reservation):
                self._engine.grow(key, outcome.tables)
            elif isinstance(outcome, BusyError):
                self._engine.starve(key)
            else:
                self._on_lease_lost(key)

        self._kv.extend(key, token_count, answer)


def lost(key: Key) -> StaleError:
    """Return the error of a request whose lease ended."""
    return StaleError(f"the blocks of {key} are lost: its lease ended before it was renewed")

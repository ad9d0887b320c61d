"""The encodings of one attempt: held from `ready` until the prompt is computed, and again after a preemption."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import cast

import pytest

from paceline.core.errors import BusyError, InvalidRequestError, StaleError, TransferError, UnavailableError
from paceline.core.media import MediaKind, MediaSpan
from paceline.core.types import Key
from paceline.proto import common_pb2
from paceline.services.common.wire import key_to_pb, span_to_pb
from paceline.services.worker import request_media
from paceline.services.worker.encodings import Encodings, HeldEncoding
from paceline.services.worker.request_media import RequestMedia, RequestMediaTable

HERE, THERE = "here:1", "there:1"
ONE, TWO = bytes(16), bytes([1] * 16)
KEY = Key("r", 1, 1)


class Cache:
    """The encodings of two hosts, with a count of those that are held here."""

    def __init__(self, here: set[bytes], there: set[bytes] = frozenset()) -> None:  # type: ignore[assignment]
        self.here, self.there = here, there
        self.held: Counter[bytes] = Counter()
        self.is_full = False
        """Whether this host has no free blocks."""

    async def hold(self, digest: bytes, length: int, cache_salt: str = "", source: str = "") -> HeldEncoding:
        if source == THERE and digest in self.there:
            if self.is_full:
                raise BusyError("no free blocks")
            self.here.add(digest)
        if digest not in self.here:
            raise UnavailableError("not cached")
        self.held[digest] += 1
        return HeldEncoding(KEY, digest, length, (3,), 1, [b""])

    def release(self, held: HeldEncoding) -> None:
        self.held[held.digest] -= 1

    def size(self, held: HeldEncoding) -> int:
        return 100

    @property
    def digests(self) -> set[bytes]:
        return set(+self.held)


def work() -> common_pb2.Work:
    """Return the work of a context with a span of ONE, of TWO, and of ONE again."""
    places = ((4, ONE), (12, TWO), (20, ONE))
    spans = [MediaSpan(start, 4, digest, MediaKind.IMAGE) for start, digest in places]
    return common_pb2.Work(key=key_to_pb(KEY), media=map(span_to_pb, spans))


def media_of(cache: Cache, cached_tokens: int = 0) -> RequestMedia:
    return RequestMedia(work(), cast(Encodings, cache), HERE, cached_tokens)


async def test_encodings_reach_the_engine_whenever_they_come() -> None:
    cache, given = Cache({ONE, TWO}), []
    media = media_of(cache)
    assert await media.ready(ONE, HERE) == 0
    media.attach(lambda held: given.append(held.digest))
    assert given == [ONE]
    await media.ready(TWO, HERE)
    await media.ready(TWO, HERE)
    assert given == [ONE, TWO]
    assert cache.held == {ONE: 1, TWO: 1}
    media.finish()
    assert not cache.digests


async def test_an_encoding_of_another_host_is_fetched() -> None:
    media = media_of(cache := Cache(set(), {ONE}))
    assert await media.ready(ONE, THERE) == 100
    assert await media.ready(ONE, THERE) == 0
    assert cache.held == {ONE: 1}


async def test_an_encoding_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_media, "ROOM_SECONDS", (0.0, 0.0))
    media = media_of(Cache(set()))
    with pytest.raises(TransferError, match="did not come from there:1"):
        await media.ready(ONE, THERE)
    with pytest.raises(StaleError, match="evicted"):
        await media.ready(ONE, HERE)
    with pytest.raises(InvalidRequestError, match="no span"):
        await media.ready(bytes([9] * 16), HERE)


async def test_a_host_without_free_blocks_is_no_failed_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_media, "ROOM_SECONDS", (0.0, 0.0))
    media = media_of(cache := Cache(set(), {ONE}))
    cache.is_full = True
    with pytest.raises(BusyError, match="no free blocks"):
        await media.ready(ONE, THERE)


async def test_news_that_come_too_late_hold_nothing() -> None:
    media = media_of(cache := Cache({ONE}))
    media.finish()
    await media.ready(ONE, HERE)
    assert not cache.digests


async def test_a_preempted_prompt_holds_again_what_had_come() -> None:
    media = media_of(cache := Cache({ONE, TWO}))
    await media.ready(ONE, HERE)
    media.pause()
    assert not cache.digests
    given: list[bytes] = []
    await media.resume(0)
    media.attach(lambda held: given.append(held.digest))
    assert (given, cache.digests) == ([ONE], {ONE}), "nobody knows yet that the other one is complete"
    await media.ready(TWO, HERE)
    assert given == [ONE, TWO]


async def test_a_preemption_does_not_end_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_media, "_AGAIN_SECONDS", (0.0, 0.0))
    media = media_of(cache := Cache(set(), set()))
    fetching = asyncio.create_task(media.ready(ONE, THERE))
    await asyncio.sleep(0)
    media.pause()
    await asyncio.sleep(0)
    cache.there.add(ONE)
    assert await fetching == 100
    assert not cache.digests
    await media.resume(0)
    assert cache.digests == {ONE}


async def test_a_fetch_ends_with_the_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_media, "_AGAIN_SECONDS", (0.0, 0.0))
    media = media_of(Cache(set()))
    fetching = asyncio.create_task(media.ready(ONE, THERE))
    await asyncio.sleep(0)
    media.close()
    with pytest.raises(StaleError, match="left the engine"):
        await fetching


async def test_a_prompt_that_was_computed_before_needs_all_that_is_not_cached() -> None:
    media = media_of(cache := Cache({ONE, TWO}))
    media.finish()
    media.pause()
    await media.resume(16)
    assert cache.digests == {ONE}
    media.pause()
    cache.here.remove(TWO)
    with pytest.raises(StaleError):
        await media.resume(0)
    media.finish()
    assert not cache.digests


async def test_a_preempted_prompt_needs_images_that_were_in_its_cached_prefix() -> None:
    cache = Cache({ONE, TWO})
    media = media_of(cache, cached_tokens=16)  # so the gateway sends no encoding of TWO
    media.pause()
    await media.resume(0)
    assert cache.digests == {TWO}
    media.pause()
    cache.here.remove(TWO)
    with pytest.raises(StaleError, match="evicted"):
        await media.resume(0)


async def test_a_worker_knows_the_attempts_that_it_computes() -> None:
    cache = Cache({ONE})
    table = RequestMediaTable(cast(Encodings, cache), HERE)
    assert table.open(common_pb2.Work(key=key_to_pb(KEY)), 0) is None
    with pytest.raises(StaleError, match="does not compute"):
        await table.ready(KEY, ONE, HERE)
    table.open(work(), 0)
    await table.ready(KEY, ONE, HERE)
    later = KEY._replace(generation=3)
    assert table.get(later) is not None
    table.close(later)
    assert table.get(KEY) is None
    assert not cache.digests
    with pytest.raises(InvalidRequestError, match="no encoders"):
        RequestMediaTable(None, HERE).open(work(), 0)

"""If several requests lack the same prefix at the same time, it is fetched once, between two real services."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.core.types import Key
from paceline.services.common.tasks import end_tasks
from paceline.services.kvtransfer.transfers import prefixes
from paceline.services.kvtransfer.transfers.exports import Exports, Write
from tests.services.kvtransfer.kv_pair import pair
from tests.services.kvtransfer.transfers.test_prefix_transfers import Call, cache, fetch, found


class Source:
    """A source of prefixes. It records which requests ask, and answers once `may_answer` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        honest = Exports.run_prefix

        async def run_prefix(
            exports: Exports, of: Key, hashes: Sequence[bytes], cached: int, write: Write, encoding: bool
        ) -> None:
            self.asked.append(of.request_id)
            await self.may_answer.wait()
            await honest(exports, of, hashes, cached, write, encoding)

        monkeypatch.setattr(Exports, "run_prefix", run_prefix)

    async def is_asked(self, times: int) -> None:
        async with asyncio.timeout(10):
            while len(self.asked) < times:
                await asyncio.sleep(0.001)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    return Source(monkeypatch)


def begin(*calls: Call) -> list[asyncio.Future]:
    return [asyncio.ensure_future(call) for call in calls]


async def test_equal_prefixes_are_brought_once(tmp_path: Path, source: Source) -> None:
    async with pair(tmp_path) as two:
        await cache(two)
        first = begin(fetch(two, name="first"))
        await source.is_asked(1)
        others = begin(fetch(two, name="second"), fetch(two, name="third"))
        await asyncio.sleep(0.05)
        source.may_answer.set()
        replies = await asyncio.gather(*first, *others)
        assert [reply.blocks for reply in replies] == [6, 0, 0]
        assert len(source.asked) == 1
        assert (await found(two)).filled_tokens == 6 * 16
        await two.end()


async def test_who_waited_for_others_in_vain_does_not_blame_its_own_source(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(tmp_path) as two:
        await cache(two)
        first = begin(fetch(two, name="first"))
        await source.is_asked(1)
        monkeypatch.setattr(prefixes, "PREFIX_SECONDS", 0.1)
        assert (await fetch(two, name="second")).blocks == 0
        source.may_answer.set()
        assert [reply.blocks for reply in await asyncio.gather(*first)] == [6]
        assert source.asked == ["first"]
        await two.end()


async def test_of_one_that_goes_on_only_the_rest_is_brought(tmp_path: Path, source: Source) -> None:
    async with pair(tmp_path) as two:
        await cache(two, "abcdef")
        first = begin(fetch(two, "abcd", "first"))
        await source.is_asked(1)
        second = begin(fetch(two, "abcdef", "second"))
        await asyncio.sleep(0.05)
        source.may_answer.set()
        assert [reply.blocks for reply in await asyncio.gather(*first, *second)] == [4, 2]
        await two.end()


async def test_those_that_share_only_what_is_here_wait_for_nobody(tmp_path: Path, source: Source) -> None:
    async with pair(tmp_path) as two:
        await cache(two, "abcd")
        await cache(two, "abxy")
        source.may_answer.set()
        await fetch(two, "ab", "here")
        source.may_answer.clear()
        both = begin(fetch(two, "abcd", "first"), fetch(two, "abxy", "second"))
        await source.is_asked(3)
        source.may_answer.set()
        assert [reply.blocks for reply in await asyncio.gather(*both)] == [2, 2]
        await two.end()


async def test_who_waited_for_one_that_left_brings_it_itself(tmp_path: Path, source: Source) -> None:
    async with pair(tmp_path) as two:
        await cache(two)
        call = fetch(two, name="first")
        first = begin(call)
        await source.is_asked(1)
        (second,) = begin(fetch(two, name="second"))
        await asyncio.sleep(0.05)
        call.cancel()
        await source.is_asked(2)
        source.may_answer.set()
        assert (await second).blocks == 6
        assert source.asked == ["first", "second"]
        await end_tasks(*first)
        await two.end()

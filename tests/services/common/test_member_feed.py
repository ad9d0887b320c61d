"""Following members by their beats, with a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ResponseError

from paceline.proto.fleet_pb2 import LoadReport
from paceline.services.common import member_feed
from paceline.services.common.member_feed import MemberFeed, News
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.registry import (
    Member,
    beats_key,
    connect,
    member_key,
    names_key,
    read_members,
    remove_member,
    write_member,
)
from paceline.services.common.secret import Secret

NO_SECRET = Secret()
LARGEST_ID = "18446744073709551615-18446744073709551615"


def member(name: str, running: int = 0, beats: bool = True) -> Member:
    """Return a member as it is read from Redis."""
    written = Member(name, "decode", 1, "127.0.0.1:1", "h", load=LoadReport(running=running), beats=beats)
    found = Member.from_bytes(written.to_bytes())
    assert found is not None
    return found


class Desk:
    """A cluster and a feed that follows it."""

    def __init__(self, redis_url: str, secret: Secret = NO_SECRET) -> None:
        self.redis = connect(redis_url)
        self.cluster = uuid.uuid4().hex
        self.ignored = 0
        self.signatures = MemberSignatures(secret, self.cluster, self._count_ignored)
        self.feed = MemberFeed(self.redis, self.cluster, self.signatures)

    def _count_ignored(self) -> None:
        self.ignored += 1

    async def write(self, *members: Member) -> None:
        for each in members:
            await write_member(self.redis, self.cluster, each, self.signatures)

    async def write_as_before(self, each: Member) -> None:
        """Write a member as releases did that had no beats."""
        await self.redis.set(member_key(self.cluster, each.worker_id), each.to_bytes(), px=5000)
        await self.redis.sadd(names_key(self.cluster), each.worker_id)  # type: ignore[misc]

    async def read(self) -> News:
        """Return all that one reading brings."""
        news = News()

        def take(part: News) -> None:
            news.changed.extend(part.changed)
            news.heard.extend(part.heard)
            news.unlisted.extend(part.unlisted)

        await self.feed.read(take)
        return news


@pytest.fixture
async def desk(redis_server: str) -> AsyncIterator[Desk]:
    desk = Desk(redis_server)
    async with contextlib.aclosing(desk.redis):
        yield desk


async def test_the_first_reading_brings_everybody_and_later_ones_what_is_new(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_feed, "_MOST", 2)
    members = [member(f"m{number}") for number in range(5)]
    await desk.write(*members)
    first = await desk.read()
    assert (first.changed, sorted(first.heard)) == (members, [each.worker_id for each in members])
    assert await desk.read() == News()
    await desk.write(*members[:3], member("m3", running=7), member("new"))
    news = await desk.read()
    assert news.changed == [member("m3", running=7), member("new")]
    assert sorted(news.heard) == ["m0", "m1", "m2", "m3", "new"]


async def test_only_values_that_changed_are_asked_for(desk: Desk) -> None:
    await desk.write(member("d"))
    await desk.read()
    await desk.redis.set(member_key(desk.cluster, "d"), b"must not be read")
    await desk.redis.xadd(beats_key(desk.cluster), {"d": next(iter(desk.feed._versions.values()))})
    assert await desk.read() == News(heard=["d"])


async def test_old_beats_are_trimmed_whatever_their_number(desk: Desk) -> None:
    beat = await write_member(desk.redis, desk.cluster, member("d"), desk.signatures)
    key, now = beats_key(desk.cluster), int(beat.partition(b"-")[0])
    await desk.redis.delete(key)
    for age in (40_000, 20_000):
        for number in range(300):
            await desk.redis.xadd(key, {"d": b"v"}, id=f"{now - age}-{number + 1}")
    await desk.write(member("d"))  # does not know the time yet
    assert await desk.redis.xlen(key) == 601
    await write_member(desk.redis, desk.cluster, member("d"), desk.signatures, beat)
    assert 302 <= await desk.redis.xlen(key) < 410  # Redis drops whole nodes, of 100 entries


async def test_who_leaves_in_order_is_off_the_list_at_once(desk: Desk) -> None:
    await desk.write(member("d"), member("stays"))
    await desk.read()
    await remove_member(desk.redis, desk.cluster, "d")
    assert await desk.read() == News(unlisted=["d"])
    desk.feed.forget("d")
    await desk.write(member("d"))
    assert await desk.read() == News(changed=[member("d")], heard=["d"])


async def test_who_was_killed_is_not_found_again_by_what_is_left_in_redis(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_feed, "_SCAN_SECONDS", 0.0)
    await desk.write(member("killed"))
    await desk.read()
    desk.feed.forget("killed")
    assert await desk.read() == News()
    await desk.write(member("killed"))
    assert (await desk.read()).changed == [member("killed")]


async def test_who_is_silent_is_off_the_list_until_heard_again(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.write(member("d"))
    await desk.read()
    monkeypatch.setattr(member_feed, "SILENT_SECONDS", 0.0)
    assert await desk.read() == News(unlisted=["d"])
    assert await desk.read() == News()
    monkeypatch.undo()
    await desk.write(member("d"))
    assert await desk.read() == News(heard=["d"])


async def test_a_silent_member_whose_name_a_release_without_beats_has_taken_is_read(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await desk.write(member("d"), member("dead"))
    await desk.read()
    monkeypatch.setattr(member_feed, "SILENT_SECONDS", 0.0)
    assert sorted((await desk.read()).unlisted) == ["d", "dead"]
    monkeypatch.undo()
    desk.feed.forget("d")
    monkeypatch.setattr(desk.feed, "_scan_at", 0.0)
    old = dataclasses.replace(member("d", beats=False), epoch=2)
    await desk.write_as_before(old)
    assert await desk.read() == News(changed=[old], heard=["d"])
    await desk.redis.delete(member_key(desk.cluster, "d"), names_key(desk.cluster))
    assert await desk.read() == News(unlisted=["d"])
    desk.feed.forget("d")
    await desk.write(member("d"))
    assert await desk.read() == News(changed=[member("d")], heard=["d"])


async def test_nobody_is_silent_while_redis_is(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(redis_server)
    await desk.write(member("d"))
    await desk.read()
    monkeypatch.setattr(member_feed, "SILENT_SECONDS", 0.02)
    monkeypatch.setattr(desk.redis, "xread", None)
    with pytest.raises(TypeError):
        await desk.read()
    monkeypatch.undo()
    monkeypatch.setattr(member_feed, "SILENT_SECONDS", 0.02)
    await asyncio.sleep(0.03)
    assert await desk.read() == News()  # Redis has just begun to answer, and nobody could be heard
    await asyncio.sleep(0.03)
    assert await desk.read() == News(unlisted=["d"])
    await desk.redis.aclose()


async def test_after_a_flush_the_next_beat_is_heard(desk: Desk) -> None:
    await desk.write(member("d"))
    await desk.read()
    await desk.redis.delete(beats_key(desk.cluster), member_key(desk.cluster, "d"), names_key(desk.cluster))
    assert await desk.read() == News()
    await asyncio.sleep(0.002)  # within the same millisecond, the new stream would give the old id again
    await desk.write(member("d"))
    assert await desk.read() == News(heard=["d"])


async def test_beats_go_on_after_an_entry_with_the_largest_id(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.write(member("d"))
    await desk.redis.xadd(beats_key(desk.cluster), {"x": "y"}, id=LARGEST_ID)
    await desk.read()
    with pytest.raises(ResponseError):
        await desk.write(member("d", running=1))
    monkeypatch.setattr(desk.feed, "_scan_at", 0.0)
    await desk.read()
    await desk.write(member("d", running=2))
    news = await desk.read()
    assert (news.heard, news.changed) == (["d"], [member("d", running=2)])


async def test_keys_that_others_have_given_another_type_are_made_again(desk: Desk) -> None:
    for key in (beats_key(desk.cluster), names_key(desk.cluster)):
        await desk.redis.delete(key)
        await desk.redis.set(key, "not ours")
        with pytest.raises(ResponseError):
            await desk.write(member("d"))
        await desk.write(member("d"))
    assert await read_members(desk.redis, desk.cluster, desk.signatures) == [member("d")]


async def test_a_redis_whose_clock_is_behind_is_followed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.redis.xadd(beats_key(desk.cluster), {"x": b"far in the future"}, id="99999999999999-0")
    await desk.write(member("d"))
    await desk.read()
    await desk.redis.delete(beats_key(desk.cluster))
    monkeypatch.setattr(desk.feed, "_scan_at", 0.0)
    await desk.read()
    await desk.write(member("d", running=1))
    assert (await desk.read()).changed == [member("d", running=1)]


async def test_members_of_earlier_releases_are_read_each_time(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    await desk.write(member("d"))
    await desk.read()
    old = member("old", beats=False)
    await desk.write_as_before(old)
    monkeypatch.setattr(desk.feed, "_scan_at", 0.0)
    assert await desk.read() == News(changed=[old], heard=["old"])
    assert await desk.read() == News(heard=["old"])
    busy = dataclasses.replace(old, load=LoadReport(running=3))
    await desk.write_as_before(busy)
    assert await desk.read() == News(changed=[busy], heard=["old"])
    await desk.redis.delete(member_key(desk.cluster, "old"))
    assert await desk.read() == News(unlisted=["old"])
    assert await desk.redis.smembers(names_key(desk.cluster)) == {b"d"}  # type: ignore[misc]
    # The same name comes back with a release that has beats.
    await desk.write(member("old"))
    assert (await desk.read()).changed == [member("old")]
    await desk.redis.delete(member_key(desk.cluster, "old"))
    assert await desk.read() == News()


async def test_what_others_write_is_no_news(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, other = (Desk(redis_server, Secret(f"the secret of {whose}")) for whose in ("this cluster", "another one"))
    other.cluster = desk.cluster
    await desk.write(member("d"))
    assert await desk.read() == News(changed=[member("d")], heard=["d"])
    version = next(iter(desk.feed._versions.values()))
    await other.write(member("d", running=7), member("evil"))
    await desk.redis.xadd(beats_key(desk.cluster), {"d": version, "evil": b"?"})
    monkeypatch.setattr(desk.feed, "_scan_at", 0.0)  # all names are looked up, those without a beat, too
    assert await desk.read() == News()
    await desk.write(member("d", running=1))
    assert await desk.read() == News(changed=[member("d", running=1)], heard=["d"])
    for each in (desk, other):
        await each.redis.aclose()


async def test_a_signed_member_that_stays_the_same_is_not_read_again(redis_server: str) -> None:
    desk = Desk(redis_server, Secret("the secret of this cluster"))
    async with contextlib.aclosing(desk.redis):
        await desk.write(member("d"))
        await desk.read()
        await desk.write(member("d"))
        await desk.redis.set(member_key(desk.cluster, "d"), b"must not be read")
        assert await desk.read() == News(heard=["d"])
        assert desk.ignored == 0


async def test_what_is_no_member_is_heard_and_never_taken(desk: Desk) -> None:
    await desk.redis.xadd(beats_key(desk.cluster), {"d": b"?"})
    await desk.read()
    await desk.redis.set(member_key(desk.cluster, "d"), b"no message")
    await desk.redis.xadd(beats_key(desk.cluster), {"d": b"?", b"\xff": b"?"})
    assert (await desk.read()).changed == []

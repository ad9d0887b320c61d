"""A worker's client of kvtransfer: leases that go on or end, and sessions that end."""

from __future__ import annotations

import asyncio

import pytest

from paceline.core.errors import UnavailableError
from paceline.core.types import Key
from paceline.services.kvtransfer import keeper
from paceline.services.kvtransfer.ledger.lease import State
from paceline.services.kvtransfer.ledger.lease_book import GRACE_SECONDS
from paceline.services.worker import kv_session
from paceline.services.worker.leases import Reservation
from tests.services.worker.unreliable_host import CONTEXT, KEY, LEASE, UnreliableHost

pytestmark = pytest.mark.slow


async def test_a_worker_learns_that_a_lease_ended_and_frees_the_blocks_when_it_is_done(
    host: UnreliableHost, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[Key] = []
    host.decode.listen(lost.append)
    await host.decode.reserve(KEY, [], 64, 0)
    host.service.now += LEASE
    await host.until(lambda: lost == [KEY])
    assert host.service.snapshot().counts.in_flight == 4  # the worker may be writing at this moment
    host.decode.release(KEY)
    await host.all_free()

    def lines() -> set[tuple[str, str]]:
        return {(each.name, each.__dict__["request_id"]) for each in caplog.records if "lease" in each.message}

    await host.until(lambda: lines() == {(kv_session.__name__, "r"), (keeper.__name__, "r")})


async def test_renewals_keep_a_lease(host: UnreliableHost) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    (lease,) = host.leases()
    for _ in range(3):
        host.service.now += LEASE / 2
        await host.until(lambda: lease.deadline == host.service.now + LEASE)
    assert host.service.snapshot().expired_leases == 0


async def test_the_late_end_of_an_older_generation_touches_no_newer_one(host: UnreliableHost) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    host.decode.release(KEY)  # preempted
    again = await host.decode.reserve(Key("r", 1, 2), [], 64, 0)
    host.decode.release(KEY)  # removed, because an extension of the older generation failed
    (lease,) = host.leases()
    assert host.decode.has(again.key)
    for _ in range(3):
        host.service.now += LEASE / 2
        await host.until(lambda: lease.deadline == host.service.now + LEASE)


async def test_a_worker_knows_what_it_holds(host: UnreliableHost) -> None:
    reserved = await host.decode.reserve(KEY, [], 64, 0)
    assert host.decode.has(KEY)
    opened = await host.prefill.open(KEY)
    assert host.prefill.has(opened.key)
    await host.prefill.fill(opened.key, 64, CONTEXT)
    assert not host.prefill.has(opened.key)
    adopted = (await host.decode.adopt(KEY)).reservation
    assert adopted == Reservation(Key("r", 1, 3), 64, reserved.tables, CONTEXT)
    assert not host.decode.has(reserved.key)
    assert host.decode.has(adopted.key)
    host.decode.release(adopted.key)
    assert not host.decode.has(adopted.key)
    other = await host.decode.reserve(Key("s", 1, 1), [], 64, 0)
    await host.service.close()
    await host.until(lambda: not host.decode.has(other.key))


async def test_who_fills_has_lost_nothing(host: UnreliableHost) -> None:
    lost: list[Key] = []
    host.prefill.listen(lost.append)
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    host.service.pause = LEASE
    host.prefill.seal(opened.key, 0, 0, [bytes(16)])
    await asyncio.sleep(0.05)  # the seal has been sent, so renewals wait, and follow the fill in the same batch
    await host.prefill.fill(opened.key, 64, CONTEXT)
    assert lost == []


async def test_nobody_waits_for_a_session_that_broke(host: UnreliableHost) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    await host.service.close()
    async with asyncio.timeout(10):
        await host.decode.session.lost
        host.decode.release(KEY)
        with pytest.raises(UnavailableError):
            await host.decode.reserve(Key("s", 1, 1), [], 64, 0)
        await host.decode.session.close()


async def test_closing_ends_what_has_no_answer_yet(host: UnreliableHost, monkeypatch: pytest.MonkeyPatch) -> None:
    host.service.pause = 3
    waiting = asyncio.create_task(host.decode.reserve(KEY, [], 64, 0))
    await host.until(lambda: bool(host.leases()))
    monkeypatch.setattr(kv_session, "CALL_SECONDS", 0.1)
    async with asyncio.timeout(10):
        await host.decode.session.close()
        with pytest.raises(UnavailableError, match="no session"):
            await waiting
        with pytest.raises(UnavailableError, match="no session"):
            await host.decode.reserve(Key("s", 1, 1), [], 64, 0)
    await host.until(lambda: [lease.state for lease in host.leases()] == [State.DRAINING])
    host.service.now += GRACE_SECONDS
    await host.all_free()


async def test_an_answer_that_makes_no_sense_ends_the_session(host: UnreliableHost) -> None:
    host.service.forgets_results = 1
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="no session"):
            await host.decode.reserve(KEY, [], 64, 0)
        await host.decode.session.lost
    await host.until(lambda: host.service.snapshot().workers == 1)
    host.service.now += GRACE_SECONDS
    await host.all_free()

"""A worker's client of kvtransfer against the real service, when answers are late, lost or missing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.types import Key
from paceline.services.common.unix_socket import MAX_MESSAGE_BYTES
from tests.services.worker.unreliable_host import CONTEXT, KEY, SLOTS, UnreliableHost

pytestmark = pytest.mark.slow

# ---- answers that never come

lost_on_the_way = pytest.mark.parametrize("trouble", ["loses_calls", "loses_answers"])


@lost_on_the_way
async def test_what_was_reserved_without_an_answer_is_given_back(host: UnreliableHost, trouble: str) -> None:
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError, match="has ended"):
        await host.decode.reserve(KEY, [], 64, 0)
    await host.all_free()


@lost_on_the_way
async def test_a_worker_that_never_heard_that_it_writes_lets_go(host: UnreliableHost, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError):
        await host.prefill.open(KEY)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_worker_that_never_heard_that_it_has_filled_lets_go(host: UnreliableHost, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError):
        await host.prefill.fill(opened.key, 64, CONTEXT)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_worker_that_never_heard_that_it_has_adopted_lets_go(host: UnreliableHost, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    await host.prefill.fill(opened.key, 64, CONTEXT)
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError):
        await host.decode.adopt(KEY)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_lease_that_grew_unheard_is_released_whole(host: UnreliableHost, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 16, 0)
    answers: list[object] = []
    setattr(host.service, trouble, 1)
    host.decode.extend(KEY, 64, answers.append)
    await host.until(lambda: bool(answers))
    assert isinstance(answers[0], UnavailableError)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_release_is_repeated_until_it_is_answered(host: UnreliableHost, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    setattr(host.service, trouble, 3)
    host.decode.release(KEY)
    await host.until(lambda: getattr(host.service, trouble) == 0)
    await host.all_free()


async def test_a_repeated_release_keeps_its_place(host: UnreliableHost) -> None:
    await host.decode.reserve(KEY, [], 16 * SLOTS, 0)
    host.service.loses_calls, host.service.pause = 1, 0.2
    host.decode.release(KEY)
    await host.until(lambda: host.service.loses_calls == 0)  # the release has been sent, and is lost
    lease = await host.decode.reserve(Key("r", 1, 2), [], 16 * SLOTS, 0)
    assert len(lease.tables[0]) == SLOTS


# ---- answers that come late


@pytest.mark.parametrize("act", ["reserve", "open", "adopt"])
async def test_what_comes_after_its_caller_has_gone_is_given_back(host: UnreliableHost, act: str) -> None:
    if act != "reserve":
        await host.decode.reserve(KEY, [], 64, 0)
    if act == "adopt":
        await host.prefill.fill((await host.prefill.open(KEY)).key, 64, CONTEXT)
    host.service.pause = 0.2
    state, call = {
        "reserve": ("reserved", lambda: host.decode.reserve(KEY, [], 64, 0)),
        "open": ("filling", lambda: host.prefill.open(KEY)),
        "adopt": ("active", lambda: host.decode.adopt(KEY)),
    }[act]
    task = asyncio.create_task(call())
    await host.until(lambda: [lease.state.value for lease in host.leases()] == [state])
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if act == "adopt":
        host.decode.release(KEY)  # the reservation's key, although the lease may have a newer one
    await host.all_free()


async def test_who_adopts_seals_what_the_writer_has_left(host: UnreliableHost) -> None:
    names = [bytes([number]) * 16 for number in range(3)]
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    host.prefill.seal(opened.key, 0, 0, names[:1])
    await host.prefill.fill(opened.key, 50, CONTEXT)
    adopted = await host.decode.adopt(KEY)
    assert (list(adopted.sealed_blocks), adopted.reservation.context_hash) == ([1], CONTEXT)
    host.decode.seal_adopted(adopted, [names])
    host.decode.release(adopted.reservation.key)
    assert (await host.decode.reserve(Key("next", 1, 1), names, 64, 64)).filled_tokens == 48


# ---- large messages


async def test_many_long_contexts_at_once_are_more_than_one_message(host: UnreliableHost) -> None:
    tokens = 1 << 17
    hashes = [bytes(16)] * (tokens // 16)
    count = 2 * MAX_MESSAGE_BYTES // (18 * len(hashes))
    keys = [Key(str(number), 1, 1) for number in range(count)]
    outcomes = await asyncio.gather(
        *(host.decode.reserve(key, hashes, tokens, 0) for key in keys), return_exceptions=True
    )
    # Each operation was read and then refused on its own, because this arena is small.
    assert all("blocks and the arena has" in str(outcome) for outcome in outcomes)


# ---- what the service refuses


async def test_what_kvtransfer_refuses_is_not_the_client_s_fault(host: UnreliableHost) -> None:
    with pytest.raises(PacelineError, match="kvtransfer refused an operation") as refused:
        await host.decode.reserve(KEY, [], 16 * (SLOTS + 1), 0)
    assert not isinstance(refused.value, InvalidRequestError)

"""A worker's side of kvtransfer against the real service, when answers are late, lost or never come."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.core.types import Key
from paceline.proto import kvtransfer_pb2 as pb
from paceline.proto import kvtransfer_pb2_grpc as pb_grpc
from paceline.services.common import kv_answers, kv_session
from paceline.services.common.kv_client import KVClient
from paceline.services.common.rpc import MAX_MESSAGE_BYTES, RpcServer
from paceline.services.common.secret import Secret
from paceline.services.kvtransfer import keeper
from paceline.services.kvtransfer.hold import Hold, State
from paceline.services.kvtransfer.hold_book import GRACE_SECONDS
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.host_socket import Answer
from paceline.services.kvtransfer.reconciliation import RECONCILE_SECONDS
from paceline.services.kvtransfer.service import KVTransferService

LAYOUT = make_layout((GroupShape("full", (0,), 1, 8),), 4, "test")
SLOTS = 8
LEASE = 0.6
KEY = Key("r", 1, 1)


class Unreliable(KVTransferService):
    """Loses calls, or the answers to calls that it has carried out. Its leases end when the test says so."""

    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        memory = SLOTS * LAYOUT.slot_bytes
        super().__init__(HostOptions("host", memory, folder, LEASE, Secret(), clock=lambda: self.now))
        self.loses_calls = 0
        self.loses_answers = 0
        self.forgets_results = 0
        self.pause = 0.0

    def serve(self, request: pb.BatchRequest) -> Answer:
        if all(operation.HasField("renew") for operation in request.operations):
            return super().serve(request)
        return self._serve_later(request)

    async def _serve_later(self, request: pb.BatchRequest) -> pb.BatchReply:
        if self.loses_calls:
            self.loses_calls -= 1
            await asyncio.sleep(self.pause)
            raise UnavailableError("the line broke")
        answer = super().serve(request)
        reply = answer if isinstance(answer, pb.BatchReply) else await answer
        await asyncio.sleep(self.pause)
        if self.loses_answers:
            self.loses_answers -= 1
            raise UnavailableError("the line broke")
        if self.forgets_results:
            self.forgets_results -= 1
            del reply.results[-1]
        return reply


class Host:
    """The service and two workers."""

    def __init__(self, service: Unreliable, server: RpcServer, port: int, decode: KVClient, prefill: KVClient) -> None:
        self.service = service
        self.server = server
        self.port = port
        self.decode = decode
        self.prefill = prefill

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)

    async def all_free(self) -> None:
        await self.until(lambda: self.service.snapshot().counts.free == SLOTS)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    unreliable = Unreliable(tmp_path)
    server = RpcServer("127.0.0.1", 0, Secret())
    pb_grpc.add_KVTransferServicer_to_server(unreliable, server.server)
    await unreliable.start()
    address = f"127.0.0.1:{(port := await server.start())}"
    clients = [KVClient(address, role, role, Secret()) for role in ("decode", "prefill")]
    for client in clients:
        await client.attach(LAYOUT, context_tokens=64)
    running = Host(unreliable, server, port, *clients)
    yield running
    for client in clients:
        await client.close()
    await running.service.close()
    await running.server.close(0)


# ---- answers that never come

lost_on_the_way = pytest.mark.parametrize("trouble", ["loses_calls", "loses_answers"])


@lost_on_the_way
async def test_what_was_reserved_without_an_answer_is_given_back(host: Host, trouble: str) -> None:
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError, match="has ended"):
        await host.decode.reserve(KEY, [], 64, 0)
    await host.all_free()


@lost_on_the_way
async def test_a_worker_that_never_heard_that_it_writes_lets_go(host: Host, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError):
        await host.prefill.open(KEY)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_worker_that_never_heard_that_it_has_filled_lets_go(host: Host, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError):
        await host.prefill.fill(opened.key, 64)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_worker_that_never_heard_that_it_has_adopted_lets_go(host: Host, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    await host.prefill.fill(opened.key, 64)
    setattr(host.service, trouble, 1)
    with pytest.raises(UnavailableError):
        await host.decode.adopt(KEY)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_hold_that_grew_unheard_is_released_whole(host: Host, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 16, 0)
    answers: list[object] = []
    setattr(host.service, trouble, 1)
    host.decode.extend(KEY, 64, answers.append)
    await host.until(lambda: bool(answers))
    assert isinstance(answers[0], UnavailableError)
    host.decode.release(KEY)
    await host.all_free()


@lost_on_the_way
async def test_a_release_is_repeated_until_it_is_answered(host: Host, trouble: str) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    setattr(host.service, trouble, 3)
    host.decode.release(KEY)
    await host.until(lambda: getattr(host.service, trouble) == 0)
    await host.all_free()


async def test_a_repeated_release_keeps_its_place(host: Host) -> None:
    await host.decode.reserve(KEY, [], 16 * SLOTS, 0)
    host.service.loses_calls, host.service.pause = 1, 0.2
    host.decode.release(KEY)
    await host.until(lambda: host.service.loses_calls == 0)  # it is on its way, and will not arrive
    hold = await host.decode.reserve(Key("r", 1, 2), [], 16 * SLOTS, 0)
    assert len(hold.tables[0]) == SLOTS


# ---- answers that come late


@pytest.mark.parametrize("act", ["reserve", "open", "adopt"])
async def test_what_comes_after_its_caller_has_gone_is_given_back(host: Host, act: str) -> None:
    if act != "reserve":
        await host.decode.reserve(KEY, [], 64, 0)
    if act == "adopt":
        await host.prefill.fill((await host.prefill.open(KEY)).key, 64)
    host.service.pause = 0.2
    state, call = {
        "reserve": ("reserved", lambda: host.decode.reserve(KEY, [], 64, 0)),
        "open": ("filling", lambda: host.prefill.open(KEY)),
        "adopt": ("active", lambda: host.decode.adopt(KEY)),
    }[act]
    task = asyncio.create_task(call())
    await host.until(lambda: [hold.state.value for hold in holds(host)] == [state])
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    if act == "adopt":
        host.decode.release(KEY)  # the reservation, whatever has become of it
    await host.all_free()


def holds(host: Host) -> list[Hold]:
    shaped = host.service.sessions.memory
    return shaped.ledger.holds() if shaped else []


# ---- leases and sessions that end


async def test_a_worker_learns_that_a_lease_ended_and_frees_the_blocks_when_it_is_done(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    lost: list[Key] = []
    host.decode.on_hold_lost = lost.append
    await host.decode.reserve(KEY, [], 64, 0)
    host.service.now += LEASE
    await host.until(lambda: lost == [KEY])
    assert host.service.snapshot().counts.in_flight == 4  # it may be writing at this moment
    host.decode.release(KEY)
    await host.all_free()

    def lines() -> set[tuple[str, str]]:
        return {(each.name, each.__dict__["request_id"]) for each in caplog.records if "lease" in each.message}

    await host.until(lambda: lines() == {(kv_session.__name__, "r"), (keeper.__name__, "r")})


async def test_renewals_keep_a_hold(host: Host) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    (hold,) = holds(host)
    for _ in range(3):
        host.service.now += LEASE / 2
        await host.until(lambda: hold.deadline == host.service.now + LEASE)
    assert host.service.snapshot().expired_holds == 0


async def test_the_late_end_of_an_older_generation_touches_no_newer_one(host: Host) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    host.decode.release(KEY)  # preempted
    again = await host.decode.reserve(Key("r", 1, 2), [], 64, 0)
    host.decode.release(KEY)  # removed, because an extension of the time before failed
    (hold,) = holds(host)
    assert host.decode.holds(again.key)
    for _ in range(3):
        host.service.now += LEASE / 2
        await host.until(lambda: hold.deadline == host.service.now + LEASE)


async def test_a_worker_knows_what_it_holds(host: Host) -> None:
    reserved = await host.decode.reserve(KEY, [], 64, 0)
    assert host.decode.holds(KEY)
    opened = await host.prefill.open(KEY)
    assert host.prefill.holds(opened.key)
    await host.prefill.fill(opened.key, 64)
    assert not host.prefill.holds(opened.key)
    adopted = (await host.decode.adopt(KEY)).hold
    assert adopted == kv_answers.Hold(Key("r", 1, 3), 64, reserved.tables)
    assert not host.decode.holds(reserved.key)
    assert host.decode.holds(adopted.key)
    host.decode.release(adopted.key)
    assert not host.decode.holds(adopted.key)
    other = await host.decode.reserve(Key("s", 1, 1), [], 64, 0)
    await host.service.close()
    await host.until(lambda: not host.decode.holds(other.key))


async def test_who_fills_has_lost_nothing(host: Host) -> None:
    lost: list[Key] = []
    host.prefill.on_hold_lost = lost.append
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    host.service.pause = LEASE
    host.prefill.seal(opened.key, 0, 0, [bytes(16)])
    await asyncio.sleep(0.05)  # it is under way, so that renewals come behind what follows, in one batch with it
    await host.prefill.fill(opened.key, 64)
    assert lost == []


async def test_nobody_waits_for_a_session_that_broke(host: Host) -> None:
    await host.decode.reserve(KEY, [], 64, 0)
    await host.service.close()
    async with asyncio.timeout(10):
        await host.decode.lost
        host.decode.release(KEY)
        with pytest.raises(UnavailableError):
            await host.decode.reserve(Key("s", 1, 1), [], 64, 0)
        await host.decode.close()


async def test_closing_ends_what_has_no_answer_yet(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.service.pause = 3
    waiting = asyncio.create_task(host.decode.reserve(KEY, [], 64, 0))
    await host.until(lambda: bool(holds(host)))
    monkeypatch.setattr(kv_session, "CALL_SECONDS", 0.1)
    async with asyncio.timeout(10):
        await host.decode.close()
        with pytest.raises(UnavailableError, match="no session"):
            await waiting
        with pytest.raises(UnavailableError, match="no session"):
            await host.decode.reserve(Key("s", 1, 1), [], 64, 0)
    await host.until(lambda: [hold.state for hold in holds(host)] == [State.DRAINING])
    host.service.now += GRACE_SECONDS
    await host.all_free()


async def test_an_answer_that_makes_no_sense_ends_the_session(host: Host) -> None:
    host.service.forgets_results = 1
    async with asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="no session"):
            await host.decode.reserve(KEY, [], 64, 0)
        await host.decode.lost
    await host.until(lambda: host.service.snapshot().workers == 1)
    host.service.now += GRACE_SECONDS
    await host.all_free()


async def test_who_adopts_seals_what_the_writer_has_left(host: Host) -> None:
    names = [bytes([number]) * 16 for number in range(3)]
    await host.decode.reserve(KEY, [], 64, 0)
    opened = await host.prefill.open(KEY)
    host.prefill.seal(opened.key, 0, 0, names[:1])
    await host.prefill.fill(opened.key, 50)
    adopted = await host.decode.adopt(KEY)
    assert list(adopted.sealed_blocks) == [1]
    host.decode.seal_adopted(adopted, [names])
    host.decode.release(adopted.hold.key)
    assert (await host.decode.reserve(Key("next", 1, 1), names, 64, 64)).filled_tokens == 48


# ---- a service that is killed and started again


async def restart(host: Host) -> None:
    """The service is killed, and another one takes its place at the same address."""
    port = host.port
    shaped, killed = host.service.sessions.memory, host.service
    assert shaped is not None
    await killed._keeper.stop()
    await host.server.server.stop(None)
    await killed.socket.close()
    os.close(shaped.arena._descriptor)
    host.service = Unreliable(shaped.arena.path.parent)
    await host.service.start()
    host.server = RpcServer("127.0.0.1", port, Secret())
    pb_grpc.add_KVTransferServicer_to_server(host.service, host.server.server)
    await host.server.start()


async def come_back(host: Host) -> None:
    sessions = [host.decode.session, host.prefill.session]
    await host.until(lambda: host.service.sessions.reconciliation is not None)
    reconciliation = host.service.sessions.reconciliation
    assert reconciliation is not None
    await host.until(lambda: len(reconciliation.workers()) == 2)
    host.service.now += RECONCILE_SECONDS
    await host.until(lambda: not {host.decode.session, host.prefill.session} & {*sessions})


async def test_what_the_engine_has_goes_on_over_the_death_of_the_service(host: Host) -> None:
    lost: list[Key] = []
    host.decode.on_hold_lost = host.prefill.on_hold_lost = lost.append
    await host.decode.reserve(KEY, [], 32, 0)
    opened = await host.prefill.open(KEY)
    host.prefill.use(opened.key)
    host.prefill.seal(opened.key, 0, 0, [bytes([1]) * 16])
    await host.prefill.fill(opened.key, 32)
    answer = await host.decode.adopt(KEY)
    adopted = answer.hold
    host.decode.seal_adopted(answer, [[bytes([1]) * 16]])
    host.decode.use(adopted.key)
    await host.decode.reserve(Key("waits", 1, 1), [], 16, 0)
    await host.decode.reserve(Key("prefills", 1, 1), [], 16, 0)
    writing = await host.prefill.open(Key("prefills", 1, 1))
    host.prefill.use(writing.key)
    await restart(host)
    answers: list[object] = []
    host.decode.seal(adopted.key, 0, 1, [bytes([2]) * 16])
    host.decode.extend(adopted.key, 48, answers.append)
    await come_back(host)
    await host.until(lambda: bool(answers))
    assert [(hold.key, hold.state) for hold in holds(host)] == [
        (adopted.key, State.ACTIVE),
        (writing.key, State.DRAINING),
    ]
    assert isinstance(answers[0], kv_answers.Hold)
    assert answers[0].tables[0][:2] == adopted.tables[0]
    assert {*lost} == {Key("waits", 1, 1), Key("prefills", 1, 1), writing.key}
    assert host.decode.holds(adopted.key)
    assert not any(client.holds(key) for client in (host.decode, host.prefill) for key in lost)
    host.prefill.release(writing.key)
    host.decode.release(adopted.key)
    await host.until(lambda: not holds(host))
    cached = [bytes([1]) * 16, bytes([2]) * 16]
    assert (await host.decode.reserve(Key("next", 1, 1), cached, 48, 48)).filled_tokens == 32


async def test_operations_that_have_no_answer_yet_wait_for_the_service_to_come_back(host: Host) -> None:
    host.service.pause = 60
    waiting = asyncio.create_task(host.decode.reserve(KEY, [], 64, 0))
    await host.until(lambda: bool(holds(host)))
    await restart(host)
    await come_back(host)
    async with asyncio.timeout(10):
        hold = await waiting
    assert [each.key for each in holds(host)] == [hold.key]
    host.decode.release(KEY)
    await host.all_free()


async def test_who_had_blocks_before_the_service_came_back_without_its_arena_is_lost(host: Host) -> None:
    shaped = host.service.sessions.memory
    assert shaped is not None
    await host.decode.reserve(KEY, [], 64, 0)
    shaped.arena.path.unlink()
    await restart(host)
    async with asyncio.timeout(10):
        await host.decode.lost
    assert not host.decode.holds(KEY)


# ---- messages that grow


async def test_many_long_contexts_at_once_are_more_than_one_message(host: Host) -> None:
    tokens = 1 << 17
    hashes = [bytes(16)] * (tokens // 16)
    count = 2 * MAX_MESSAGE_BYTES // (18 * len(hashes))
    keys = [Key(str(number), 1, 1) for number in range(count)]
    outcomes = await asyncio.gather(
        *(host.decode.reserve(key, hashes, tokens, 0) for key in keys), return_exceptions=True
    )
    # Each was read, and refused for itself: this arena is small.
    assert all("blocks and the arena has" in str(outcome) for outcome in outcomes)


# ---- what the service refuses


async def test_what_kvtransfer_refuses_is_not_the_client_s_fault(host: Host) -> None:
    with pytest.raises(PacelineError, match="kvtransfer refused an operation") as refused:
        await host.decode.reserve(KEY, [], 16 * (SLOTS + 1), 0)
    assert not isinstance(refused.value, InvalidRequestError)

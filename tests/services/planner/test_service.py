"""The planner's service with a real Redis: one acts, people win, trouble holds the fleet, and records replay."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.config import PlannerConfig
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.planner.actions import Add, Decision, Drain, Hold
from paceline.core.planner.objectives import Latency, Objectives, RoleLimits, class_latencies
from paceline.core.planner.planner import Planner
from paceline.core.planner.reports import Report, Role
from paceline.core.request_classes import read_classes
from paceline.proto.fleet_pb2 import ClassTraffic, TrafficReport, WorkReport
from paceline.services.common.member_signatures import UNSIGNED, MemberSignatures
from paceline.services.common.pins import pin_key, write_pins
from paceline.services.common.registry import Member, Registrar, connect, write_member
from paceline.services.common.seals import Seal
from paceline.services.common.secret import Secret
from paceline.services.planner.asked import asked_key
from paceline.services.planner.lease import LeaderLease, lease_key
from paceline.services.planner.recording import RecordFile, replay_file
from paceline.services.planner.service import HANDOVER_SECONDS, PlannerService
from paceline.services.platforms.platform import Ability, PlatformRole, PlatformState

SEAL = Seal(Secret("the secret of this cluster"))
OBJECTIVES = Objectives(roles={"decode": RoleLimits(0, 4)}, fast_seconds=1.0)


class ToyPlatform:
    """A platform whose workers start at once."""

    name = "toy"
    abilities: frozenset[Ability] = frozenset({"choose"})

    def __init__(self, decode: int = 1) -> None:
        self.decode = decode
        self.given_up = 0
        self.calls: list[tuple[Role, int, list[str]]] = []
        self.fails = False
        self.taken_over = 0

    def take_over(self) -> None:
        self.taken_over += 1

    async def state(self) -> PlatformState:
        if self.fails:
            raise UnavailableError("the engine is away")
        return PlatformState({"decode": PlatformRole(self.decode, self.decode, given_up=self.given_up)})

    async def scale(self, role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        self.calls.append((role, wanted, list(victims)))
        self.decode = wanted

    async def flip(self, worker_id: str, role: Role) -> None:
        raise AssertionError("this platform flips nothing")

    async def close(self) -> None:
        pass


class Wishes(Planner):
    """A planner whose next decisions the test chooses. It holds if there is none, and keeps pinned numbers."""

    def __init__(self) -> None:
        super().__init__(OBJECTIVES)
        self.next: list[int] = []
        self.reports: list[Report] = []

    def decide(self, report: Report) -> Decision:
        self.reports.append(report)
        seen = report.roles["decode"]
        count = seen.pinned if seen.pinned is not None else self.next.pop(0) if self.next else seen.wanted
        action: Add | Drain | Hold = Hold("nothing to do")
        if count > seen.wanted:
            action = Add("decode", count, "a wish")
        elif count < seen.wanted:
            action = Drain("decode", count, "decode-0", "a wish")
        return Decision(report.at, report.revision, {"decode": count}, (action,), f"decode {count}")


class Bench:
    """Planners of one cluster, on a clock that the test moves."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.cluster = uuid.uuid4().hex
        self.platform = ToyPlatform()
        self.now = 1000.0

    def planner(self, name: str = "one", platform: ToyPlatform | None = None) -> tuple[PlannerService, Wishes]:
        wishes = Wishes()
        place = platform or self.platform
        facts = wishes, place, self.client, self.cluster, UNSIGNED, SEAL, name
        return PlannerService(*facts, clock=lambda: self.now), wishes

    async def pin(self, count: int | None) -> None:
        await write_pins(self.client, self.cluster, SEAL, {"decode": count})

    async def tick(self, *services: PlannerService) -> None:
        self.now += OBJECTIVES.fast_seconds
        for service in services:
            await service.tick()


@pytest.fixture
async def bench(redis_server: str) -> AsyncIterator[Bench]:
    async with contextlib.aclosing(connect(redis_server)) as client:
        yield Bench(client)


async def test_a_decision_is_carried_out_once_and_shown(bench: Bench) -> None:
    service, wishes = bench.planner()
    wishes.next = [3, 2]
    await bench.tick(service)
    await bench.tick(service)
    await bench.tick(service)
    assert bench.platform.calls == [("decode", 3, []), ("decode", 2, ["decode-0"])]
    plan = service.report()
    assert [(each.line, each.acted) for each in plan.decisions] == [("decode 3", True), ("decode 2", False)]
    assert (plan.leads, list(plan.may_be_empty)) == (True, ["decode"])


async def test_the_log_says_once_that_workers_share_cores(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    service, _ = bench.planner()
    sharing = Member("decode-0", "decode", 1, "", "", work=WorkReport(shares_cores=True))
    await write_member(bench.client, bench.cluster, sharing, UNSIGNED)
    await bench.tick(service)
    await bench.tick(service)
    lines = [record.message for record in caplog.records if "share the cores" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("no further decode worker is started: ")


async def test_what_others_write_to_redis_is_in_no_report(bench: Bench) -> None:
    ours, theirs = (
        MemberSignatures(Secret(f"the secret of {whose}"), bench.cluster) for whose in ("us", "another cluster")
    )
    wishes = Wishes()
    facts = wishes, bench.platform, bench.client, bench.cluster, ours, SEAL, "one"
    service = PlannerService(*facts, clock=lambda: bench.now)
    traffic = TrafficReport(seconds=5, classes=[ClassTraffic(name="default", waiting=1000)])
    for name, signatures in (("ours", ours), ("forged", theirs), ("unsigned", UNSIGNED)):
        await write_member(bench.client, bench.cluster, Member(name, "gateway", 1, "", "", traffic=traffic), signatures)
    await bench.tick(service)
    assert wishes.reports[-1].traffic["default"].waiting == 1000


async def test_numbers_in_redis_that_are_none_do_not_stop_a_planner(bench: Bench) -> None:
    for role, numbers in (("decode", b"1,\xff,-2,1e9,,12345678"), ("prefill", b"x")):
        key = asked_key(bench.cluster, "numbers", role)
        await bench.client.set(key, SEAL.close(key, numbers))
    service, wishes = bench.planner()
    wishes.next = [3]
    await bench.tick(service)
    bench.now += HANDOVER_SECONDS
    await bench.tick(service)
    assert bench.platform.calls == [("decode", 3, [])]


async def test_only_the_holder_of_the_lease_acts_and_the_other_one_follows(bench: Bench) -> None:
    (first, wishes), (second, others) = bench.planner("first"), bench.planner("second")
    wishes.next, others.next = [2], [4]
    await bench.tick(first, second)
    assert bench.platform.calls == [("decode", 2, [])]
    assert (first.report().leads, second.report().leads) == (True, False)
    assert bench.platform.taken_over == 1
    await first._lease.release()
    others.next = [3]
    await bench.tick(second)
    await bench.tick(second)
    assert bench.platform.decode == 2  # the last drains of the first one may not be known yet
    await bench.tick(second)
    assert bench.platform.taken_over == 2
    assert bench.platform.decode == 3
    assert not second.report().pinned  # what the first one asked for is nobody's edit


async def test_a_planner_takes_over_although_redis_fails_at_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, wishes = bench.planner()
    wishes.next = [2]
    with monkeypatch.context() as broken:
        broken.setattr(service._pins, "read", AsyncMock(side_effect=RedisError("gone")))
        await bench.tick(service)
    assert not bench.platform.taken_over
    await bench.tick(service)
    assert (bench.platform.taken_over, bench.platform.decode) == (1, 2)


async def test_a_lease_ends_for_its_holder_before_another_one_can_take_it(bench: Bench) -> None:
    one, other = (LeaderLease(bench.client, bench.cluster, SEAL, name) for name in ("one", "other"))
    assert await one.renew()
    assert not await other.renew()
    assert await one.renew()
    assert (one.is_held, other.is_held) == (True, False)
    await one.release()
    assert not one.is_held
    assert await other.renew()
    await one.release()  # of a lease that another one has
    assert await other.renew()


async def test_whoever_can_write_to_redis_keeps_no_planner_waiting(bench: Bench) -> None:
    key, other = lease_key(bench.cluster), Seal(Secret("the secret of others"))
    planner = LeaderLease(bench.client, bench.cluster, SEAL, "one")
    for forged in (b"evil", other.close(key, b"evil"), SEAL.close("elsewhere", b"evil")):
        await bench.client.set(key, forged)
        assert await planner.renew(), forged
        await planner.release()
    await bench.client.hset(key, "a", "b")
    assert await planner.renew()


async def test_a_lease_that_was_written_back_ends_all_the_same(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (LeaderLease(bench.client, bench.cluster, SEAL, name) for name in ("one", "other"))
    assert await one.renew()
    await bench.client.persist(lease_key(bench.cluster))
    assert not await other.renew()
    later = time.time_ns() + int(60e9)
    monkeypatch.setattr(time, "time_ns", lambda: later)
    assert await other.renew()


async def test_whoever_can_write_to_redis_sets_no_number_of_workers(bench: Bench) -> None:
    service, wishes = bench.planner()
    key, other = pin_key(bench.cluster, "decode"), Seal(Secret("the secret of others"))
    await bench.pin(4)
    earlier = await bench.client.get(key)
    await bench.pin(3)
    await bench.tick(service)
    elsewhere = SEAL.close(pin_key(bench.cluster, "prefill"), b"1")
    for forged in (b"1", b"released", other.close(key, b"1"), elsewhere, earlier):
        await bench.client.set(key, forged)
        await bench.tick(service)
        assert (bench.platform.decode, dict(service.report().pinned)) == (3, {"decode": 3}), forged
        assert await bench.client.get(key) != forged
    # The numbers that planners have asked for are no others' either: these would pass for a person's edit.
    await bench.pin(None)
    wishes.next = [2]
    await bench.tick(service)
    for role in ("decode", "prefill"):
        await bench.client.set(asked_key(bench.cluster, "numbers", role), b"9")
        await bench.client.set(asked_key(bench.cluster, "grown", role), b"1", px=3_600_000)
    await service._lease.release()
    successor, reports = bench.planner("two")
    await bench.tick(successor)
    bench.now += HANDOVER_SECONDS
    await bench.tick(successor)
    assert (bench.platform.decode, dict(successor.report().pinned)) == (2, {})
    assert reports.reports[-1].roles["decode"].grown_seconds is None


async def test_a_gateway_whose_clock_is_behind_sets_a_number_after_another_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, _ = bench.planner()
    await bench.pin(3)
    await bench.tick(service)
    behind = time.time_ns() - int(20e9)
    with monkeypatch.context() as clock:
        clock.setattr(time, "time_ns", lambda: behind)
        await bench.pin(2)
    await bench.tick(service)
    assert dict(service.report().pinned) == {"decode": 2}


async def test_a_persons_number_stays_until_it_is_released(bench: Bench) -> None:
    service, wishes = bench.planner()
    await bench.tick(service)
    await bench.pin(3)
    wishes.next = [1, 1]
    await bench.tick(service)
    await bench.client.delete(pin_key(bench.cluster, "decode"))
    await bench.tick(service)
    assert bench.platform.decode == 3
    assert dict(service.report().pinned) == {"decode": 3}
    await bench.pin(None)
    await bench.tick(service)
    assert bench.platform.decode == 1
    assert not service.report().pinned


async def test_an_edit_at_the_platform_is_a_persons_number_too(bench: Bench) -> None:
    service, wishes = bench.planner()
    wishes.next = [2]
    await bench.tick(service)
    bench.platform.decode = 4
    wishes.next = [1]
    await bench.tick(service)
    await bench.tick(service)
    assert (bench.platform.decode, dict(service.report().pinned)) == (4, {"decode": 4})


async def test_the_newest_of_a_persons_numbers_counts_wherever_it_was_set(bench: Bench) -> None:
    service, _ = bench.planner()
    await bench.pin(3)
    await bench.tick(service)
    bench.platform.decode = 4
    await bench.tick(service)
    await bench.tick(service)
    assert (bench.platform.decode, dict(service.report().pinned)) == (4, {"decode": 4})
    bench.platform.decode = 2
    await bench.pin(1)
    await bench.tick(service)
    assert (bench.platform.decode, dict(service.report().pinned)) == (1, {"decode": 1})


async def test_a_worker_that_the_platform_gave_up_is_nobodys_edit(bench: Bench) -> None:
    service, wishes = bench.planner()
    wishes.next = [3]
    await bench.tick(service)
    bench.platform.decode, bench.platform.given_up = 2, 1
    await bench.tick(service)
    assert not service.report().pinned
    bench.platform.decode = 1
    await bench.tick(service)
    assert dict(service.report().pinned) == {"decode": 1}


async def test_half_of_a_decision_is_nobodys_edit(bench: Bench) -> None:
    bench.platform.decode = 4
    service, wishes = bench.planner()
    real, scale = wishes.decide, bench.platform.scale

    def drain_two(report: Report) -> Decision:
        wishes.decide = real  # type: ignore[method-assign]
        actions = tuple(Drain("decode", count, "", "a wish") for count in (3, 2))
        return replace(real(report), actions=actions)

    async def scale_once(role: Role, wanted: int, victims: Sequence[str] = ()) -> None:
        if wanted == 2:
            raise TimeoutError
        await scale(role, wanted, victims)

    wishes.decide = drain_two  # type: ignore[method-assign]
    bench.platform.scale = scale_once  # type: ignore[method-assign]
    await bench.tick(service)
    assert (bench.platform.decode, dict(service.metrics.failures)) == (3, {"platform": 1})
    await bench.tick(service)
    assert not service.report().pinned


async def test_the_next_planner_knows_when_the_fleet_was_changed(bench: Bench) -> None:
    (first, wishes), (second, others) = bench.planner("first"), bench.planner("second")
    wishes.next = [3]
    await bench.tick(first, second)
    await first._lease.release()
    await bench.tick(second)
    seen = others.reports[-1].roles["decode"]
    assert seen.grown_seconds is not None
    assert seen.grown_seconds < 10
    assert seen.shrunk_seconds is None


async def test_a_fleet_that_changed_since_its_report_is_left_alone(bench: Bench) -> None:
    service, wishes = bench.planner()
    await bench.tick(service)
    real = wishes.decide

    def decide(report: Report) -> Decision:
        wishes.decide = real  # type: ignore[method-assign]
        bench.platform.decode = 2
        return replace(real(report), actions=(Add("decode", 4, "a wish"),))

    wishes.decide = decide  # type: ignore[method-assign]
    await bench.tick(service)
    assert bench.platform.calls == []


async def test_a_platform_or_a_redis_that_does_not_answer_holds_the_fleet(bench: Bench) -> None:
    service, wishes = bench.planner()
    wishes.next = [2, 3]
    bench.platform.fails = True
    await bench.tick(service)
    assert service.metrics.failures["platform"] == 1
    bench.platform.fails = False
    async with contextlib.aclosing(connect("redis://127.0.0.1:1/0")) as away:
        service._client = away
        await bench.tick(service)
    assert service.metrics.failures["redis"] == 1
    assert (wishes.reports, bench.platform.calls) == ([], [])
    service._client = bench.client
    await bench.tick(service)
    assert bench.platform.decode == 2


async def test_a_fleet_stays_as_it_is_while_a_worker_sleeps(bench: Bench) -> None:
    service, wishes = bench.planner()
    sleeper = Member("decode-0", "decode", 1, "", "", state="sleeping")
    await write_member(bench.client, bench.cluster, sleeper, UNSIGNED)
    wishes.next = [0]
    await bench.tick(service)
    assert not bench.platform.calls
    await write_member(bench.client, bench.cluster, replace(sleeper, state="ready"), UNSIGNED)
    await bench.tick(service)
    assert bench.platform.decode == 0


async def test_a_sleeping_worker_of_another_model_holds_nothing(bench: Bench) -> None:
    service, wishes = bench.planner()
    gateway = Member("gateway", "gateway", 1, "", "", model="own")
    sleeper = Member("decode-0", "decode", 1, "", "", state="sleeping", model="another")
    for member in (gateway, sleeper):
        await write_member(bench.client, bench.cluster, member, UNSIGNED)
    wishes.next = [0]
    await bench.tick(service)
    assert bench.platform.decode == 0
    await write_member(bench.client, bench.cluster, replace(sleeper, model="own"), UNSIGNED)
    wishes.next = [3]
    await bench.tick(service)
    assert bench.platform.decode == 0


async def test_a_request_that_waits_without_any_worker_is_answered_at_the_next_look(bench: Bench) -> None:
    bench.platform.decode = 0
    service, wishes = bench.planner()
    await bench.tick(service)
    traffic = TrafficReport(seconds=5, classes=[ClassTraffic(name="default", waiting=1)])
    gateway = Member("gateway", "gateway", 1, "", "", traffic=traffic)
    registrar = Registrar(
        "unix://" + bench.client.connection_pool.connection_kwargs["path"], bench.cluster, lambda: gateway, UNSIGNED
    )
    await registrar.start()
    try:
        while not service._builder.waits_without_worker():
            await service._look(bench.now)
        wishes.next = [1]
        await service.tick()  # the clock has not moved, so no decision is due yet
    finally:
        await registrar.stop()
    assert bench.platform.decode == 1
    assert wishes.reports[-1].traffic["default"].waiting == 1


def test_a_class_has_the_times_and_the_share_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "classes.toml").write_text("[interactive]\nttft_seconds = 1.0\npercentile = 0.9\n")
    config = PlannerConfig(classes_file=str(tmp_path / "classes.toml"), itl_seconds=0.2)
    objectives = config.objectives(class_latencies(read_classes(config.classes_file), config.objective_share))
    assert objectives.latency("interactive") == Latency(1.0, None, 0.9)
    assert objectives.latency("another") == objectives.latency("default") == Latency(2.0, 0.2, 0.95)
    assert objectives.latency("background") == Latency(None, None, 0.95)


def records(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


async def test_a_record_replays_to_the_same_decisions(bench: Bench, tmp_path: Path) -> None:
    planner = Planner(OBJECTIVES)
    record = RecordFile(tmp_path / "record", 2000, planner)
    facts = planner, bench.platform, bench.client, bench.cluster, UNSIGNED, SEAL, "one"
    service = PlannerService(*facts, record=record, clock=lambda: bench.now)
    for _ in range(6):
        await bench.tick(service)
    record.close()
    files = records(tmp_path)
    assert len(files) > 1  # it was rotated, and each file replays on its own
    replayed = [each for file in files for each in replay_file(file)]
    assert replayed
    assert all(each.same for each in replayed)
    (tmp_path / "nonsense").write_text("not a record\n")
    with pytest.raises(ConfigError, match="no record of a planner: line 1"):
        list(replay_file(tmp_path / "nonsense"))

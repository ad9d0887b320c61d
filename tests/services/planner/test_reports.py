"""What the planner reads: counts since the last report, ages, lost members, and measured times of starts and drains."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from paceline.core.planner.distribution import Distribution
from paceline.core.planner.reports import Report
from paceline.proto.fleet_pb2 import ClassTraffic, HostReport, LoadReport, StepLoad, TrafficReport, WorkReport
from paceline.services.common.registry import Member
from paceline.services.common.wire import distribution_to_pb
from paceline.services.planner.reports import LOST_SECONDS, ReportBuilder, Seen, revision_of
from paceline.services.platforms.platform import Ability, PlatformRole, PlatformState

ONE_EACH = PlatformState({"prefill": PlatformRole(1, 1), "decode": PlatformRole(1, 1)})


def gateway(seconds: float, name: str = "g", **counts: Any) -> Member:
    classes = [ClassTraffic(name="default", **counts)]
    return Member(name, "gateway", 1, "", "", traffic=TrafficReport(seconds=seconds, classes=classes))


def worker(name: str = "decode-0", **facts: Any) -> Member:
    given: dict[str, Any] = {"work": WorkReport(startup_seconds=7.0), "max_seqs": 8}
    given |= {"role": name.partition("-")[0], "epoch": 1} | facts
    return Member(name, address="", host_id="host", **given)


def report(
    builder: ReportBuilder, now: float, *members: Member, age: float = 0.5, abilities: Collection[Ability] = ()
) -> Report:
    builder.observe(now, [Seen(member, age) for member in members])
    return builder.report(now, ONE_EACH, {}, abilities)


def test_counts_are_those_since_the_report_before() -> None:
    builder = ReportBuilder()
    report(builder, 100, gateway(50, arrivals=10, ttft=distribution_to_pb(Distribution.of([1.0]))))
    later = gateway(55, arrivals=17, waiting=2, ttft=distribution_to_pb(Distribution.of([1.0, 3.0])))
    traffic = report(builder, 105, later).traffic["default"]
    assert (traffic.seconds, traffic.arrivals, traffic.waiting) == (5, 7, 2)
    assert traffic.ttft.count == 1
    assert 2.8 < traffic.ttft.percentile(0.5) < 3.2


def test_a_gateway_that_restarts_or_joins_counts_from_its_start() -> None:
    builder = ReportBuilder()
    report(builder, 100, gateway(500, arrivals=1000))
    restarted = replace(gateway(2, arrivals=3), epoch=2)
    assert report(builder, 105, restarted, gateway(1, "new", arrivals=4)).traffic["default"].arrivals == 7


def test_a_gateway_that_was_there_before_the_planner_counts_from_its_second_report() -> None:
    assert report(ReportBuilder(), 100, gateway(500, arrivals=1000)).traffic["default"].arrivals == 0


def test_lost_gateways_make_the_traffic_old_until_they_are_forgotten() -> None:
    builder = ReportBuilder()
    report(builder, 100, gateway(50))
    lost = report(builder, 110)
    assert (lost.gateways_lost, lost.traffic_age) == (1, 10)
    assert report(builder, 100 + LOST_SECONDS, gateway(3, "other")).gateways_lost == 0


def test_a_worker_that_vanishes_is_reported_with_its_age_until_the_platform_has_no_more_than_the_others() -> None:
    builder = ReportBuilder()
    two = PlatformState({"decode": PlatformRole(2, 2)})
    builder.observe(100, [Seen(worker("decode-0"), 1), Seen(worker("decode-1"), 1)])
    builder.observe(105, [Seen(worker("decode-0"), 1)])
    assert [(each.worker, each.age) for each in builder.report(105, two, {}, ()).workers] == [
        ("decode-0", 1),
        ("decode-1", 6),
    ]
    one = PlatformState({"decode": PlatformRole(2, 1)})
    assert [each.worker for each in builder.report(106, one, {}, ()).workers] == ["decode-0"]
    builder.observe(107, [])
    none = builder.report(107, PlatformState({"decode": PlatformRole(0, 0)}), {}, ())
    assert (none.workers, none.roles["decode"].drain_seconds) == ((), 5)


def test_a_worker_that_drained_is_gone_at_once_and_its_time_is_remembered() -> None:
    builder = ReportBuilder()
    builder.observe(100, [Seen(worker(), 0)])
    builder.observe(101, [Seen(worker(state="draining"), 0)])
    builder.observe(113, [Seen(worker(state="draining"), 0)])
    builder.observe(114, [])
    found = builder.report(114, ONE_EACH, {"decode": 3}, ())
    assert found.workers == ()
    assert (found.roles["decode"].drain_seconds, found.roles["decode"].startup_seconds) == (12, 7)
    assert (found.roles["decode"].pinned, found.roles["prefill"].pinned) == (3, None)


def test_the_time_of_a_flip_is_remembered_for_the_role_that_the_worker_left() -> None:
    builder = ReportBuilder()
    builder.observe(100, [Seen(worker(), 0)])
    builder.observe(101, [Seen(worker(state="draining"), 0)])
    builder.observe(109, [Seen(worker(role="prefill", epoch=2), 0)])
    roles = builder.report(109, ONE_EACH, {}, ("flip",)).roles
    assert (roles["decode"].flip_seconds, roles["prefill"].flip_seconds) == (8, 5)


def test_steps_are_those_since_the_report_before() -> None:
    def steps(tokens: int, context: int, *seconds: float) -> WorkReport:
        times = distribution_to_pb(Distribution.of(seconds))
        return WorkReport(steps=[StepLoad(load=3, tokens=tokens, context=context, seconds=times)])

    builder = ReportBuilder()
    report(builder, 100, worker(work=steps(8, 100, 0.02)))
    (now,) = report(builder, 105, worker(work=steps(28, 700, 0.02, 0.04, 0.04))).workers
    (found,) = now.steps
    assert (found.tokens, found.context, found.seconds.count) == (10, 300, 2)


def test_workers_of_an_arena_have_the_pressure_of_their_host_and_a_share_of_its_tokens() -> None:
    host = Member("host", "kvtransfer", 1, "", "host", host=HostReport(blocks=10, used_blocks=4, kv_tokens=1000))
    members = worker("decode-0", load=LoadReport(running=2)), worker("decode-1"), host
    first, _ = report(ReportBuilder(), 100, *members, abilities=("flip", "spread")).workers
    assert (first.kv_pressure, first.kv_tokens, first.flips_to, first.loss) == (0.4, 500, ("prefill",), 32)


def test_workers_share_cores_unless_each_has_its_own_or_the_platform_has_more_machines() -> None:
    def shares(builder: ReportBuilder, now: float, *members: Member, abilities: Collection[Ability] = ()) -> bool:
        return report(builder, now, *members, abilities=abilities).roles["decode"].shares_cores

    sharing, own = worker(work=WorkReport(shares_cores=True)), worker(work=WorkReport())
    builder = ReportBuilder()
    assert shares(builder, 100)  # nobody knows yet
    assert shares(builder, 101, replace(own, state="starting"))
    assert not shares(builder, 102, own)
    assert not shares(builder, 103)  # a fleet without workers is remembered
    assert shares(builder, 104, sharing)
    assert not shares(builder, 105, sharing, abilities=("spread",))


def test_the_memory_of_an_arena_is_shared_unless_the_platform_has_more_machines() -> None:
    host = Member("host", "kvtransfer", 1, "", "host", host=HostReport(blocks=10, used_blocks=4, kv_tokens=1000))
    pool = worker("decode-1", work=WorkReport(kv_tokens=70, kv_pressure=0.5))
    starting = worker("decode-2", state="starting")
    found = report(ReportBuilder(), 100, worker(), pool, starting, host).workers
    assert [(each.kv_pressure, each.kv_tokens, each.shares_memory) for each in found] == [
        (0.4, 0, True),
        (0.5, 70, False),
        (0.0, 0, True),
    ]
    found = report(ReportBuilder(), 100, worker(), starting, host, abilities=("spread",)).workers
    assert [(each.kv_pressure, each.kv_tokens) for each in found] == [(0.4, 1000), (0.0, 0)]


def test_requests_that_wait_for_the_first_worker_are_noticed() -> None:
    builder = ReportBuilder()
    builder.observe(100, [Seen(gateway(5, waiting=1), 0)])
    assert builder.waits_without_worker()
    builder.observe(101, [Seen(gateway(6, waiting=1), 0), Seen(worker(state="starting"), 0)])
    assert not builder.waits_without_worker()


def test_the_revision_changes_with_targets_and_pins() -> None:
    names = {
        revision_of(ONE_EACH, {}),
        revision_of(PlatformState({"prefill": PlatformRole(1, 1), "decode": PlatformRole(2, 1)}), {}),
        revision_of(ONE_EACH, {"decode": 1}),
    }
    assert len(names) == 3
    assert revision_of(ONE_EACH, {}) == revision_of(replace(ONE_EACH, problems={"decode": "no device"}), {})


def test_the_first_role_is_that_of_the_fleet() -> None:
    """Requests wait for decode workers, for pool workers of an encoder, and for prefill workers of a model that only
    pools."""
    builder = ReportBuilder()
    for roles, first in (
        (("prefill", "decode", "encode"), "decode"),
        (("pool",), "pool"),
        (("prefill", "encode"), "prefill"),
    ):
        state = PlatformState({role: PlatformRole(1, 1) for role in roles})  # type: ignore[misc]
        assert builder.report(100, state, {}, ()).first_role == first


def test_requests_of_an_encoder_wait_for_pool_workers() -> None:
    builder = ReportBuilder()
    builder.observe(100, [Seen(gateway(5, waiting=1), 0.5)])
    assert builder.waits_without_worker()
    builder.observe(101, [Seen(gateway(5, waiting=1), 0.5), Seen(worker("pool-0", state="starting"), 0.5)])
    assert not builder.waits_without_worker()

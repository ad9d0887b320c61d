from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from paceline.proto.fleet_pb2 import AdapterReport, LoadReport
from paceline.services.common.registry import Member
from paceline.services.gateway.routing.candidates import Candidate, Need, Placement
from paceline.services.gateway.routing.router import place, place_computing, place_in_turn

NEED = Need(context_tokens=100)
LOCAL_TOKENS = 64
LOAD = set(LoadReport.DESCRIPTOR.fields_by_name)


def member(worker_id: str, role: str = "decode", **fields: object) -> Member:
    base = Member(worker_id, role, 1, "127.0.0.1:1", "host", layout="m", max_model_len=1000, max_seqs=8)  # type: ignore[arg-type]
    load = LoadReport(**{name: fields.pop(name) for name in LOAD & fields.keys()})  # type: ignore[arg-type]
    return dataclasses.replace(base, load=load, **fields)  # type: ignore[arg-type]


def placed(need: Need, *candidates: Member | Candidate) -> tuple[str, str | None] | None:
    found = place(need, [c if isinstance(c, Candidate) else Candidate(c) for c in candidates])
    return found and (found.decode.worker_id, found.prefill and found.prefill.worker_id)


def test_without_a_decode_worker_there_is_no_place() -> None:
    assert placed(NEED, member("p", "prefill"), member("k", "kvtransfer")) is None


def test_a_decode_worker_alone_computes_the_prompt_itself() -> None:
    assert placed(NEED, member("d")) == ("d", None)


def test_the_least_loaded_of_each_role_is_taken() -> None:
    workers = (
        member("d1", running=2),
        member("d2", running=1),
        member("p1", "prefill", waiting=3),
        member("p2", "prefill"),
    )
    assert placed(NEED, *workers) == ("d2", "p2")


def test_load_is_relative_to_size() -> None:
    assert placed(NEED, member("big", running=4, max_seqs=64), member("small", running=1, max_seqs=4)) == ("big", None)


def test_own_calls_count_between_heartbeats() -> None:
    burst = Candidate(member("a"), in_flight=2, unreported=2)
    assert placed(NEED, burst, Candidate(member("b", running=1))) == ("b", None)


def test_own_calls_count_once() -> None:
    ours, others = Candidate(member("a", running=4), in_flight=4), Candidate(member("b", running=6))
    assert placed(NEED, others, ours) == ("a", None)


def test_a_prefill_worker_on_the_host_is_preferred_to_others() -> None:
    near, far = member("p1", "prefill", running=7), member("p2", "prefill", host_id="other")
    assert placed(NEED, member("d"), near, far) == ("d", "p1")
    assert placed(NEED, member("d"), far) == ("d", "p2")
    assert placed(NEED, member("d"), Candidate(near, in_flight=8), far) == ("d", "p2")
    assert placed(Need(100, refused=frozenset({"p1"})), member("d"), near, far) == ("d", "p2")


def test_a_home_is_taken_if_it_is_little_worse_than_the_best() -> None:
    need = Need(2000, prompt_tokens=1000, home="h1")

    def host(name: str, queued: int) -> list[Member]:
        fields = {"host_id": name, "max_model_len": 4000, "prefill_tokens_per_second": 1000.0}
        return [member(f"d-{name}", **fields), member(f"p-{name}", "prefill", queued_tokens=queued, **fields)]

    assert placed(need, *host("h1", 200), *host("h2", 0)) == ("d-h1", "p-h1")
    assert placed(need, *host("h1", 300), *host("h2", 0)) == ("d-h2", "p-h2")
    assert placed(need, *host("h2", 0)) == ("d-h2", "p-h2")
    # A home without a decode worker computes the prompt for one elsewhere, and its troubles weigh more than home.
    assert placed(need, *host("h1", 100)[1:], *host("h2", 0)) == ("d-h2", "p-h1")
    failed = dataclasses.replace(need, failed=frozenset({"p-h1"}))
    assert placed(failed, *host("h1", 0), *host("h2", 0)) == ("d-h2", "p-h2")


def test_nothing_is_moved_over_a_cut_link() -> None:
    need = Need(100, cut=frozenset({("other", "host")}))
    far = member("p", "prefill", host_id="other")
    assert placed(need, member("d"), far) == ("d", None)
    assert placed(need, member("d"), far, member("p2", "prefill", host_id="third")) == ("d", "p2")
    assert placed(need, member("d1"), far, member("d2", host_id="other", running=5)) == ("d2", "p")


def test_a_prefill_worker_must_share_the_layout() -> None:
    assert placed(NEED, member("d"), member("p", "prefill", layout="other")) == ("d", None)


def test_draining_and_short_workers_get_nothing() -> None:
    assert placed(NEED, member("d", state="draining")) is None
    assert placed(NEED, member("d", max_model_len=99)) is None
    assert placed(NEED, member("d"), member("p", "prefill", max_model_len=99)) == ("d", None)


def test_who_refused_is_not_asked_again() -> None:
    need = Need(100, refused=frozenset({"d1", "p1"}))
    prefills = (member("p1", "prefill"), member("p2", "prefill", running=9))
    assert placed(need, member("d1"), member("d2", running=9), *prefills) == ("d2", "p2")


def test_full_prefill_workers_are_waited_for() -> None:
    full = Candidate(member("p", "prefill", max_seqs=3), in_flight=3)
    assert placed(NEED, member("d"), full) is None
    assert placed(Need(100, refused=frozenset({"p"})), member("d"), member("p", "prefill")) is None
    assert placed(NEED, member("d"), full, member("p2", "prefill", running=9)) == ("d", "p2")


def test_a_decode_worker_that_prefill_workers_can_reach_is_preferred() -> None:
    apart = member("d1", layout="other")
    assert placed(NEED, apart, member("d2", running=5), member("p", "prefill")) == ("d2", "p")
    full = Candidate(member("p", "prefill", max_seqs=3), in_flight=3)
    assert placed(NEED, apart, member("d2", running=5), full) == ("d1", None)


def test_who_failed_is_taken_only_where_there_is_no_other() -> None:
    need = Need(100, failed=frozenset({"d1"}))
    assert placed(need, member("d1"), member("d2", running=9)) == ("d2", None)
    assert placed(need, member("d1")) == ("d1", None)


# ---- the costs of a placement


def two_hosts(**fields: object) -> list[Member]:
    """Return a prefill and a decode worker on each of h1 and h2. `fields` are set on p1."""
    return [
        member("d1", host_id="h1"),
        member("p1", "prefill", host_id="h1", **fields),
        member("d2", host_id="h2"),
        member("p2", "prefill", host_id="h2"),
    ]


def prompt(tokens: int, **cached: int) -> Need:
    return Need(context_tokens=100, prompt_tokens=tokens, cached=cached, local_tokens=LOCAL_TOKENS)


def test_the_host_with_the_longest_prefix_is_taken() -> None:
    assert placed(prompt(2000, h1=512, h2=1024), *two_hosts()) == ("d2", "p2")
    assert placed(prompt(2000, h1=1024, h2=512), *two_hosts()) == ("d1", "p1")


def slow(candidate: Member) -> Candidate:
    """Return a worker whose host fetches blocks at 1000 tokens per second, which is about as fast as computing them."""
    return Candidate(candidate, fetch_tokens_per_second=1000)


def test_a_prefix_is_not_worth_a_longer_queue() -> None:
    d1, p1, d2, p2 = two_hosts(queued_tokens=600)
    assert placed(prompt(2000, h1=512), d1, p1, slow(d2), slow(p2)) == ("d2", "p2")
    assert placed(prompt(2000, h1=1024), d1, p1, slow(d2), slow(p2)) == ("d1", "p1")


def test_a_prefix_is_brought_where_its_host_is_busy() -> None:
    fleet = [Candidate(m) for m in two_hosts(queued_tokens=600)]
    found = place(prompt(2000, h1=1024, h2=16), fleet)
    assert found is not None
    assert found.prefill is not None
    assert (found.decode.worker_id, found.prefill.worker_id) == ("d2", "p2")
    assert (found.source, found.cached_tokens) == ("h1", 1024)
    # No prefix is fetched over a cut link, or if the fetch takes longer than it saves.
    for need in (
        dataclasses.replace(prompt(2000, h1=1600), cut=frozenset({("h1", "h2")})),
        prompt(2000, h1=512, h2=504),
    ):
        found = place(need, fleet)
        assert found is not None
        assert found.source == ""


def test_a_prefix_is_brought_from_a_host_without_workers() -> None:
    found = place(prompt(2000, gone=1600, other=1024), [Candidate(m) for m in two_hosts()])
    assert found is not None
    assert (found.source, found.cached_tokens) == ("gone", 1600)
    # Blocks of another layout cannot be used.
    need = dataclasses.replace(prompt(2000, gone=1600, other=1024), layouts={"gone": "another", "other": "m"})
    found = place(need, [Candidate(m) for m in two_hosts()])
    assert found is not None
    assert (found.source, found.cached_tokens) == ("other", 1024)
    alone = place(prompt(2000, gone=1600), [Candidate(member("d"))])
    assert alone is not None
    assert (alone.prefill, alone.source, alone.cached_tokens) == (None, "gone", 1600)


def test_a_full_decode_worker_is_spared_unless_moving_takes_longer() -> None:
    d1, p1, d2, p2 = two_hosts()
    full = dataclasses.replace(d1, load=LoadReport(running=8))
    assert placed(prompt(2000, h1=1600), full, p1, d2, p2) == ("d2", "p1")
    assert placed(prompt(2000, h1=1600), full, p1, slow(d2), slow(p2)) == ("d1", "p1")
    assert placed(prompt(2000, h1=512), full, p1, slow(d2), slow(p2)) == ("d2", "p2")


def test_own_calls_queue_before_they_are_reported() -> None:
    d1, p1, d2, p2 = two_hosts()
    busy = Candidate(p1, in_flight=1, unreported=1, unreported_tokens=600)
    assert placed(prompt(2000, h1=512), d1, busy, slow(d2), slow(p2)) == ("d2", "p2")


def test_misses_do_not_all_go_to_one_worker() -> None:
    """Requests arrive one after another, so no worker has a queue. p1 is a little faster than p2."""
    d1, p1, d2, p2 = two_hosts(prefill_tokens_per_second=1030)
    recent, taken = {"p1": 0.0, "p2": 0.0}, []
    for _ in range(20):
        snapshot = [Candidate(d1), Candidate(d2)]
        snapshot += [Candidate(p, recent_tokens=recent[p.worker_id]) for p in (p1, p2)]
        found = place(prompt(2000), snapshot)
        assert found is not None
        assert found.prefill is not None
        taken.append(found.prefill.worker_id)
        recent[taken[-1]] += 2000
    assert 8 <= taken.count("p2") <= 12


def test_a_faster_worker_is_preferred() -> None:
    assert placed(prompt(2000), *two_hosts(prefill_tokens_per_second=500)) == ("d1", "p1")  # p2 counts as equally slow
    d1, p1, d2, p2 = two_hosts(prefill_tokens_per_second=500)
    faster = dataclasses.replace(p2, load=LoadReport(prefill_tokens_per_second=1000))
    assert placed(prompt(2000), d1, p1, d2, faster) == ("d2", "p2")


def test_a_queue_is_worth_moving_the_blocks() -> None:
    near, far = member("p1", "prefill", queued_tokens=4000), member("p2", "prefill", host_id="other")
    assert placed(prompt(2000), member("d"), near, far) == ("d", "p2")
    slow_link = Candidate(member("d"), fetch_tokens_per_second=200)
    assert placed(prompt(2000), slow_link, near, far) == ("d", "p1")


def test_of_a_far_prefix_all_has_to_be_moved() -> None:
    d, p = member("d", host_id="h1"), member("p", "prefill", host_id="h1")
    far = member("q", "prefill", host_id="h2")
    assert placed(prompt(2000, h2=1984), d, p, far) == ("d", "q")
    assert placed(prompt(2000, h2=1984), Candidate(d, fetch_tokens_per_second=500), p, far) == ("d", "p")


def test_the_little_behind_a_prefix_is_computed_where_it_is() -> None:
    far = member("p", "prefill", host_id="other")
    assert placed(prompt(1000, host=960), member("d"), far) == ("d", None)
    assert placed(prompt(1000, host=960), member("d"), member("p", "prefill", max_seqs=0)) == ("d", None)
    # A prefill worker on the same host does not slow down other requests' decoding, but it costs a handoff.
    assert placed(prompt(1000, host=960), member("d"), member("p", "prefill")) == ("d", None)
    assert placed(prompt(1000, host=960), member("d", running=2), member("p", "prefill")) == ("d", "p")
    busy = member("p", "prefill", queued_tokens=500)
    assert placed(prompt(1000, host=960), member("d"), busy) == ("d", None)


def test_no_long_prompt_is_computed_beside_others_tokens() -> None:
    full = Candidate(member("p", "prefill", max_seqs=3), in_flight=3)
    assert placed(prompt(1000, host=960 - LOCAL_TOKENS), member("d"), full) is None
    assert placed(prompt(LOCAL_TOKENS + 1), member("d"), full) is None
    # Many short prompts count together.
    queue = member("d", queued_tokens=LOCAL_TOKENS - 39)
    assert placed(prompt(1000, host=960), queue, full) is None
    # If many requests that decode would wait for the prompt, a prefill worker on another host is better.
    crowd = member("d", running=60, max_seqs=64)
    assert placed(prompt(1000, host=960), crowd, member("p", "prefill", host_id="other")) == ("d", "p")


def test_a_short_prompt_goes_to_whoever_has_its_first_tokens_sooner() -> None:
    p = member("p", "prefill")
    assert placed(prompt(LOCAL_TOKENS), member("d"), p) == ("d", None)
    assert placed(prompt(LOCAL_TOKENS), member("d", running=1), p) == ("d", "p")
    assert placed(prompt(LOCAL_TOKENS // 4), member("d", running=1), p) == ("d", None)
    assert placed(prompt(LOCAL_TOKENS // 4), member("d", running=6), p) == ("d", "p")
    busy = member("p", "prefill", queued_tokens=400)
    assert placed(prompt(LOCAL_TOKENS), member("d", running=3), busy) == ("d", None)
    assert placed(dataclasses.replace(prompt(16), local_tokens=0), member("d"), busy) == ("d", "p")
    assert place_in_turn(prompt(16), [Candidate(member("d")), Candidate(p)], 0) == Placement(member("d"), p)


def test_a_placement_says_what_it_counts_on() -> None:
    local = place(prompt(1000, host=960), [Candidate(member("d")), Candidate(member("p", "prefill", host_id="other"))])
    assert local is not None
    assert (local.cached_tokens, local.least_cached_tokens) == (960, 1000 - LOCAL_TOKENS)
    alone = place(prompt(1000, host=960), [Candidate(member("d"))])
    assert alone is not None
    assert (alone.cached_tokens, alone.least_cached_tokens) == (960, 0)  # no other worker could compute the rest


def test_in_turn_nothing_is_weighed() -> None:
    fleet = [Candidate(m) for m in two_hosts(queued_tokens=10_000)]
    found = [place_in_turn(prompt(2000, h1=1984), fleet, turn) for turn in range(4)]
    names = [(f.decode.worker_id, f.prefill.worker_id) for f in found if f is not None and f.prefill is not None]
    assert names == [("d1", "p1"), ("d2", "p2")] * 2


def test_in_turn_who_cannot_is_left_out() -> None:
    fleet = [Candidate(m) for m in two_hosts()]

    def taken(need: Need) -> set[tuple[str, str]]:
        found = [place_in_turn(need, fleet, turn) for turn in range(4)]
        return {(f.decode.worker_id, f.prefill.worker_id) for f in found if f is not None and f.prefill is not None}

    assert taken(dataclasses.replace(prompt(2000), refused=frozenset({"d1"}))) == {("d2", "p2")}
    assert taken(dataclasses.replace(prompt(2000), failed=frozenset({"p1"}))) == {("d1", "p2"), ("d2", "p2")}
    assert place_in_turn(prompt(2000), [*fleet[:1], Candidate(member("p", "prefill", max_seqs=0))], 0) is None
    assert place_in_turn(prompt(2000), [], 0) is None


members = st.builds(
    member,
    st.text("abcdef", min_size=1, max_size=3),
    st.sampled_from(["decode", "prefill", "kvtransfer"]),
    host_id=st.sampled_from(["h1", "h2"]),
    layout=st.sampled_from(["m", "other"]),
    state=st.sampled_from(["ready", "draining"]),
    running=st.integers(0, 9),
    waiting=st.integers(0, 9),
    max_seqs=st.integers(0, 9),
    max_model_len=st.sampled_from([0, 50, 100, 1000]),
)
fleets = st.lists(st.builds(Candidate, members, st.integers(0, 5)), max_size=12, unique_by=lambda c: c.member.worker_id)
needs = st.builds(
    Need,
    st.just(100),
    prompt_tokens=st.integers(1, 2000),
    cached=st.dictionaries(st.sampled_from(["h1", "h2", "h3"]), st.integers(0, 1999)),
    failed=st.frozensets(st.sampled_from("abc")),
    refused=st.frozensets(st.sampled_from("def")),
    local_tokens=st.just(LOCAL_TOKENS),
)


@given(needs, fleets, st.integers(0, 9))
def test_whatever_it_costs_full_prefill_workers_are_waited_for(need: Need, fleet: list[Candidate], turn: int) -> None:
    need = dataclasses.replace(need, cached={h: min(t, need.prompt_tokens - 1) for h, t in need.cached.items()})
    by_name = {candidate.member.worker_id: candidate for candidate in fleet}
    for found in (place(need, fleet), place_in_turn(need, fleet, turn)):
        if found is None:
            continue
        assert {found.decode.worker_id, found.prefill and found.prefill.worker_id}.isdisjoint(need.refused)
        if found.prefill is not None:
            assert by_name[found.prefill.worker_id].has_room
            assert found.prefill.layout == found.decode.layout
        elif any(
            (c.member.role, c.member.state, c.member.layout) == ("prefill", "ready", found.decode.layout)
            and c.member.max_model_len >= 100
            for c in fleet
        ):
            left = need.prompt_tokens - need.cached.get(found.decode.host_id, 0)
            assert left <= LOCAL_TOKENS
            assert found.least_cached_tokens >= need.prompt_tokens - LOCAL_TOKENS


links = st.frozensets(st.sampled_from([("h1", "h2"), ("h2", "h1")]))


@given(fleets, links, st.randoms())
def test_a_placement_is_allowed_and_does_not_depend_on_the_order(
    fleet: list[Candidate], cut: frozenset[tuple[str, str]], random: object
) -> None:
    need = Need(100, cut=cut)
    placement = place(need, fleet)
    shuffled = list(fleet)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert place(need, shuffled) == placement
    can_decode = [
        c for c in fleet if (c.member.role, c.member.state) == ("decode", "ready") and c.member.max_model_len >= 100
    ]
    partners = {
        decode.member.worker_id: [
            c
            for c in fleet
            if (c.member.role, c.member.state, c.member.layout) == ("prefill", "ready", decode.member.layout)
            and c.member.max_model_len >= 100
            and (c.member.host_id, decode.member.host_id) not in cut
        ]
        for decode in can_decode
    }
    open_ones = {name: [c for c in found if c.in_flight < c.member.max_seqs] for name, found in partners.items()}
    placeable = [c for c in can_decode if open_ones[c.member.worker_id] or not partners[c.member.worker_id]]
    assert (placement is None) == (not placeable)
    if placement is None:
        return
    decode, prefill = placement.decode, placement.prefill
    equals = [c for c in placeable if bool(partners[c.member.worker_id]) == (prefill is not None)]
    assert decode.worker_id in [c.member.worker_id for c in equals if c.load == min(c.load for c in equals)]
    if prefill is None:
        assert not any(partners[c.member.worker_id] for c in placeable)
    else:
        found = [c.member for c in open_ones[decode.worker_id]]
        assert prefill in found
        if any(near.host_id == decode.host_id for near in found):
            assert prefill.host_id == decode.host_id


def holder(worker: Member, *adapters: int, seconds: float = 0.5) -> Candidate:
    """Return a worker that has these adapters, and that reads a further one in `seconds`."""
    return Candidate(
        dataclasses.replace(worker, lora=AdapterReport(miss_seconds=seconds)), adapters=frozenset(adapters)
    )


def test_workers_that_have_the_adapter_are_preferred() -> None:
    need = dataclasses.replace(NEED, adapter=7)
    fleet = [holder(member(name, role), 8) for name, role in (("d1", "decode"), ("p1", "prefill"))]
    having = [holder(member(name, role), 7, 8) for name, role in (("d2", "decode"), ("p2", "prefill"))]
    assert placed(need, *fleet, *having) == ("d2", "p2")
    assert placed(need, *fleet, having[0]) == ("d2", "p1")
    assert placed(need, *fleet, having[1]) == ("d1", "p2")
    assert placed(dataclasses.replace(need, adapter=8), *having, *fleet) == ("d1", "p1")
    assert placed(NEED, *having, *fleet) == ("d1", "p1")


def test_a_missing_adapter_costs_the_time_to_read_it() -> None:
    need = dataclasses.replace(NEED, adapter=7)
    # A load of half of the requests costs as much as half a second.
    for running, chosen in ((3, "having"), (5, "idle")):
        assert placed(need, holder(member("having", running=running), 7), holder(member("idle"))) == (chosen, None)
    queue = {"role": "prefill", "prefill_tokens_per_second": 1000.0}
    for queued, chosen in ((400, "p1"), (600, "p2")):
        waiting = holder(member("p1", queued_tokens=queued, **queue), 7)
        assert placed(need, member("d"), waiting, holder(member("p2", **queue))) == ("d", chosen)
    # Nobody knows how long it takes before the first one was read.
    assert placed(need, Candidate(member("a")), Candidate(member("b"), adapters=frozenset({7}))) == ("b", None)


def test_a_missing_adapter_is_weighed_against_a_cached_prefix() -> None:
    need = Need(2000, prompt_tokens=1000, cached={"h1": 800}, cut=frozenset({("h1", "h2")}), adapter=7)

    def host(name: str, *adapters: int) -> list[Candidate]:
        fields = {"host_id": name, "max_model_len": 4000, "prefill_tokens_per_second": 1000.0}
        return [holder(member(f"d-{name}", **fields), *adapters, seconds=0.3)]

    assert placed(need, *host("h1"), *host("h2", 7)) == ("d-h1", None)
    less = dataclasses.replace(need, cached={"h1": 200})
    assert placed(less, *host("h1"), *host("h2", 7)) == ("d-h2", None)


def test_work_without_decoding_goes_where_the_adapter_is() -> None:
    need = dataclasses.replace(NEED, adapter=7)
    found = place_computing(need, [holder(member("p1", "prefill")), holder(member("p2", "prefill"), 7)])
    assert found is not None
    assert found.computing.worker_id == "p2"

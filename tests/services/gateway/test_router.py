from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from paceline.services.common.registry import Member
from paceline.services.gateway.router import Candidate, Need, place

NEED = Need(context_tokens=100)


def member(worker_id: str, role: str = "decode", **fields: object) -> Member:
    base = Member(worker_id, role, 1, "127.0.0.1:1", "host", layout="m", max_model_len=1000, max_seqs=8)  # type: ignore[arg-type]
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


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

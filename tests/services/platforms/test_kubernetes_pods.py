"""What is known of pods, which of them end, and which role each gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.services.platforms.kubernetes_pods import (
    CannotChooseError,
    Pod,
    PodBook,
    choose_victims,
    costs,
    is_newer,
    living,
    needed_because,
    new_roles,
    problem_of,
)
from paceline.services.platforms.kubernetes_wish import Wish, read_wish


def pod(name: str = "w-1", version: int = 1, uid: str = "", **status: Any) -> dict[str, Any]:
    """Return a pod as the API server describes it."""
    labels = {"app.kubernetes.io/component": "worker", "paceline/role": "prefill"}
    metadata = {"name": name, "uid": uid or name, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "status": status}


@st.composite
def pods(draw: st.DrawFn) -> list[Pod]:
    """Pods in every state, the oldest first."""
    found = []
    for number in range(draw(st.integers(0, 7))):
        placed = draw(st.booleans())
        started = placed and draw(st.booleans())
        each = Pod(
            name=f"w-{number}",
            uid=str(number),
            version="1",
            role=draw(st.sampled_from(["prefill", "decode"])),
            placed=placed,
            started=started,
            phase="Running" if started else "Pending",
            ready=started and draw(st.booleans()),
            ending=draw(st.sampled_from([False, False, True])),
            cost=draw(st.integers(-2, 1)),
            created=f"{number:03}",
        )
        found.append(each)
    return found


def ended(alive: Sequence[Pod], count: int) -> set[str]:
    """Return the pods that a ReplicaSet ends, by its documented order. It takes any of equal ones; here the first."""

    def order(each: Pod) -> tuple[bool, bool, bool, int]:
        return each.placed, each.phase != "Pending", each.ready, each.cost

    return {each.name for each in sorted(alive, key=order)[:count]}


@given(pods(), st.sampled_from(["prefill", "decode"]), st.integers(0, 4), st.permutations([f"w-{n}" for n in range(7)]))
def test_the_replica_set_ends_the_chosen_pods(found: list[Pod], role: Any, count: int, wished: list[str]) -> None:
    own = [each for each in living(found) if each.role == role]
    count = min(count, len(own))
    try:
        chosen = choose_victims(found, role, count, wished)
    except CannotChooseError:
        return
    new_costs = costs(found, chosen)
    after = [replace(each, cost=new_costs.get(each.name, each.cost)) for each in living(found)]
    assert ended(after, count) == {each.name for each in chosen}
    ready = [wished.index(each.name) for each in chosen if each.ready]
    assert ready == sorted(ready)
    assert not [each for each in own if each not in chosen and not each.ready and ready]


@given(pods(), st.integers(0, 7))
def test_roles_are_given_to_as_few_pods_as_possible(found: list[Pod], prefill: int) -> None:
    alive = living(found)
    prefill = min(prefill, len(alive))
    moves = new_roles(found, prefill, len(alive) - prefill)
    given_roles = {each.name: role for each, role in moves}
    roles = [given_roles.get(each.name, each.role) for each in alive]
    assert roles.count("prefill") == prefill
    assert len(moves) == abs(prefill - sum(each.role == "prefill" for each in alive))
    left = [each for each in alive if moves and each.role != moves[0][1] and each.name not in given_roles]
    assert not any(each.started for each, _ in moves) or all(each.started for each in left)


@given(pods(), st.integers(1, 7))
def test_a_role_of_which_pods_are_wanted_keeps_one_that_is_ready(found: list[Pod], prefill: int) -> None:
    alive = living(found)
    prefill = min(prefill, len(alive))
    moved = [each.name for each, _ in new_roles(found, prefill, len(alive) - prefill)]
    for role, wanted in (("prefill", prefill), ("decode", len(alive) - prefill)):
        ready = [each for each in alive if each.role == role and each.ready]
        assert not wanted or not ready or any(each.name not in moved for each in ready)


def test_a_pod_that_starts_takes_another_role_before_a_ready_one_does() -> None:
    old, young = (Pod(f"w-{n}", str(n), "1", started=True, ready=n == 1, created=str(n)) for n in range(2))
    assert new_roles([old, young], prefill=1, decode=1) == [(old, "prefill")]


def test_the_last_ready_pod_keeps_its_role_while_others_start() -> None:
    one, other = (Pod(f"w-{n}", str(n), "1", ready=n == 0) for n in range(2))
    assert needed_because([one, other], one) == "w-1 is not ready yet"
    assert needed_because([one, other], other) == ""
    assert needed_because([one, replace(other, ready=True)], one) == ""
    assert needed_because([one, replace(other, ending=True)], one) == ""
    assert needed_because([one, replace(other, role="prefill")], one) == ""


def test_a_surge_changes_no_roles() -> None:
    three = [Pod(f"w-{n}", str(n), "1", role="prefill" if n == 0 else "decode") for n in range(3)]
    assert new_roles(three, prefill=1, decode=1) == []


def test_old_news_change_nothing() -> None:
    book = PodBook()
    book.note("ADDED", pod(version=9, phase="Running"))
    book.note("MODIFIED", pod(version=10, phase="Pending"))
    book.note("MODIFIED", pod(version=9, phase="Running"))
    assert [each.phase for each in book.pods("worker")] == ["Pending"]
    book.replace([pod(version=8, phase="Running")])
    assert [each.phase for each in book.pods("worker")] == ["Pending"]
    book.note("DELETED", pod(version=11))
    book.note("MODIFIED", pod(version=12))
    assert book.pods("worker") == []
    book.note("ADDED", pod(version=13, uid="another pod of this name"))
    book.note("DELETED", pod(version=14))
    assert len(book.pods("worker")) == 1


@pytest.mark.parametrize(
    ("one", "other", "newer"), [("10", "9", True), ("9", "10", False), ("9", "9", False), ("a", "1", False)]
)
def test_versions_are_numbers(one: str, other: str, newer: bool) -> None:
    assert is_newer(one, other) is newer


def test_what_keeps_pods_from_running_is_told() -> None:
    stuck = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}
    starting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    found = [Pod.of(pod("w-1", containerStatuses=[starting])), Pod.of(pod("w-2", containerStatuses=[stuck]))]
    assert problem_of(found) == "1 of its pods cannot run: ImagePullBackOff: no such image"
    assert problem_of([replace(each, ending=True) for each in found]) == ""


@pytest.mark.parametrize(
    ("data", "replicas", "wish"),
    [
        (None, 2, Wish(0, 2)),
        ({"prefill": "1", "decode": "2"}, 3, Wish(1, 2)),
        ({"prefill": "1", "decode": "2", "before": "5"}, 5, Wish(1, 2, 5)),  # the second write is missing
        ({"prefill": "1", "decode": "2", "before": "5"}, 4, Wish(1, 3)),  # a person has scaled meanwhile
        ({"prefill": "2", "decode": "2"}, 1, Wish(0, 1)),  # nothing is served without a decode worker
        ({"prefill": "2", "decode": "2"}, 0, Wish(0, 0)),
        ({"prefill": "many", "decode": "2"}, 2, Wish(0, 2)),
    ],
)
def test_the_wish_follows_the_replicas(data: Any, replicas: int, wish: Wish) -> None:
    assert read_wish({"data": data}, replicas) == wish
    kept = {key: value for key, value in wish.to_data().items() if value is not None}
    assert read_wish({"data": kept}, replicas) == wish

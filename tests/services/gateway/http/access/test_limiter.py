"""The limits of keys at one gateway and at several, on a clock that the test moves."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from paceline.services.gateway.http.access.keys import AccessBook
from paceline.services.gateway.http.access.limiter import Gateways, Limiter
from paceline.services.gateway.http.access.limits import Use
from paceline.services.gateway.http.access.meter import Admission
from paceline.services.gateway.http.errors import ApiError, Reason

HEARTBEAT = 1.5
"""Seconds between two reports of a gateway to the others."""


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def book(folder: Path, limits: str) -> AccessBook:
    file = folder / "keys.toml"
    file.touch(0o600)
    file.write_text(f'[alice]\nkey = "alice-key"\n{limits}\n')
    return AccessBook(file=str(file))


def owner(keys: AccessBook) -> str:
    key = keys.find(["alice-key"])
    assert key is not None
    return key.digest.hex()


def alone(
    keys: AccessBook, clock: Clock, count_refusal: Callable[[str, Reason], object] = lambda request_class, reason: None
) -> Limiter:
    return Limiter(keys, lambda: Gateways("a", {}, True), count_refusal, clock)


class Cluster:
    """Gateways with one key, which hear of each other a while later."""

    def __init__(self, keys: AccessBook, count: int) -> None:
        self.clock = Clock()
        self.redis_answers = True
        self._told: Mapping[str, Sequence[Use]] = dict.fromkeys("abcdef"[:count], ())
        self._next_report = 0.0
        self.limiters = {name: self._limiter(keys, name) for name in self._told}
        self.owner = owner(keys)

    def _limiter(self, keys: AccessBook, name: str) -> Limiter:
        return Limiter(
            keys,
            lambda: Gateways(name, self._told, self.redis_answers),
            lambda request_class, reason: None,
            self.clock,
        )

    def advance(self, seconds: float) -> None:
        self.clock.now += seconds
        if self.clock.now >= self._next_report:
            self._next_report += HEARTBEAT
            self._told = {name: limiter.report() for name, limiter in self.limiters.items()}

    def asks(self, name: str, prompt: int = 0, most: int = 0) -> Admission | None:
        """Return the admission of a request at a gateway; None if it is refused."""
        with contextlib.suppress(ApiError):
            admission = self.limiters[name].begin(self.owner)
            admission.charge(prompt, most)
            return admission
        return None


@pytest.mark.parametrize("weights", [(1,), (1, 1), (1, 9), (0, 1), (1, 2, 3)])
@pytest.mark.parametrize("redis_answers", [True, False])
def test_overload_of_several_gateways_keeps_the_limit(
    tmp_path: Path, weights: tuple[int, ...], redis_answers: bool
) -> None:
    cluster, rng = Cluster(book(tmp_path, "requests_per_minute = 600"), len(weights)), random.Random(0)
    cluster.redis_answers = redis_answers
    names = rng.choices("abcdef"[: len(weights)], weights, k=6000)
    minutes = [0, 0]
    for tick, name in enumerate(names + names):
        cluster.advance(0.01)
        minutes[tick // 6000] += cluster.asks(name) is not None
    for minute in minutes:
        # Without news of the others each has an equal part, which the one that is asked less does not use up.
        least = 0.9 * 600 * (1.0 if redis_answers else len([w for w in weights if w]) / len(weights))
        assert least <= minute <= (600 * 1.02 if len(weights) == 1 else 600 * 1.1)


@pytest.mark.parametrize("most", [60, 4000])
def test_tokens_of_many_answers_keep_the_limit(tmp_path: Path, most: int) -> None:
    """Answers end after 20 to 60 tokens and take two seconds, whether or not clients set max_tokens."""
    cluster, rng = Cluster(book(tmp_path, "tokens_per_minute = 30_000"), 1), random.Random(1)
    running: list[tuple[float, Admission, int]] = []
    used = 0
    for _ in range(6000):
        cluster.advance(0.01)
        for run in [run for run in running if run[0] <= cluster.clock.now]:
            running.remove(run)
            run[1].spend(run[2], 100)
            run[1].settle(100)
        if (admission := cluster.asks("a", 100, most)) is not None:
            tokens = rng.randint(20, 60)
            used += 100 + tokens
            admission.run()
            running.append((cluster.clock.now + 2, admission, tokens))
    assert 30_000 * 0.98 <= used <= 30_000 * 1.02


def test_only_so_many_run_at_a_time(tmp_path: Path) -> None:
    keys = book(tmp_path, "max_concurrent = 2")
    limiter = alone(keys, Clock())
    with limiter.begin(owner(keys)), limiter.begin(owner(keys)) as second:
        with pytest.raises(ApiError, match="only 2 requests of the key 'alice'") as refused:
            limiter.begin(owner(keys))
        assert (refused.value.status, refused.value.headers["Retry-After"]) in ((429, "1"), (429, "2"))
        second.__enter__()  # goes on in the background
    limiter.begin(owner(keys)).__enter__()
    with pytest.raises(ApiError):
        limiter.begin(owner(keys))
    second.__exit__()
    limiter.begin(owner(keys))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_gateways_have_so_many_places_together(tmp_path: Path, count: int) -> None:
    cluster = Cluster(book(tmp_path, "max_concurrent = 4"), count)
    with contextlib.ExitStack() as running:
        for name in itertools.islice(itertools.cycle(cluster.limiters), 60):
            if (admission := cluster.asks(name)) is not None:
                running.enter_context(admission)
            cluster.advance(0.1)
        assert sum(limiter._meters[cluster.owner].running for limiter in cluster.limiters.values()) == 4


def test_refusals_are_counted_by_class(tmp_path: Path) -> None:
    keys, refused = book(tmp_path, "max_concurrent = 1"), []
    limiter = alone(keys, Clock(), lambda *refusal: refused.append(refusal))
    with limiter.begin(owner(keys)):
        for is_line in (False, True):
            with pytest.raises(ApiError):
                limiter.begin(owner(keys), is_line=is_line)
    assert refused == [("default", "limit"), ("background", "limit")]


def test_a_refusal_says_when_to_try_again_and_what_is_left(tmp_path: Path) -> None:
    keys, clock = book(tmp_path, "requests_per_minute = 3\ntokens_per_minute = 100"), Clock()
    limiter = alone(keys, clock)
    for _ in range(3):
        limiter.begin(owner(keys))
    clock.now = 20.2
    with pytest.raises(ApiError, match=r"3 requests per minute; try again in 4[0-5] s") as refused:
        limiter.begin(owner(keys))
    assert 40 <= int(refused.value.headers["Retry-After"]) <= 45
    assert refused.value.body["error"]["code"] == "rate_limit_exceeded"
    assert limiter.headers(owner(keys)) == {
        "x-ratelimit-limit-requests": "3",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "39.8s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0s",
    }
    clock.now = 60.3
    limiter.begin(owner(keys))


def test_a_prompt_that_can_never_be_served_is_no_matter_of_time(tmp_path: Path) -> None:
    keys = book(tmp_path, "tokens_per_minute = 100")
    admission = alone(keys, Clock()).begin(owner(keys))
    with pytest.raises(ApiError, match=r"101 tokens.*never be served") as refused:
        admission.charge(101, 1)
    assert refused.value.status == 400
    admission.charge(100, 4000)


def test_a_request_that_never_runs_costs_nothing(tmp_path: Path) -> None:
    keys = book(tmp_path, "tokens_per_minute = 100")
    limiter = alone(keys, Clock())
    left = limiter.begin(owner(keys))
    left.charge(60, 40)
    left.refund()
    failed = limiter.begin(owner(keys))
    failed.charge(60, 40)
    failed.run()
    failed.refund()
    failed.settle(0)
    limiter.begin(owner(keys)).charge(60, 40)


def test_tokens_beyond_the_expected_number_count_at_once(tmp_path: Path) -> None:
    keys = book(tmp_path, "tokens_per_minute = 1000")
    limiter = alone(keys, Clock())
    first = limiter.begin(owner(keys))
    first.charge(10, 20)
    first.run()
    first.spend(2, 10)
    first.settle(10)
    second = limiter.begin(owner(keys))
    second.charge(10, 500)
    second.run()
    assert limiter.headers(owner(keys))["x-ratelimit-remaining-tokens"] == str(1000 - 12 - 12)
    second.spend(100, 10)
    assert limiter.headers(owner(keys))["x-ratelimit-remaining-tokens"] == str(1000 - 12 - 110)


def test_a_key_without_limits_is_not_metered(tmp_path: Path) -> None:
    keys = book(tmp_path, "")
    limiter = alone(keys, Clock())
    admission = limiter.begin(owner(keys))
    admission.charge(10**9, 10**9)
    assert (limiter.headers(owner(keys)), limiter.headers(""), limiter.report()) == ({}, {}, [])


def test_what_nobody_uses_is_forgotten(tmp_path: Path) -> None:
    keys, clock = book(tmp_path, "requests_per_minute = 3"), Clock()
    limiter = alone(keys, clock)
    limiter.begin(owner(keys))
    (report,) = limiter.report()
    assert (report.name, report.requests, report.wanted_requests) == ("alice", 1, pytest.approx(12.0))
    clock.now = 61.0
    assert limiter.report() == []
    assert not limiter._meters


def test_a_key_below_its_limits_may_come_to_any_gateway(tmp_path: Path) -> None:
    limits = "requests_per_minute = 600\ntokens_per_minute = 60_000\nmax_concurrent = 8"
    cluster = Cluster(book(tmp_path, limits), 2)
    for _ in range(20):
        for name in ("a", "a", "a", "b", "b", "b"):
            admission = cluster.asks(name, 100, 100)
            assert admission is not None
            admission.settle(100)
        cluster.advance(7.0)


def test_clients_never_wait_for_lines_of_batches(tmp_path: Path) -> None:
    keys, clock = book(tmp_path, "requests_per_minute = 600\nmax_concurrent = 2"), Clock()
    limiter = alone(keys, clock)
    lines, clients = [0, 0, 0], [0, 0, 0]
    for tick in range(18_000):
        clock.now = tick * 0.01
        minute = tick // 6000
        with contextlib.suppress(ApiError):
            limiter.begin(owner(keys), is_line=True)
            lines[minute] += 1
        if minute and tick % 20 == 0:
            limiter.begin(owner(keys))
            clients[minute] += 1
    assert clients == [0, 300, 300]
    assert lines[0] == pytest.approx(600, rel=0.02)
    assert lines[2] == pytest.approx(300, rel=0.02)


def test_lines_have_the_places_that_clients_leave(tmp_path: Path) -> None:
    keys = book(tmp_path, "max_concurrent = 2\ntokens_per_minute = 100")
    limiter = alone(keys, Clock())
    with limiter.begin(owner(keys), is_line=True) as line, limiter.begin(owner(keys), is_line=True):
        with limiter.begin(owner(keys)) as client, limiter.begin(owner(keys)):
            line.charge(60, 20)
            client.charge(60, 20)
        with pytest.raises(ApiError, match="only 2 requests"):
            limiter.begin(owner(keys), is_line=True)
    with limiter.begin(owner(keys)), limiter.begin(owner(keys), is_line=True) as line:
        with pytest.raises(ApiError, match="tokens per minute"):
            line.charge(30, 0)
        with pytest.raises(ApiError, match="only 2 requests"):
            limiter.begin(owner(keys), is_line=True)


def test_reads_have_a_limit_of_their_own(tmp_path: Path) -> None:
    keys, clock = book(tmp_path, "requests_per_minute = 3"), Clock()
    limiter, admitted = alone(keys, clock), 0
    while clock.now < 60.0:
        with contextlib.suppress(ApiError):
            limiter.read(owner(keys))
            admitted += 1
        clock.now += 0.1
    assert admitted == 10 * 3
    limiter.begin(owner(keys))
    with pytest.raises(ApiError, match="30 requests without a body per minute") as caught:
        [limiter.read(owner(keys)) for _ in range(20)]
    assert (caught.value.status, "Retry-After" in caught.value.headers) == (429, True)
    limiter.read("")

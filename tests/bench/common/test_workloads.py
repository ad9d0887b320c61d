import pytest

from bench.common.workloads import FIRST_ID, WORKLOADS, make_workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_prompts_hold_only_ids_of_the_vocabulary(name: str) -> None:
    for request in make_workload(name, seed=1, vocab=2000).requests:
        assert all(FIRST_ID <= token < 2000 for token in request.prompt)


@pytest.mark.parametrize("name", WORKLOADS)
def test_equal_seeds_make_equal_prompts_and_others_do_not(name: str) -> None:
    assert make_workload(name, seed=1) == make_workload(name, seed=1)
    first, second = make_workload(name, seed=1).requests, make_workload(name, seed=2).requests
    assert not {request.prompt for request in first} & {request.prompt for request in second}


def test_lengths_are_exact() -> None:
    workload = make_workload("prompt-heavy", seed=1)
    assert workload.concurrency == 16
    assert [(len(request.prompt), request.max_tokens) for request in workload.requests] == [(512, 64)] * 16


def test_interference_sends_long_prompts_behind_steady_streams() -> None:
    requests = make_workload("interference", seed=1).requests
    steady = [request for request in requests if request.group == "steady"]
    assert [(len(request.prompt), request.max_tokens, request.at) for request in steady] == [(64, 192, 0.0)] * 4
    arriving = [(len(request.prompt), request.at) for request in requests if request.group == "arriving"]
    assert arriving == [(1024, 0.5), (1024, 3.0), (1024, 5.5), (1024, 8.0)]


def test_shared_prefix_differs_only_in_its_tails() -> None:
    prompts = [request.prompt for request in make_workload("shared-prefix", seed=1).requests]
    assert len({prompt[:768] for prompt in prompts}) == 1
    assert len({prompt[768:] for prompt in prompts}) == len(prompts)


def test_bad_names_and_vocabularies_are_refused() -> None:
    with pytest.raises(ValueError, match="choose from one, eight"):
        make_workload("two", seed=1)
    with pytest.raises(ValueError, match="larger than"):
        make_workload("one", seed=1, vocab=FIRST_ID)

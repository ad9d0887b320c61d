"""The prompts of a plan's choices."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.core.types import SamplingParams
from paceline.proto import common_pb2
from tests.services.gateway.toy_plans import toy_plan

LAST_SEED = 2**64 - 1


def test_choices_of_a_prompt_have_seeds_of_their_own_and_each_prompt_those_that_it_would_have_alone() -> None:
    plan = toy_plan([1, 2, 3], SamplingParams(seed=LAST_SEED), n=2)
    both = dataclasses.replace(plan, prompts=plan.prompts * 2)
    assert [both.prompt_of(index).sampling.seed for index in range(4)] == [LAST_SEED, 0, LAST_SEED, 0]


def test_the_last_token_of_a_prompt_is_kept_only_for_a_single_choice() -> None:
    alone, several, dropping = toy_plan(), toy_plan(n=2), toy_plan(n=2, dropped_tokens=2)
    assert [plan.kept_tokens(plan.prompt_of(0)) for plan in (alone, several, dropping)] == [3, 2, 1]


@pytest.mark.parametrize("fields", [{"background": True}, {"kind": common_pb2.WORK_KIND_SCORE}])
def test_nobody_goes_on_from_these_prompts(fields: dict[str, object]) -> None:
    plan = toy_plan(**fields)
    assert plan.kept_tokens(plan.prompt_of(0)) == 0

"""Plans and sequences for tests, without a client."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from paceline.core.types import SamplingParams
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.sequences.sequence import SequenceRun
from paceline.services.gateway.sequences.traces import SequenceTrace

PROMPT_FIELDS = {field.name for field in dataclasses.fields(PromptPlan)}


def toy_plan(token_ids: Sequence[int] = (1, 2, 3), sampling: SamplingParams | None = None, **fields: Any) -> Plan:
    """Return the plan of a request with one prompt.

    Args:
        sampling: by default nine tokens are generated.
        fields: further fields of the plan or of its prompt.
    """
    own = {name: fields.pop(name) for name in PROMPT_FIELDS & fields.keys()}
    prompt = PromptPlan(None, list(token_ids), sampling or SamplingParams(max_tokens=9), **own)
    needed = {"n": 1, "stop": (), "include_stop": False, "skip_special_tokens": True, "cache_salt": ""}
    return Plan(prompts=[prompt], **{**needed, **fields})


def toy_sequence(
    token_ids: Sequence[int] = (1, 2, 3),
    sampling: SamplingParams | None = None,
    *,
    request_id: str = "r",
    index: int = 0,
    **fields: Any,
) -> SequenceRun:
    """Return a choice of a request with one prompt; see `toy_plan`.

    Args:
        index: index of the choice. The request has no more choices after it.
    """
    plan = toy_plan(token_ids, sampling, n=index + 1, **fields)
    return SequenceRun(request_id, plan, SequenceTrace(index))

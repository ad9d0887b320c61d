"""A planned request as bodies of POST /inference/v1/generate. Pure functions."""

from __future__ import annotations

import json
from typing import Any

from paceline.core.grammar import expression_of
from paceline.core.types import Constraint, ConstraintKind
from paceline.services.gateway.planning.plan import Plan, PromptPlan
from paceline.services.gateway.planning.schemas import GenerationRequest
from paceline.services.gateway.planning.token_schemas import OUTSIDE

Json = dict[str, Any]

_RESOLVED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "logprobs",
    "prompt_logprobs",
)
"""Sampling parameters that get the values of the plan, where a request may have left them out."""

_LEFT_OUT = {
    *OUTSIDE,
    "best_of",
    "response_format",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "structured_outputs",
    "thinking_token_budget",
    "truncate_prompt_tokens",
    "truncation_side",
    "user",
}
"""Fields of a request that are no sampling parameters, or that the plan has in another form. The fields whose names
begin with guided_ are left out, too."""


def render(request: GenerationRequest, plan: Plan, request_id: str, model: str) -> list[Json]:
    """Return one body for each prompt. All sampling parameters have the values with which the request would run."""
    return [
        {
            "request_id": request_id if len(plan.prompts) == 1 else f"{request_id}-{index}",
            "token_ids": prompt.token_ids,
            "token_offsets": prompt.offsets,
            "features": None,
            "sampling_params": _sampling_params(request, plan, prompt),
            "model": model,
            "stream": bool(request.stream),
            "stream_options": request.stream_options.model_dump() if request.stream_options else None,
            "cache_salt": request.cache_salt,
            "kv_transfer_params": None,
            # Without it, the priority of the key counts.
            **({} if request.priority is None else {"priority": request.priority}),
        }
        for index, prompt in enumerate(plan.prompts)
    ]


def _sampling_params(request: GenerationRequest, plan: Plan, prompt: PromptPlan) -> Json:
    kept = {name for name in GenerationRequest.model_fields.keys() - _LEFT_OUT if not name.startswith("guided_")}
    given = request.model_dump(include=kept, exclude_none=True)
    resolved = {name: getattr(prompt.sampling, name) for name in _RESOLVED}
    structured = _structured_outputs(prompt.sampling.constraint)
    return {**given, **resolved, "n": plan.n, "stop": list(plan.stop), "structured_outputs": structured}


def _structured_outputs(constraint: Constraint | None) -> Json | None:
    """Return a constraint as `structured_outputs`. Schemas become grammars, which also say where white space may be."""
    if constraint is None:
        return None
    match constraint.kind:
        case ConstraintKind.REGEX:
            return {"regex": constraint.text}
        case ConstraintKind.CHOICE:
            return {"choice": json.loads(constraint.text)}
        case ConstraintKind.JSON_SCHEMA:
            return {"grammar": f"start: {expression_of(constraint.kind, constraint.text)}"}
    return {"grammar": constraint.text}

"""The fields by which clients send inputs of pooling, in the forms of OpenAI and vLLM, and the models for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from paceline.core.pooling import PoolTask
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.pooling import PoolOptions, TextInput
from paceline.services.gateway.planning.request_body import NamedRequest

MAX_INPUTS = 2048
"""Largest number of inputs in one request."""

_TASKS: dict[PoolTask, str] = {
    "embed": "embeddings (embed)",
    "token_embed": "vectors of tokens (token_embed)",
    "classify": "labels (classify)",
    "token_classify": "labels of tokens (token_classify)",
    "score": "scores of pairs (score)",
    "sparse": "sparse vectors (sparse)",
}


class TextFields(NamedRequest):
    """The fields of all requests for pooling in the forms of OpenAI and vLLM."""

    request_id: str | None = None
    user: str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Priority of the request, lower is more urgent. Default: the priority of the key."""
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Number of tokens to which inputs are cut; -1 for as many as the model takes. Default: longer ones are refused."""
    truncation_side: Literal["left", "right"] | None = None
    """Side on which inputs lose tokens, with truncate_prompt_tokens. Default: right."""
    padding: Literal["do_not_pad"] | None = None
    """Inputs are never padded, so this only exists for clients that say so."""
    mm_processor_kwargs: dict[str, Any] | None = None

    def pool_options(self, model: ModelFleet, task: PoolTask, **further: Any) -> PoolOptions:
        """Return the options of the request for a task. `further` are further fields of `PoolOptions`.

        Raises ApiError if inputs shall be cut to more tokens than the model takes.
        """
        limit = self.truncate_prompt_tokens
        check_limit(model, limit)
        side = None if limit is None else "start" if self.truncation_side == "left" else "end"
        return PoolOptions(
            task=task,
            truncate=side,  # type: ignore[arg-type]
            max_tokens=None if limit in (None, -1) else limit,
            priority=self.priority,
            cache_salt=self.cache_salt or "",
            **further,
        )


def text_inputs(given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], place: str) -> list[TextInput]:
    """Return the inputs in a field that is a text, token ids, or a list of either.

    Raises ApiError if there are none, or too many.
    """
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [TextInput(given, place)]  # type: ignore[arg-type]
    check_count(len(given), place)
    return [TextInput(content, f"{place}[{index}]") for index, content in enumerate(given)]  # type: ignore[arg-type]


def check_count(count: int, place: str, what: str = "inputs") -> None:
    """Raise ApiError if a request has no inputs or too many."""
    if not count:
        raise ApiError(400, f"{place} must not be empty", param=place, code="empty")
    if count > MAX_INPUTS:
        message = f"{place}: there are {count} {what}, and this server takes {MAX_INPUTS} in one request; send several"
        raise ApiError(400, message, param=place, code="array_above_max_length")


def check_limit(model: ModelFleet, limit: int | None) -> None:
    """Raise ApiError if `truncate_prompt_tokens` asks for no token, or for more than a model that pools takes."""
    most = model.pooling.max_tokens if model.pooling is not None else None
    if limit == 0 or (limit is not None and most is not None and limit > most):
        message = f"truncate_prompt_tokens must be from 1 to {most}, the tokens that this model takes; -1 means as many"
        raise ApiError(400, message, param="truncate_prompt_tokens")


def choose_model(gateway: Gateway, name: str | None, *tasks: PoolTask) -> ModelFleet:
    """Return the model that a request means. Without a name, it is the only model that has one of the tasks.

    Clients of servers with a single model send no name, and their embedding model may be served beside a chat model.

    Raises the errors of `Gateway.pick`, and ApiError if the named model has none of the tasks.
    """
    if name is None:
        able = [each for each in gateway.models.values() if not each.tasks.isdisjoint(tasks)]
        if len(able) == 1:
            name = able[0].name
    model = gateway.pick(name)
    if model.tasks.isdisjoint(tasks):
        raise wrong_task(model, *tasks)
    return model


def wrong_task(model: ModelFleet, *tasks: PoolTask) -> ApiError:
    """Return the error for a model that has none of the tasks. It says what the model computes."""
    able = [words for task, words in _TASKS.items() if task in model.tasks]
    does = " and ".join((", ".join(able[:-1]), able[-1]) if len(able) > 1 else able) if able else "text"
    wanted = " or ".join(_TASKS[task] for task in tasks)
    others = model.models_for(*tasks)
    advice = f"; name {' or '.join(map(repr, others))} for that" if others else ""
    if not others and model.pooling is None and "embed" in tasks:
        advice = ", and its files do not say how to make a vector; start it with --convert embed if it should anyway"
    message = f"the model {model.name!r} does not compute {wanted}; it computes {does}{advice}"
    return ApiError(400, message, param="model", code="unsupported_task")


def prompt_named(model: ModelFleet, name: str | None, place: str) -> str:
    """Return the text that a model puts before inputs for a purpose; without a name, the model's default or "".

    Raises ApiError if the model has no prompt of this name.
    """
    pooling = model.pooling
    prompts = {} if pooling is None else pooling.prompts
    name = name if name is not None or pooling is None else pooling.default_prompt_name
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(map(repr, prompts)) or "none"
        raise ApiError(400, f"{place}: this model has no prompt {name!r}; its prompts: {known}", param=place)
    return prompts[name]

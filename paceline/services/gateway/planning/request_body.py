"""The base classes of everything that clients send: values from JSON, and bodies, which check the names of fields.

Known fields that are not supported are refused by name, because a client that sends `tools` prefers an error to an
answer without them. Unknown fields are ignored with a warning, as clients of other servers expect.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator
from pydantic_core import CoreSchema, core_schema

from paceline.services.gateway.http.errors import ApiError

log = logging.getLogger(__name__)

_SERVED_ANYWAY = frozenset({"metadata", "prediction", "safety_identifier", "service_tier", "store"})
"""Known fields that are accepted without effect."""

_REFUSED: dict[str, tuple[Any, ...]] = {
    "adapter_id": (),
    "audio": (),
    "bad_words": ([],),
    "chat_template": (),
    "content_parts": ([],),
    "custom_logit_processor": ("",),
    "documents": ([],),
    "dry_multiplier": (0,),
    "ebnf": (),
    "ec_transfer_params": ({},),
    "features": (),
    "function_call": ("none",),
    "functions": ([],),
    "grammar": ("",),
    "json_schema": (),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logit_processors": ([],),
    "logits_processors": ([],),
    "logprob_token_ids": ([],),
    "lora_path": (),
    "mcp_servers": ([],),
    "mirostat": (0,),
    "modalities": (["text"],),
    "nvext": ({},),
    "prompt_embeds": ([],),
    "prompt_token_ids": (),
    "reasoning_effort": ("none",),
    "regex": (),
    "repetition_detection": (),
    "structured_outputs": (),
    "suffix": ("",),
    "thinking_token_budget": (),
    "tool_choice": ("none",),
    "tools": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (False,),
    "web_search_options": (),
    "xtc_probability": (0,),
}
"""Fields that change answers, so that a body without support for such a field refuses it. The values listed for each
field ask for nothing and are accepted."""


class FailFast(BaseModel):
    """A model whose lists and objects end at their first error, because a million errors would fill the memory.

    A field for an integer also takes 5.0: JSON has one kind of numbers, and some clients write all with a point.
    """

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = handler(source)
        if cls.__pydantic_complete__:
            return schema  # it was marked when the class was made
        left: list[object] = [schema]
        while left:
            part = left.pop()
            if isinstance(part, dict):
                if part.get("type") in ("list", "dict"):
                    part["fail_fast"] = True
                elif part.get("type") in ("model-field", "default", "nullable") and part["schema"]["type"] == "int":
                    # Not within lists: to call a function for each of their numbers would take long.
                    part["schema"] = core_schema.no_info_before_validator_function(_whole, part["schema"])
                left += part.values()
            elif isinstance(part, list | tuple):
                left += part
        return schema


def _whole(value: object) -> object:
    """Return a float without a fraction as an integer, and any other value unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Body(FailFast):
    """Base class of all parts of a request's body."""

    # Strict, so that "5" is not taken for a number, nor true for a token id.
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())


class CacheControl(Body):
    """A cache breakpoint: the client expects to send the prompt up to this place again, within `ttl`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class NamedRequest(Body):
    """Base class of whole bodies: has the name of the model, refuses unsupported fields and warns of unknown ones."""

    model_config = ConfigDict(json_schema_extra=lambda schema: _allow_null(schema))

    model: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # As in the OpenAI API, null means that the field is not given.
        said = {name: value for name, value in data.items() if value is not None}
        for name, value in said.items():
            refused = (name in _REFUSED or name.startswith("guided_")) and name not in cls.model_fields
            if refused and value not in _REFUSED.get(name, ()):
                raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
        known = _REFUSED.keys() | cls.model_fields.keys() | _SERVED_ANYWAY
        if unknown := [name for name in said if name not in known]:
            log.warning("a request holds unknown fields, which are ignored: %.300s", ", ".join(map(repr, unknown)))
        return said


def warn_of_hosted_tools(kinds: Iterable[str]) -> None:
    """Log a warning with the types of a request's tools that only OpenAI's or Anthropic's servers have."""
    if listed := ", ".join(map(repr, kinds)):
        log.warning("a request holds tools that this server cannot run; the model is not told of them: %.300s", listed)


def _allow_null(schema: dict[str, Any]) -> None:
    """Say in a JSON schema that fields which are not required may be null."""
    null = {"type": "null"}
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()) and null not in field.get("anyOf", ()):
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            schema["properties"][name] = {"anyOf": [field, null], **about}

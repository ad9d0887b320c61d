"""The options by which a model that only generates also makes vectors or scores: --convert and --pooler-config."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from paceline.core.errors import ConfigError
from paceline.core.pooling_config import Pooling

Convert: TypeAlias = Literal["auto", "embed", "score"]

_EXAMPLE = '{"pooling_type": "LAST", "normalize": true}'
_TYPES: dict[str, Pooling] = {"LAST": "last", "MEAN": "mean", "CLS": "cls"}


class _Options(Protocol):
    convert: Convert
    pooler_config: str


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """How a model without files about pooling makes vectors or scores, as an operator says."""

    pooling: Pooling = "last"
    normalize: bool = True
    task: Literal["embed", "score"] = "embed"


def pooling_choice(config: _Options) -> PoolingChoice | None:
    """Return the choice of --convert and --pooler-config; None for --convert auto. Raises ConfigError."""
    text = config.pooler_config.strip()
    if config.convert == "auto":
        if text:
            raise ConfigError("--pooler-config needs --convert embed; without it, the checkpoint says how it pools")
        return None
    if config.convert == "score":
        if text:
            raise ConfigError("--pooler-config says how vectors are made; leave it out with --convert score")
        return PoolingChoice(task="score")
    try:
        values: Any = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--pooler-config is not JSON ({error}); write it like {_EXAMPLE}") from None
    if not isinstance(values, dict) or not values.keys() <= {"pooling_type", "normalize"}:
        raise ConfigError(f"--pooler-config must be a JSON object with the fields of {_EXAMPLE}")
    kind, normalize = values.get("pooling_type", "LAST"), values.get("normalize", True)
    if kind not in _TYPES or not isinstance(normalize, bool):
        raise ConfigError(f"--pooler-config: pooling_type is {', '.join(_TYPES)}, and normalize is true or false")
    return PoolingChoice(_TYPES[kind], normalize)

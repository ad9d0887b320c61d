"""Classes of requests: their objectives and weights, and the file that names them:

[interactive]
ttft_seconds = 1.0
itl_seconds = 0.1
weight = 4

[default]
ttft_seconds = 5.0
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.errors import ConfigError
from paceline.core.toml_tables import read_entry

DEFAULT = "default"
"""Name of the class for requests whose API key names no class."""
BACKGROUND = "background"
"""Name of the class for the lines of batches. It has no objectives, because nobody waits for an answer."""

_ADVICE = "docs/operations/load.md shows how to write it"
Seconds = Annotated[float, Field(gt=0, le=86400)]


@dataclass(frozen=True, slots=True)
class RequestClass:
    """The objectives and the weight of one class of requests."""

    ttft_seconds: float | None = None
    """Longest time to the first token, in seconds; None if there is no objective."""
    itl_seconds: float | None = None
    """Longest time between two tokens, in seconds; None if there is no objective."""
    percentile: float = 0.99
    """Share of the requests (TTFT), and of their tokens (ITL), that must meet the objectives, from 0 to 1."""
    weight: float = 1.0
    """Relative share of the work that an API key of this class gets while requests of several keys wait; higher is
    more.
    """


Classes = Mapping[str, RequestClass]
NO_CLASSES: Classes = MappingProxyType({DEFAULT: RequestClass(), BACKGROUND: RequestClass()})


class _Entry(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)

    ttft_seconds: Seconds | None = None
    itl_seconds: Seconds | None = None
    percentile: Annotated[float, Field(ge=0.5, le=0.999)] = 0.99
    weight: Annotated[float, Field(ge=0.01, le=100)] = 1.0


def read_classes(file: str) -> Classes:
    """Return the classes in a TOML file by name; "default" and "background" exist without being named.

    Args:
        file: path of the TOML file; "" if there is none.

    Raises ConfigError if the file cannot be read or is not valid.
    """
    if not file:
        return NO_CLASSES
    where = f"--classes-file {file}"
    try:
        tables = tomllib.loads(Path(file).read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}; {_ADVICE}") from None
    if BACKGROUND in tables:
        raise ConfigError(f"{where}: [{BACKGROUND}] is the class of batches, which has no objectives; remove it")
    return {**NO_CLASSES, **{name: _request_class(where, name, table) for name, table in tables.items()}}


def _request_class(where: str, name: str, table: object) -> RequestClass:
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name) is None:
        raise ConfigError(f"{where}: a name has 1 to 64 letters, digits and _.-, and {name!r} has others")
    entry = read_entry(_Entry, where, name, table, "class", _ADVICE)
    return RequestClass(entry.ttft_seconds, entry.itl_seconds, entry.percentile, entry.weight)

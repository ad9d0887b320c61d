"""API keys, and the file that lists them. An example of the file:

[alice]
sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
priority = 10
class = "interactive"
share_cache = "team-a"
requests_per_minute = 60
tokens_per_minute = 100_000
max_concurrent = 8

[ops]
key = "…"
role = "admin"
"""

from __future__ import annotations

import tomllib
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.errors import ConfigError
from paceline.core.request_classes import DEFAULT
from paceline.core.toml_tables import read_entry
from paceline.services.common.secret import digest_of, read_private

_MOST_BYTES = 4 << 20
_ADVICE = "docs/operations/security.md shows how to write it"

Role = Literal["client", "admin"]
Amount = Annotated[int, Field(ge=1, le=10**12)]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None for no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Largest number of tokens per minute, of prompts and answers together."""
    max_concurrent: int | None = None
    """Largest number of requests that run or wait at the same time."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An accepted key. Only its digest is kept, not the key itself."""

    name: str
    digest: bytes
    """SHA-256 digest of the key."""
    role: Role = "client"
    priority: int = 0
    limits: KeyLimits = KeyLimits()
    request_class: str = DEFAULT
    """Request class of the key's requests, a name in `Classes`."""
    share_cache: str = ""
    """Name of the group of keys with which this key shares cached blocks; "" if it shares them with no other key."""


class _Entry(BaseModel):
    """A table of the file of keys, which describes one key."""

    model_config = ConfigDict(strict=True, extra="forbid", hide_input_in_errors=True)

    key: Annotated[str, Field(pattern=r"^[\x21-\x7e]{1,1024}$")] | None = None
    sha256: Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")] | None = None
    role: Role = "client"
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    request_class: Annotated[str, Field(alias="class")] = DEFAULT
    share_cache: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    requests_per_minute: Amount | None = None
    tokens_per_minute: Amount | None = None
    max_concurrent: Amount | None = None


def given_keys(keys: Sequence[str], role: Role) -> list[ApiKey]:
    """Return the entries for keys from the command line or the environment, which have no names."""
    prefix = "key" if role == "client" else "admin"
    distinct = dict.fromkeys(keys)
    return [ApiKey(f"{prefix}-{number}", digest_of(key), role) for number, key in enumerate(distinct, 1)]


def read_keys(file: str) -> list[ApiKey]:
    """Return the keys in a file, at least one. Raises ConfigError; its message contains no key.

    A file without keys is refused. Otherwise an editor that writes the file in steps would open the gateway.
    """
    text = read_private(file, "--api-keys-file", _MOST_BYTES, _ADVICE)
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--api-keys-file {file} is not valid TOML: {error}; {_ADVICE}") from None
    if not tables:
        raise ConfigError(f"--api-keys-file {file} has no key; {_ADVICE}")
    return [_key(file, name, table) for name, table in tables.items()]


def check_distinct(keys: Sequence[ApiKey]) -> None:
    """Raise ConfigError if two keys have the same name or the same digest."""
    names: set[str] = set()
    digests: dict[bytes, str] = {}
    for key in keys:
        if key.name in names:
            raise ConfigError(f"two keys have the name {key.name!r}: rename the one in --api-keys-file")
        if (other := digests.get(key.digest)) is not None:
            raise ConfigError(f"the keys {other!r} and {key.name!r} are the same: give each its own")
        names.add(key.name)
        digests[key.digest] = key.name


def check_classes(keys: Sequence[ApiKey], classes: Container[str]) -> None:
    """Raise ConfigError if the request class of a key does not exist."""
    for key in keys:
        if key.request_class not in classes:
            raise ConfigError(f"the key {key.name!r} has the class {key.request_class!r}, which --classes-file lacks")


def _key(file: str, name: str, table: Any) -> ApiKey:
    entry = read_entry(_Entry, f"--api-keys-file {file}", name, table, "key", _ADVICE)
    if (entry.key is None) == (entry.sha256 is None):
        raise ConfigError(f"--api-keys-file {file}: [{name}] needs either key or sha256; {_ADVICE}")
    digest = digest_of(entry.key) if entry.key is not None else bytes.fromhex(entry.sha256 or "")
    limits = KeyLimits(entry.requests_per_minute, entry.tokens_per_minute, entry.max_concurrent)
    return ApiKey(name, digest, entry.role, entry.priority, limits, entry.request_class, entry.share_cache or "")

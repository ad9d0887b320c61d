"""API keys: the file that lists them, and the book of all keys that the gateway accepts now. An example of the file:

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

import asyncio
import hmac
import logging
import os
import tomllib
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.core.errors import ConfigError
from paceline.core.request_classes import DEFAULT, NO_CLASSES
from paceline.core.toml_tables import read_entry
from paceline.services.common.secret import digest_of, read_private
from paceline.services.gateway.http.access.callers import ANYONE, Caller

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


LOOK_SECONDS = 1.0
"""Interval between two checks whether the file of keys has changed, in seconds."""

log = logging.getLogger(__name__)


class AccessBook:
    """All API keys: keys from options and environment, and keys from a file, which is read again when it changes.

    Reading the file again never opens the gateway: if clients or admins needed a key before, they still need one.

    Args:
        client_keys: keys of clients without a name.
        admin_keys: keys of admins without a name.
        file: `--api-keys-file`; "" if there is none.
        classes: names of the classes that keys may have.

    Raises ConfigError if the file is not valid, if a key has two names, or if its class does not exist.
    """

    def __init__(
        self,
        client_keys: Sequence[str] = (),
        admin_keys: Sequence[str] = (),
        file: str = "",
        classes: Container[str] = NO_CLASSES,
    ) -> None:
        self._given = [*given_keys(client_keys, "client"), *given_keys(admin_keys, "admin")]
        self._file = file
        self._classes = classes
        self._version = _version(file)
        self._keys: dict[str, ApiKey] = {}
        """The accepted keys, by their digests in hexadecimal."""
        self.has_clients = False
        """Whether clients need a key."""
        self.has_admins = False
        """Whether admins need a key."""
        self._load()

    def find(self, secrets: Iterable[str]) -> ApiKey | None:
        """Return the accepted key that is among `secrets`, an admin key first; None if no secret is an accepted key."""
        given = [digest_of(secret) for secret in secrets if secret]
        # Compare with all keys, as digests of equal length, so that the time taken reveals nothing.
        found = [key for digest in given for key in self._keys.values() if hmac.compare_digest(digest, key.digest)]
        return max(found, key=lambda key: key.role == "admin", default=None)

    def key(self, owner: str) -> ApiKey | None:
        """Return the key whose digest is `owner`; None if this key is not accepted any more."""
        return self._keys.get(owner)

    def caller(self, owner: str) -> Caller | None:
        """Return the caller of a stored owner digest; None if its key is not accepted any more."""
        if not owner:
            return None if self.has_clients else ANYONE
        key = self._keys.get(owner)
        return None if key is None else caller_with(key)

    async def watch(self) -> None:
        """Read the file again whenever it changes, until cancelled. If the file is invalid, keep the present keys."""
        while self._file:
            await asyncio.sleep(LOOK_SECONDS)
            version = await asyncio.to_thread(_version, self._file)
            if version == self._version:
                continue
            self._version = version
            try:
                self._load()
            except ConfigError as error:
                log.error("the keys stay as they were: %s", error)
            else:
                log.warning("read %s again: it has %d keys now", self._file, len(self._keys) - len(self._given))

    def _load(self) -> None:
        keys = [*self._given, *(read_keys(self._file) if self._file else ())]
        check_distinct(keys)
        check_classes(keys, self._classes)
        self._keys = {key.digest.hex(): key for key in keys}
        roles = {key.role for key in keys}
        self.has_clients |= "client" in roles
        self.has_admins |= "admin" in roles


def caller_with(key: ApiKey) -> Caller:
    """Return the caller that a key identifies."""
    is_admin = key.role == "admin"
    return Caller(key.name, key.digest.hex(), is_admin, key.priority, key.request_class, key.share_cache)


def _version(file: str) -> tuple[int, ...]:
    """Return the version of a file: numbers that change when it is written or replaced; () if there is no such file."""
    try:
        status = os.stat(file)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode

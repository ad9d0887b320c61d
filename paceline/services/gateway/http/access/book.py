"""The API keys that the gateway accepts now."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
from collections.abc import Container, Iterable, Sequence

from paceline.core.errors import ConfigError
from paceline.core.request_classes import NO_CLASSES
from paceline.services.common.secret import digest_of
from paceline.services.gateway.http.access.callers import ANYONE, Caller
from paceline.services.gateway.http.access.keys import ApiKey, check_classes, check_distinct, given_keys, read_keys

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

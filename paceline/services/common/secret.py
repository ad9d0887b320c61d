"""The secret that the services of a cluster share, in a file that only its owner may read; also makes new API keys."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path

from paceline.core.errors import ConfigError

_SECRET = re.compile(r"[\x21-\x7e]{16,1024}")
_MOST_BYTES = 4096
"""Largest size of a file with a secret, in bytes."""


class Secret:
    """The secret that the services of a cluster share. It is never sent, and is in no repr, log line or error message.

    Services prove that they have the secret with keyed hashes, whose keys are derived from the secret. While a cluster
    changes its secret, a service accepts the proofs of two, and makes its own with `text`.

    Args:
        text: the secret; empty if services trust everybody who can connect.
        also: another secret whose proofs are accepted; empty if there is none.
    """

    def __init__(self, text: str = "", also: str = "") -> None:
        self._texts = (text, also) if also else (text,)

    def __bool__(self) -> bool:
        return bool(self._texts[0])

    def key(self, purpose: str) -> bytes:
        """Derive a key of 32 bytes from the secret, to make proofs. Each purpose has a key of its own."""
        return self.keys(purpose)[0]

    def keys(self, purpose: str) -> tuple[bytes, ...]:
        """Derive the keys with which accepted proofs may be made. The first one is that of `key`."""
        return tuple(hmac.digest(text.encode(), purpose.encode(), "sha256") for text in self._texts)

    def matches(self, text: str) -> bool:
        """Return whether `text` is an accepted secret. The time of the comparison does not depend on `text`."""
        return is_one_of(digest_of(text), map(digest_of, self._texts))


def read_secret(file: str) -> Secret:
    """Return the secret in `file`; an empty one if `file` is "". A second line is a secret that is also accepted.

    Raises ConfigError if the file has no valid secret, or if other users may open the file.
    """
    if not file:
        return Secret()
    lines = read_private(file, "--auth-token-file", _MOST_BYTES, _ADVICE).strip().splitlines()
    if not 1 <= len(lines) <= 2 or not all(map(_SECRET.fullmatch, lines)):
        raise ConfigError(
            f"--auth-token-file {file} must hold one line of 16 to 1024 visible ASCII characters, or two while the "
            f"secret is changed; {_ADVICE}"
        )
    return Secret(*lines)


def read_private(file: str, option: str, most_bytes: int, advice: str) -> str:
    """Return the text of a file that only its owner may open.

    Args:
        option: the option that names the file.
        most_bytes: largest plausible size of the file, in bytes. A larger file was named by mistake.
        advice: text for error messages that says how to make such a file.

    Raises ConfigError if the file cannot be read, or if other users may open it.
    """
    try:
        # O_NONBLOCK: `open` must not wait for the other end of a pipe that was named by mistake.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read {option} {file}: {error.strerror}; {advice}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{option} {file} is not a regular file; {advice}")
        if others_may_open(status, os.getuid()):
            raise ConfigError(f"other users may open {option} {file}: chmod 600 it, and change what it holds")
        if status.st_size > most_bytes:
            raise ConfigError(f"{option} {file} has more than {most_bytes} bytes; {advice}")
        return os.read(descriptor, most_bytes).decode("utf-8", "surrogateescape")
    finally:
        os.close(descriptor)


def others_may_open(status: os.stat_result, uid: int) -> bool:
    """Return whether users besides `uid` and root may open a file that `uid` has opened.

    A file of root may be readable for its group, because the system's administrator chose this group for us. Kubernetes
    mounts a Secret for a pod's fsGroup in this way.
    """
    given_by_root = status.st_uid == 0 != uid
    return bool(status.st_mode & (0o037 if given_by_root else 0o077))


def make_secret(file: Path) -> None:
    """Write a random secret to `file`, which only this user may read. Keep an existing file. Raises ConfigError."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        read_secret(str(file))
        return
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"{secrets.token_urlsafe(32)}\n")


def new_key(name: str) -> str:
    """Return a text with a new random API key, followed by the key's table for --api-keys-file.

    Args:
        name: name of the key in the table.
    """
    key = f"pl-{secrets.token_urlsafe(32)}"
    return f'{key}\n\n[{json.dumps(name)}]\nsha256 = "{digest_of(key).hex()}"'


def is_one_of(digest: bytes, expected: Iterable[bytes]) -> bool:
    """Return whether a digest or keyed hash is an expected one. The time does not depend on which one, nor on where
    they differ."""
    return sum(hmac.compare_digest(digest, each) for each in expected) > 0


def digest_of(text: str) -> bytes:
    """Return the SHA-256 digest of a secret or an API key."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


_ADVICE = "`paceline token FILE` makes one"

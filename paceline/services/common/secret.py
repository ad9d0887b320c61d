"""The secret by which the services of a cluster know each other: one line of a file that only its owner may read."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import stat
from pathlib import Path

from paceline.core.errors import ConfigError

_SECRET = re.compile(r"[\x21-\x7e]{16,1024}")
_MOST_BYTES = 4096
"""Of a file that may hold a secret; what is larger was named by mistake."""


class Secret:
    """What every call between services carries. It never shows in a repr, a log line or a message.

    Args:
        text: empty where services trust whoever reaches them.
    """

    def __init__(self, text: str = "") -> None:
        self._text = text
        self._digest = _digest(text)

    def __bool__(self) -> bool:
        return bool(self._text)

    def reveal(self) -> str:
        """The secret itself, for the one place that sends it."""
        return self._text

    def matches(self, text: str) -> bool:
        """Whether `text` is the secret. The time that it takes tells nothing: digests of equal length are compared."""
        return hmac.compare_digest(_digest(text), self._digest)


def read_secret(file: str) -> Secret:
    """The secret in `file`; none where `file` is empty. Raises ConfigError where it holds none, or others know."""
    if not file:
        return Secret()
    try:
        # Not to wait for the other end of a pipe that was named by mistake.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"cannot read --auth-token-file {file}: {error.strerror}; {_ADVICE}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"--auth-token-file {file} is no file; {_ADVICE}")
        if status.st_mode & 0o077:
            raise ConfigError(f"others may read --auth-token-file {file}: chmod 600 it, and change the secret")
        text = os.read(descriptor, _MOST_BYTES).decode("latin-1").strip()
    finally:
        os.close(descriptor)
    if _SECRET.fullmatch(text) is None:
        raise ConfigError(
            f"--auth-token-file {file} must hold one line of 16 to 1024 visible ASCII characters; {_ADVICE}"
        )
    return Secret(text)


def make_secret(file: Path) -> None:
    """Writes a random secret to `file`, for this user alone; one that is there already stays. Raises ConfigError."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        read_secret(str(file))
        return
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as opened:
        opened.write(f"{secrets.token_urlsafe(32)}\n")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()


_ADVICE = "`paceline token FILE` makes one"

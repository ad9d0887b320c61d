"""URLs of Redis: adding a password from a file, and removing passwords for messages."""

from __future__ import annotations

import re
from urllib.parse import quote, urlsplit, urlunsplit

from paceline.core.errors import ConfigError
from paceline.services.common.secret import read_private

_MOST_BYTES = 4096
"""Largest size of a file with a password, in bytes."""
_OPTION = "--redis-password-file"


def with_password(url: str, file: str) -> str:
    """Return a URL of Redis with the password from `file` added; the unchanged URL if `file` is "".

    Raises ConfigError if the file has no password, or if other users may open it.
    """
    if not file:
        return url
    text = read_private(file, _OPTION, _MOST_BYTES, "`paceline token FILE` makes one").strip()
    if not text:
        raise ConfigError(f"{_OPTION} {file} is empty; `paceline token FILE` makes a password")
    try:
        parts = urlsplit(url)
        user, password = parts.username or "", parts.password
    except ValueError:
        return url  # an invalid URL is reported when a client connects
    if not parts.scheme:
        raise ConfigError(f"{_OPTION} needs --redis")
    if password is not None or "password=" in parts.query:
        raise ConfigError(f"--redis has a password, and {_OPTION} has one, too: take it out of the URL")
    place = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{user}:{quote(text, safe='')}@{place}"))


def without_password(url: str) -> str:
    """Return a URL of Redis for messages, without users and passwords, even in its query."""
    return re.sub(r"(password=)[^&#]*", r"\1…", re.sub("//.*@", "//…@", url))

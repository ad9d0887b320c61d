"""URLs of Redis in messages."""

from __future__ import annotations

import re


def without_password(url: str) -> str:
    """Return a URL of Redis for messages. Users and passwords are left out, in its options, too."""
    return re.sub(r"(password=)[^&#]*", r"\1…", re.sub("//.*@", "//…@", url))

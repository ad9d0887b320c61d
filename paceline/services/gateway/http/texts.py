"""Halves of surrogate pairs, which JSON can spell and UTF-8 cannot. Clients leave them where they cut a text."""

from __future__ import annotations

import json

NOT_UNICODE = "not valid Unicode (it holds half of a surrogate pair); send it in UTF-8"
"""The end of a sentence about a text, for error messages."""


def is_unicode(text: str) -> bool:
    """Return whether a text can be written in UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def is_unicode_json(value: object) -> bool:
    """Return whether all texts in a JSON value can be written in UTF-8. Otherwise no answer can have the value."""
    return is_unicode(json.dumps(value, ensure_ascii=False))

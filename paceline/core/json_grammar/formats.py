"""Formats of strings that are enforced, as patterns: the simple formats of JSON Schema, and some formats of pydantic.

All other formats are annotations, which are not enforced, as in the specification.
"""

from __future__ import annotations

_MONTHS = r"((0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)|02-(0[1-9]|1\d|2[0-8]))"
_LEAP_YEAR = r"(\d\d(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
_DATE = rf"(\d{{4}}-{_MONTHS}|{_LEAP_YEAR}-02-29)"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_BYTE = r"(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_IPV4 = rf"({_BYTE}\.){{3}}{_BYTE}"
_H16 = "[0-9a-fA-F]{1,4}"
_LAST_32 = rf"({_H16}:{_H16}|{_IPV4})"
_IPV6 = "|".join(
    [rf"({_H16}:){{6}}{_LAST_32}", rf"::({_H16}:){{5}}{_LAST_32}"]
    + [rf"(({_H16}:){{0,{n}}}{_H16})?::({_H16}:){{{4 - n}}}{_LAST_32}" for n in range(4)]
    + [
        rf"(({_H16}:){{0,4}}{_H16})?::{_LAST_32}",
        rf"(({_H16}:){{0,5}}{_H16})?::{_H16}",
        rf"(({_H16}:){{0,6}}{_H16})?::",
    ]
)
_LABEL = "[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]+"
_URI_CHARACTER = r"([a-zA-Z0-9._~!$&'()*+,;=:@/-]|%[0-9a-fA-F]{2})"
_IN_BRACKETS = rf"//({_URI_CHARACTER}*@)?\[[0-9a-fA-F:.]+\](:\d*)?(/{_URI_CHARACTER}*)?"
"""The beginning of a URI's rest if its host is an IPv6 address."""
_QUERY = rf"(\?({_URI_CHARACTER}|\?)*)?(#({_URI_CHARACTER}|\?)*)?"
_URI = rf"[a-zA-Z][a-zA-Z0-9+.-]*:({_URI_CHARACTER}+|{_IN_BRACKETS}){_QUERY}"
_PERIOD = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
_CLOCK = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"


def _uuid(version: str) -> str:
    return f"[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}-[0-9a-fA-F]{{4}}-[0-9a-fA-F]{{12}}"


FORMATS = {
    name: f"^({pattern})$"
    for name, pattern in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[tT]{_TIME}",
        "duration": rf"P({_PERIOD}({_CLOCK})?|{_CLOCK}|\d+W)",
        "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
        "hostname": _HOST,
        "ipv4": _IPV4,
        "ipv6": _IPV6,
        "ipvanyaddress": rf"{_IPV4}|{_IPV6}",
        "uuid": _uuid("[0-9a-fA-F]"),
        **{f"uuid{version}": _uuid(version) for version in "1345678"},
        "uri": _URI,
    }.items()
}
"""For each format that is enforced, the pattern that its texts match."""

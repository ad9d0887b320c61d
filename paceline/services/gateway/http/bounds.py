"""Limits of bodies: of the JSON in one body, which is counted before it is parsed, and of the memory of all bodies.

Ten bytes of JSON become an object of several hundred bytes, which takes microseconds to check. So the size of a body
alone bounds neither the memory nor the time that it costs. `Bounds` has all limits, which are options. `values` and
`objects` are counted in the bytes while they arrive, `messages` and `parts` in the parsed body before it is validated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException

from paceline.core.config.http import HttpOptions
from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.http.errors import ApiError, retry_after

BYTE_COST = 4
"""Bytes of memory that are counted for each byte of a body: the byte, the text, the parsed value and the prompt."""
OBJECT_COST = 1024
"""Bytes of memory that are counted for each list and object, parsed and validated."""
VALUE_COST = 64
"""Bytes of memory that are counted for each value in a body."""
BUSY_SECONDS = 1.0
"""Delay after which a client should try again if there is no memory for its body, in seconds."""

Json = dict[str, Any]

LONGER: Mapping[str, int] = {"/v1/messages/batches": 5}
"""Factors of the limits of values and objects for routes whose bodies hold many requests."""

_NESTED = ("chat_request", "completion_request")
"""Names of fields that contain the body of another route."""
MOST_DIGITS = 400
"""Largest number of digits of a number. The time to parse a number grows with the square of its digits."""
PIECE_BYTES = 64 << 10
"""Largest number of bytes that are decompressed or counted at once. The event loop does nothing else meanwhile."""

NAME_VALUES = 4
"""Number of values that each member name counts as. Parsing a new name takes as long as parsing so many numbers."""

FRACTION_VALUES = 8
"""Number of values that each point and each "e" counts as. A number with a fraction or an exponent takes several times
as long to parse and write as an integer, and no other thread runs meanwhile. The "e" of "true" and "false" is counted,
too, which does no harm."""
PLAIN_DIGITS, DIGITS_PER_VALUE = 24, 8
"""Digits of a number that cost nothing more than the number, and the number of further digits that count as a value.
Longer numbers than those of doubles and 64 bits take several times as long to parse."""
MOST_WRITTEN_VALUES = 100_000
"""Largest number of JSON values in the arguments of all tool calls of a conversation. The arguments are texts in its
body, so their values are not counted with those of the body."""

_OTHERS = bytes(set(range(256)) - set(b'"{[,:0123456789.eE'))
"""Bytes that do not matter for counting. The other bytes are quotes, digits, marks of fractions and exponents, and
bytes that begin or separate values."""


class BodyMemory:
    """The memory for the bodies of all running requests, `--body-memory`. One API key may use half of it.

    Data that a request reads from the store, such as earlier turns of its conversation, counts like its body.

    Callers without a key are the owner "". They may use all memory, because a gateway that asks for no key has no other
    owners.

    Args:
        total: size of the memory, in bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._of_owner: Counter[str] = Counter()

    def most(self, owner: str) -> int:
        """Return the largest number of bytes that the bodies of one owner may take together."""
        return self.total // 2 if owner else self.total

    def take(self, owner: str, size: int) -> None:
        """Count further bytes of an owner's bodies as used. Raises HTTPException 429 if there is no room for them."""
        if self.used + size > self.total or self._of_owner[owner] + size > self.most(owner):
            message = "the bodies of running requests take all memory (--body-memory); try again when some have ended"
            raise HTTPException(429, message, {"Retry-After": str(retry_after(BUSY_SECONDS))})
        self.used += size
        self._of_owner[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        """Count bytes of an owner's bodies as free again."""
        self.used -= size
        self._of_owner[owner] -= size
        if not self._of_owner[owner]:
            del self._of_owner[owner]


class RequestMemory:
    """The memory that the body of one request uses, until `close`."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._owner = ""
        self._size = 0

    def take(self, owner: str, size: int) -> None:
        """Count further bytes of the request as used.

        Raises HTTPException 413 if the request alone uses too many, and 429 if there is no room for them now.

        Args:
            owner: digest of the caller's key; it must be the same in each call.
        """
        if self._size + size > (most := self._memory.most(owner)):
            message = f"the body takes more than {most} bytes of memory (--body-memory); send a smaller one"
            raise HTTPException(413, message)
        self._memory.take(owner, size)
        self._owner, self._size = owner, self._size + size

    def close(self) -> None:
        self._memory.give_back(self._owner, self._size)
        self._size = 0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of the JSON in one body."""

    values: int
    """Largest number of members of lists and objects. The name of a member counts as NAME_VALUES more, a fraction or an
    exponent as FRACTION_VALUES more, and a number of many digits as PLAIN_DIGITS says."""
    objects: int
    """Largest number of lists and objects."""
    messages: int
    """Largest number of messages in a conversation, and of items in a response's input."""
    parts: int
    """Largest number of content parts in all messages or items together."""
    tools: int

    @classmethod
    def of(cls, options: HttpOptions) -> Bounds:
        return cls(
            values=options.max_body_values,
            objects=options.max_body_objects,
            messages=options.max_messages,
            parts=options.max_content_parts,
            tools=options.max_tools,
        )

    def check_count(self, count: JsonCount, path: str) -> None:
        """Raise ApiError if the JSON of a body that has been counted so far exceeds the limits for a path."""
        if count.digits > MOST_DIGITS:
            raise ApiError(400, f"the body has a number of more than {MOST_DIGITS} digits; send it as a text")
        times = LONGER.get(path, 1)
        for name, found, most in (("values", count.values, self.values), ("objects", count.objects, self.objects)):
            if found > most * times:
                told = "lists and objects" if name == "objects" else name
                raise ApiError(
                    413,
                    f"the body has more than {most * times} {told} (--max-body-{name}); split it",
                    code=f"too_many_{name}",
                )

    def check_lists(self, body: object, place: str = "") -> None:
        """Raise ApiError if a parsed body has a list that is too long. Other faults are left to validation."""
        if not isinstance(body, dict):
            return
        for field in ("messages", "input"):
            given = body.get(field)
            for messages in _conversations(given):
                self._check(f"{place}{field}", "messages or items", len(messages), self.messages, "messages")
                parts = sum(len(content) for content in map(_content, messages) if isinstance(content, list))
                self._check(f"{place}{field}", "parts in their contents", parts, self.parts, "content-parts")
        tools = body.get("tools")
        self._check(f"{place}tools", "tools", len(tools) if isinstance(tools, list) else 0, self.tools, "tools")
        for field in _NESTED:
            self.check_lists(body.get(field), f"{place}{field}.")

    @staticmethod
    def _check(place: str, what: str, found: int, most: int, option: str) -> None:
        if found > most:
            message = f"{place}: there are {found} {what}, and this server takes {most} (--max-{option})"
            raise ApiError(400, message, param=place, code="array_above_max_length")


class JsonCount:
    """Counter of the values in JSON text that arrives in pieces.

    It counts the values that a parser would create, up to the first place at which the text is invalid. The text must
    be UTF-8: in other encodings, halves of characters look like quotes.
    """

    def __init__(self) -> None:
        self.values = 0
        """Number of lists and objects that have begun, plus their members, counted as for `Bounds.values`."""
        self.objects = 0
        """Number of lists and objects that have begun."""
        self.digits = 0
        """Number of digits of the longest number in the text so far."""
        self._last_digits = 0
        """Number of digits since the last comma."""
        self._is_in_text = False
        self._escape = b""
        """The backslash at the end of the last piece, if it escapes the next character."""

    def add(self, piece: bytes) -> None:
        """Count the next piece of the text. The time is in proportion to the length of the piece."""
        data = self._escape + piece
        self._escape = b"\\" * ((len(data) - len(data.rstrip(b"\\"))) % 2)
        if b"\\" in data:
            data = data[: len(data) - len(self._escape)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = data.translate(None, _OTHERS).split(b'"')
        outside = b"".join(parts[self._is_in_text :: 2])
        self._is_in_text ^= len(parts) % 2 == 0
        objects = outside.count(b"{") + outside.count(b"[")
        self.objects += objects
        self.values += objects + outside.count(b",") + NAME_VALUES * outside.count(b":")
        self.values += FRACTION_VALUES * sum(map(outside.count, (b".", b"e", b"E")))
        numbers = [len(digits) for digits in outside.translate(None, b"{[:.eE").split(b",")]
        self.values += sum(digits - PLAIN_DIGITS for digits in numbers if digits > PLAIN_DIGITS) // DIGITS_PER_VALUE
        numbers[0] += self._last_digits
        self._last_digits = numbers[-1]
        self.digits = max(self.digits, *numbers)

    def end(self) -> None:
        """Note the end of a text. The next piece begins another text."""
        self._is_in_text, self._escape, self._last_digits = False, b"", 0


def count_json(text: bytes) -> JsonCount:
    """Count the values in a whole JSON text."""
    count = JsonCount()
    for begin in range(0, len(text), PIECE_BYTES):
        count.add(text[begin : begin + PIECE_BYTES])
    return count


def check_written(texts: Iterable[str], place: str) -> None:
    """Raise InvalidRequestError if arguments of tool calls together contain too many JSON values.

    Args:
        texts: the arguments, which are JSON in texts of a body.
        place: the field of the API, for the message.
    """
    count = JsonCount()
    for text in texts:
        data = text.encode("utf-8", "surrogatepass")
        for begin in range(0, len(data), PIECE_BYTES):
            count.add(data[begin : begin + PIECE_BYTES])
        count.end()
        if count.values > MOST_WRITTEN_VALUES:
            message = f"{place}: arguments of tool calls have more than {MOST_WRITTEN_VALUES} values; send fewer"
            raise InvalidRequestError(message, place)


def _conversations(given: object) -> Iterator[list[Any]]:
    """Yield each conversation in a field: one, or several if the field is that of a batch of chats."""
    if isinstance(given, list):
        if given and all(isinstance(each, list) for each in given):
            yield from given
        else:
            yield given


def _content(message: object) -> object:
    return message.get("content") if isinstance(message, dict) else None

"""Counts the memory that bodies of requests take, so that all together stay within --body-memory.

What a request reads from the store, such as the turns before it, counts like its body.
"""

from __future__ import annotations

from collections import Counter

from starlette.exceptions import HTTPException

from paceline.services.gateway.http.refusals import retry_after

BYTE_COST = 4
"""Bytes of memory for each byte of a body: as it came, as text, what is made of it, and the prompt."""
OBJECT_COST = 1024
"""Bytes of memory for each list and object: as it was parsed, and as it was validated."""
VALUE_COST = 64
"""Bytes of memory for each value."""
BUSY_SECONDS = 1.0
"""Time after which a client whose body has no room tries again."""


class BodyMemory:
    """The memory for the bodies of all requests that run. The requests of one key may have half of it.

    Those without a key are of one owner, "", who may have all, because no other calls a gateway that asks for no key.

    Args:
        total: its size in bytes.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._of_owner: Counter[str] = Counter()

    def most(self, owner: str) -> int:
        """Return the most bytes that the bodies of one owner may take."""
        return self.total // 2 if owner else self.total

    def take(self, owner: str, size: int) -> None:
        """Count further bytes of a caller's bodies. Raises HTTPException 429 if there is no room."""
        if self.used + size > self.total or self._of_owner[owner] + size > self.most(owner):
            message = "the bodies of running requests take all memory (--body-memory); try again when some have ended"
            raise HTTPException(429, message, {"Retry-After": str(retry_after(BUSY_SECONDS))})
        self.used += size
        self._of_owner[owner] += size

    def give_back(self, owner: str, size: int) -> None:
        """Count bytes back."""
        self.used -= size
        self._of_owner[owner] -= size
        if not self._of_owner[owner]:
            del self._of_owner[owner]


class RequestMemory:
    """The memory that the body of one request takes, until `close`."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._owner = ""
        self._size = 0

    def take(self, owner: str, size: int) -> None:
        """Count further bytes. Raises HTTPException 413 if it alone takes too many, 429 if there is no room now.

        Args:
            owner: who sends the request; the same each time.
        """
        if self._size + size > (most := self._memory.most(owner)):
            message = f"the body takes more than {most} bytes of memory (--body-memory); send a smaller one"
            raise HTTPException(413, message)
        self._memory.take(owner, size)
        self._owner, self._size = owner, self._size + size

    def close(self) -> None:
        self._memory.give_back(self._owner, self._size)
        self._size = 0

"""The caller of a request, as the guard recognised it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from paceline.core.request_classes import DEFAULT

_owner: ContextVar[str] = ContextVar("paceline_owner", default="")


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request."""

    name: str
    """Name of the key; "" if the caller has none."""
    owner: str
    """Hexadecimal SHA-256 of the key, by which stored objects know their owner; "" if the caller has no key."""
    is_admin: bool
    """Whether the caller may see and end what others have sent."""
    priority: int = 0
    """Priority of requests that state none, and the most urgent one that a key may use; lower is more urgent."""
    request_class: str = DEFAULT
    """Class of its requests."""
    share_cache: str = ""
    """Name of the group of keys with which the caller shares cached blocks; "" if it shares them with none."""

    def may_see(self, owner: str) -> bool:
        """Return whether the caller may see and end what `owner` has sent."""
        return self.is_admin or self.owner == owner

    @property
    def only_owner(self) -> str | None:
        """The only owner whose files and batches the caller may see; None if it may see all."""
        return None if self.is_admin else self.owner

    def priority_for(self, wanted: int | None) -> int:
        """Return the priority of a request that wants `wanted`. A key can make requests less urgent, but not more."""
        if wanted is None:
            return self.priority
        return max(wanted, self.priority) if self.owner else wanted


ANYONE = Caller(name="", owner="", is_admin=False)
"""A caller without a key."""


def set_current_owner(owner: str) -> None:
    """Say for whom this task, and the tasks that it makes, work from now on.

    Args:
        owner: digest of the caller's key; "" if the caller has none.
    """
    _owner.set(owner)


def current_owner() -> str:
    """Return for whom this task works; "" if for a caller without a key, or for the gateway itself."""
    return _owner.get()

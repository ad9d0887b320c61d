"""Cache policies by name: ours, and those of others through the entry point group `paceline.cache_policies`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.lru import LRU
from paceline.core.cache_policy.priority import Priority
from paceline.core.errors import ConfigError

ENTRY_POINTS = "paceline.cache_policies"
"""Group in which a distribution names its subclasses of `CachePolicy`; each is called with the number of slots."""

POLICIES: dict[str, type[CachePolicy]] = {"forecast": Forecast, "lru": LRU, "arc": ARC, "priority": Priority}


def find_policy(name: str) -> type[CachePolicy]:
    """The policy of this name; ours come before others'.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """
    if name in POLICIES:
        return POLICIES[name]
    others = entry_points(group=ENTRY_POINTS)
    if name not in others.names:
        known = ", ".join([*POLICIES, *sorted(others.names - POLICIES.keys())])
        raise ConfigError(f"there is no cache policy {name!r}; --cache-policy takes one of {known}")
    return _load(others[name])


def _load(entry: EntryPoint) -> type[CachePolicy]:
    try:
        policy = entry.load()
    except Exception as error:
        raise ConfigError(f"cache policy {entry.name!r} ({entry.value}) cannot be loaded: {error}") from error
    if not (isinstance(policy, type) and issubclass(policy, CachePolicy)):
        raise ConfigError(f"cache policy {entry.name!r} ({entry.value}) is no subclass of CachePolicy")
    return policy

"""Cache policies by name: the bundled ones, and installed ones from the entry point group `paceline.cache_policies`."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from paceline.core.cache_policy.adaptive import Adaptive
from paceline.core.cache_policy.arc import ARC
from paceline.core.cache_policy.base import CachePolicy
from paceline.core.cache_policy.forecast import Forecast
from paceline.core.cache_policy.lru import LRU
from paceline.core.errors import ConfigError

ENTRY_POINTS = "paceline.cache_policies"
"""Entry point group for third-party subclasses of `CachePolicy`; each is constructed with the number of slots."""

POLICIES: dict[str, type[CachePolicy]] = {"adaptive": Adaptive, "forecast": Forecast, "arc": ARC, "lru": LRU}


def find_policy(name: str) -> type[CachePolicy]:
    """Return the policy with this name. A bundled policy takes precedence over an installed one.

    Raises ConfigError if there is no such policy or it cannot be loaded.
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

"""`paceline scale`: change how many workers a running stack has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, UnavailableError

SECONDS = 60.0
"""Deadline of one request to the gateway, in seconds."""
POLL_SECONDS = 0.5


def scale(targets: Sequence[str], gateway: GatewayClient, wait: float) -> None:
    """Request a number of workers of each role, and print the fleet.

    Args:
        targets: e.g. "prefill=3"; empty only prints the fleet.
        wait: seconds to wait until all wanted workers are ready and no worker drains; 0 returns at once.

    Raises:
        ConfigError: a target cannot be read.
        InvalidRequestError: the gateway or its supervisor refuses.
        UnavailableError: no gateway answers, or the fleet has not reached its targets after `wait` seconds.
    """
    wanted = _parse(targets)
    state = gateway.fetch("/fleet/scale", wanted or None, SECONDS)
    deadline = time.monotonic() + wait
    while wait and not _is_settled(state):
        if time.monotonic() >= deadline:
            raise UnavailableError(f"after {wait:g} seconds the fleet has not reached its targets: {_describe(state)}")
        time.sleep(POLL_SECONDS)
        state = gateway.fetch("/fleet/scale", seconds=SECONDS)
    print(_describe(state))


def _parse(targets: Sequence[str]) -> dict[str, int]:
    wanted: dict[str, int] = {}
    for target in targets:
        role, _, count = target.partition("=")
        if role not in ("prefill", "decode", "encode") or not count.isascii() or not count.isdigit():
            raise ConfigError(f"cannot read {target!r}; write it like prefill=3 or decode=1")
        wanted[role] = int(count)
    return wanted


def _is_settled(state: Mapping[str, Any]) -> bool:
    return all(role["ready"] >= role["wanted"] and not role["draining"] for role in state.values())


def _describe(state: Mapping[str, Any]) -> str:
    parts = []
    for name, role in state.items():
        if name == "encode" and not (role["wanted"] or role["draining"]):
            continue  # most stacks have none
        notes = [f"{role['ready']} ready"]
        if role["draining"]:
            notes.append(f"{role['draining']} more draining")
        parts.append(f"{name} {role['wanted']} ({', '.join(notes)})")
    return ", ".join(parts)

"""`paceline scale`: change how many workers a running stack has, and their roles."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.client import GatewayClient
from paceline.core.errors import ConfigError, UnavailableError

SECONDS = 60.0
"""Deadline of one request to the gateway, in seconds."""
POLL_SECONDS = 0.5


def scale(
    targets: Sequence[str], drain: Sequence[str], release: Sequence[str], gateway: GatewayClient, wait: float
) -> None:
    """Request numbers of workers and new roles of running ones, and print the fleet.

    Args:
        targets: e.g. "prefill=3" for a number of workers, "prefill-0=decode" for the new role of a worker.
        drain: ids of workers that shall end. If no change is requested at all, the fleet is only printed.
        release: roles whose number of workers the planner chooses again.
        wait: seconds to wait until all wanted workers are ready in their roles and no worker drains; 0 returns at once.

    Raises:
        ConfigError: a target cannot be read.
        InvalidRequestError: the gateway or its supervisor refuses.
        UnavailableError: no gateway answers, or the fleet has not reached its targets after `wait` seconds.
    """
    lists = {"drain": list(drain), "release": list(release)}
    wanted = _parse(targets) | {name: given for name, given in lists.items() if given}
    state = gateway.fetch_fleet("/fleet/scale", wanted or None, SECONDS)
    deadline = time.monotonic() + wait
    while wait and not (_is_settled(state) and _have_roles(gateway, wanted.get("flip", {}))):
        if time.monotonic() >= deadline:
            raise UnavailableError(f"after {wait:g} seconds the fleet has not reached its targets: {_describe(state)}")
        time.sleep(POLL_SECONDS)
        state = gateway.fetch_fleet("/fleet/scale", seconds=SECONDS)
    print(_describe(state))


def _parse(targets: Sequence[str]) -> dict[str, Any]:
    wanted: dict[str, Any] = {}
    for target in targets:
        name, _, value = target.rpartition("=")
        if name in ("prefill", "decode", "encode", "pool") and value.isascii() and value.isdigit():
            wanted[name] = int(value)
        elif name and value in ("prefill", "decode", "standby"):
            wanted.setdefault("flip", {})[name] = value
        else:
            raise ConfigError(f"cannot read {target!r}; write it like prefill=3, decode=1 or prefill-0=decode")
    return wanted


def _is_settled(state: Mapping[str, Any]) -> bool:
    return all(role["ready"] >= role["wanted"] and not role["draining"] for role in state.values())


def _have_roles(gateway: GatewayClient, roles: Mapping[str, str]) -> bool:
    """Return whether workers serve in their new roles. Numbers of workers do not show an unfinished change."""
    if not roles:
        return True
    workers = gateway.fetch_fleet("/fleet", seconds=SECONDS)["workers"]
    ready = {each["worker_id"]: each["role"] for each in workers if each["state"] == "ready"}
    return all(ready.get(name) == role for name, role in roles.items())


def _describe(state: Mapping[str, Any]) -> str:
    parts = []
    for name, role in state.items():
        # A stack has pool workers or the others, and most stacks have no encode workers.
        is_other = name in ("encode", "pool") or state.get("pool", {}).get("wanted")
        if is_other and not (role["wanted"] or role["draining"]):
            continue
        notes = [f"{role['ready']} ready"]
        if role["draining"]:
            notes.append(f"{role['draining']} more draining")
        parts.append(f"{name} {role['wanted']} ({', '.join(notes)})")
    return ", ".join(parts)

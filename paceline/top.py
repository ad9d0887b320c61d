"""`paceline top`: show the fleet live, from /fleet of a gateway."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.client import GatewayClient
from paceline.core.progress import size_text

_PATH = "/fleet?leases=1"
_COLUMNS = (
    ("WORKER", 20),
    ("ROLE", 8),
    ("STATE", 12),
    ("RUN", 5),
    ("WAIT", 5),
    ("TOK/S", 8),
    ("STEP/S", 7),
    ("BUSY", 6),
    ("BUBBLE", 7),
    ("PLAN", 6),
    ("OUTPUT", 7),
    ("ACCEPT", 7),
    ("LENGTH", 7),
    ("ENC/S", 6),
    ("ENCODE", 7),
    ("WEIGHTS", 10),
    ("NUMERICS", 20),
)


_ADAPTERS = 8
"""Largest number of adapters that are shown."""
_NAME = 24
"""Largest number of characters of a name in the lines about adapters, which fit into 80 columns."""


def top(gateway: GatewayClient, interval: float, count: int) -> None:
    """Print the fleet every `interval` seconds, `count` times, or until interrupted if `count` is 0.

    Raises the errors of `GatewayClient.fetch`.
    """
    before, shown = gateway.fetch_fleet(_PATH), 0
    began = time.monotonic()
    while count == 0 or shown < count:
        time.sleep(interval)
        now, at = gateway.fetch_fleet(_PATH), time.monotonic()
        # Move the cursor home and erase below it, because erasing the whole screen would flicker.
        print("\x1b[H\x1b[J" if count == 0 else "", end="")
        print("\n".join(render(before, now, at - began)), flush=True)
        before, began, shown = now, at, shown + 1


def render(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> list[str]:
    """Return the lines to print for two answers of /fleet that are `seconds` apart. Rates and shares cover the time
    between them.
    """
    earlier = {_name(worker): worker["stats"] for worker in before["workers"]}
    lines = ["".join(title.ljust(width) for title, width in _COLUMNS)]
    shown = [worker for worker in now["workers"] if worker["role"] not in ("kvtransfer", "planner")]
    loads: list[str] = []
    several = len({_name(worker)[0] for worker in shown}) > 1
    for model, workers in itertools.groupby(shown, lambda worker: _name(worker)[0]):
        if several:
            lines.append(f"{model}:")
        for worker in workers:
            stats = worker["stats"]
            gained = {name: value - earlier.get(_name(worker), {}).get(name, 0) for name, value in stats.items()}
            lines.append(_row([*_state(worker), *_work(gained, seconds), _weights(stats), worker["numerics"] or "-"]))
            loads += _loads(worker, gained, seconds)
    lines.append("")
    for host in now["hosts"]:
        lines.append(_ledger(host))
    lines.append(f"waiting at the gateway: {now['waiting']}")
    # Gateways of earlier releases tell nothing about adapters.
    return lines + loads + _adapters(now.get("adapters", ()))


def _adapters(adapters: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each adapter that sequences use, up to _ADAPTERS of them."""
    used = [each for each in adapters if each["running"] or each["waiting"]]
    lines = [
        f"adapter {each['name'][:_NAME]}: {each['running']} running, {each['waiting']} waiting; "
        f"on {len(each['workers'])} workers"
        for each in used[:_ADAPTERS]
    ]
    return lines + [f"and {len(used) - _ADAPTERS} more adapters"] * (len(used) > _ADAPTERS)


def _loads(worker: Mapping[str, Any], gained: Mapping[str, float], seconds: float) -> list[str]:
    """Return a line about the adapters in a worker's memory, if it has any."""
    if not (count := worker["stats"].get("lora_adapters")):
        return []
    loads = gained.get("lora_loads", 0)
    took = f" of {1000 * gained['lora_load_seconds'] / loads:.0f} ms" if loads else ""
    evictions = gained.get("lora_evictions", 0) / seconds
    name = worker["worker_id"][:_NAME]
    return [f"{name}: {count:.0f} adapters; {loads / seconds:.1f} loads/s{took}, {evictions:.1f} evictions/s"]


def _name(worker: Mapping[str, Any]) -> tuple[str, str]:
    """Return the model and the id of a worker. Workers of two models may have one id."""
    return worker["model_name"], worker["worker_id"]


def _state(worker: Mapping[str, Any]) -> list[str]:
    return [worker["worker_id"], worker["role"], worker["state"], str(worker["running"]), str(worker["waiting"])]


def _work(gained: Mapping[str, float], seconds: float) -> list[str]:
    return [*_speed(gained, seconds), *_drafts(gained), *_encodings(gained, seconds)]


def _speed(gained: Mapping[str, float], seconds: float) -> list[str]:
    def share(name: str) -> str:
        return f"{100 * gained.get(name, 0) / seconds:.1f}%"

    tokens = gained.get("sampled_tokens", 0) + gained.get("pooled_tokens", 0)
    rates = [tokens / seconds, gained.get("steps", 0) / seconds]
    return [
        *(f"{rate:.1f}" for rate in rates),
        *map(share, ("busy_seconds", "bubble_seconds", "plan_seconds", "output_seconds")),
    ]


def _drafts(gained: Mapping[str, float]) -> list[str]:
    """Return the share of draft tokens that were accepted, and the mean number of tokens from a verified draft."""
    drafts, tokens, accepted = (gained.get(name, 0) for name in ("drafts", "draft_tokens", "accepted_tokens"))
    return [f"{100 * accepted / tokens:.0f}%", f"{1 + accepted / drafts:.2f}"] if tokens and drafts else ["-", "-"]


def _encodings(gained: Mapping[str, float], seconds: float) -> list[str]:
    """Return the encodings that were computed per second, and the share of time in which the encoders ran."""
    if "encodings_computed" not in gained:
        return ["-", "-"]  # the model has no encoders
    return [f"{gained['encodings_computed'] / seconds:.1f}", f"{100 * gained.get('encode_seconds', 0) / seconds:.1f}%"]


def _weights(stats: Mapping[str, float]) -> str:
    """Return the size of a worker's weights in memory. Its numerics name the format."""
    size = sum(value for name, value in stats.items() if name.startswith("weight_bytes_"))
    return size_text(int(size)) if size else "-"


def _ledger(host: Mapping[str, Any]) -> str:
    if "error" in host:
        return f"{host['host_id']}: {host['error']}"
    blocks = ", ".join(f"{host[name]} {name.replace('_', ' ')}" for name in ("held", "in_flight", "cached", "free"))
    hits = "-" if host["hit_rate"] is None else f"{100 * host['hit_rate']:.0f}%"
    text = f"{host['host_id']}: {host['total']} blocks: {blocks}; prefix hits {hits}"
    if not host["balanced"]:
        text += "; OUT OF BALANCE: restart this host's services"
    return text + (f"; oldest lease {_lease(host['leases'][0])}" if host["leases"] else "")


def _lease(lease: Mapping[str, Any]) -> str:
    age = f"{lease['age_ms'] / 1000:.1f} s"
    return f"{age} ({lease['blocks']} blocks, {lease['state']}, of {lease['owner']}, {lease['key']['request_id']})"


def _row(cells: Sequence[str]) -> str:
    return "".join(cell[: width - 1].ljust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))

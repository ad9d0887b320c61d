"""`paceline scale` against a gateway that answers from a script."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from paceline import scale as command
from paceline.client import GatewayClient

SETTLED = {"prefill": {"wanted": 0, "ready": 0, "draining": 0}, "decode": {"wanted": 2, "ready": 2, "draining": 0}}


class ScriptedGateway:
    """A gateway whose workers are described by the next of some lists, each time that a client asks for the fleet."""

    def __init__(self, *fleets: list[dict[str, str]]) -> None:
        self.fleets = list(fleets)

    def fetch_fleet(self, path: str, body: Mapping[str, object] | None = None, seconds: float = 0.0) -> dict[str, Any]:
        return {"workers": self.fleets.pop(0)} if path == "/fleet" else SETTLED


def test_waiting_for_a_flip_lasts_until_the_worker_serves_in_its_new_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "POLL_SECONDS", 0.0)
    old, draining, new = (
        [{"worker_id": "prefill-0", "role": role, "state": state}]
        for role, state in (("prefill", "ready"), ("prefill", "draining"), ("decode", "ready"))
    )
    gateway = ScriptedGateway(old, draining, [], new)
    command.scale(["prefill-0=decode"], [], [], cast(GatewayClient, gateway), wait=60)
    assert not gateway.fleets

"""Pods are replaced as Kubernetes does it, and no stream is lost. `bench.fleet.pod_lifecycle` has 1,000 streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.fleet.pod_lifecycle import ROLES, run


@pytest.mark.stack
@pytest.mark.thorough
async def test_no_stream_is_lost_while_every_pod_is_replaced(tmp_path: Path) -> None:
    outcomes, cluster = await run(tmp_path, streams=1, concurrency=4, hurry=10, pods=1)
    assert outcomes.lost == []
    assert outcomes.good > 0
    assert cluster.ends == {"ended with code 0": len(ROLES)}

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gateway import alone as gateway
from tests.services.gateway.toy_model import write_toy_model


@pytest.mark.slow
async def test_streams_are_counted_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The toy's vocabulary is too small for the token ids that the benchmark uses with real models.
    monkeypatch.setattr(gateway, "FIRST_ID", ord("a"))
    monkeypatch.setattr(gateway, "IDS", 26)
    async with gateway.stack(write_toy_model(tmp_path / "toy"), 0.005) as gateways:
        found = [await gateway.measure(gateways, streams=3, tokens=80, way=way) for way in gateway.WAYS]
        with pytest.raises(RuntimeError, match="3 streams failed"):
            await gateway.measure(gateways, streams=3, tokens=9000)  # more than the worker's longest context
    for figures in found:
        assert figures["tokens_per_cpu_s"] > 0
        assert 0.3 < figures["chunks_per_token"] <= 1

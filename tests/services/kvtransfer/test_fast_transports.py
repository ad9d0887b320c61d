"""When the service starts, it measures transports that other hosts can use."""

from __future__ import annotations

import logging

import pytest

from paceline.services.kvtransfer.fast_transports import fast_transports
from tests.services.kvtransfer.transport_cases import arena


@pytest.mark.parametrize(("only_here", "measured"), [(False, True), (True, False)])
async def test_grpc_is_measured_where_others_reach_this_host(
    only_here: bool, measured: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    make_transports = await fast_transports("grpc", only_here)
    assert ("grpc moves" in caplog.text) is measured
    assert make_transports(arena(2, 1 << 16)) == ()

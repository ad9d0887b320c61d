from __future__ import annotations

import pytest

from paceline.services.common.credentials import Credentials
from paceline.services.kvtransfer.transports import grpc_transport
from paceline.services.kvtransfer.transports.grpc_transport import MOST_IDLE, Channels


async def test_a_channel_is_kept_while_it_is_used_and_for_a_while_after(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Channels(Credentials())
    with made.to("127.0.0.1:1") as first:
        monkeypatch.setattr(grpc_transport, "IDLE_SECONDS", -1.0)
        await made.sweep()
        with made.to("127.0.0.1:1") as again:
            assert again is first
    await made.sweep()
    with made.to("127.0.0.1:1") as another:
        assert another is not first
    await made.close()


async def test_of_many_idle_channels_only_the_newest_stay() -> None:
    made = Channels(Credentials())
    seen = {}
    with made.to("127.0.0.1:1") as used:
        for port in range(2, 4 + MOST_IDLE):
            with made.to(f"127.0.0.1:{port}") as channel:
                seen[port] = channel
        await made.sweep()
        with made.to("127.0.0.1:1") as still:
            assert still is used
        for port, kept in ((2, False), (3, False), (4, True), (3 + MOST_IDLE, True)):
            with made.to(f"127.0.0.1:{port}") as channel:
                assert (channel is seen[port]) == kept
    await made.close()

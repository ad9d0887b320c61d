"""Details of the UCX transport: its wire format, hostile peers, and machines without UCX."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import sys

import pytest

from paceline.core.errors import UnavailableError
from paceline.services.kvtransfer.transports.transport import Source
from paceline.services.kvtransfer.transports.ucx import UcxTransport, open_ucx
from paceline.services.kvtransfer.transports.ucx_wire import MOST_SLOTS, Offer, pack_request, parse_request
from tests.services.kvtransfer.transport_cases import arena, missing

TOKEN = bytes(range(16))
needs_ucx = pytest.mark.skipif(bool(missing("ucx")), reason=missing("ucx") or "UCX is there")


def test_an_offer_survives_the_wire_and_anything_else_is_no_offer() -> None:
    offer = Offer(port=4711, slot_bytes=1 << 20, token=TOKEN)
    assert Offer.parse(offer.pack()) == offer
    for wrong in (b"", offer.pack()[:-1], b"X" + offer.pack()[1:], dataclasses.replace(offer, port=0).pack()):
        with pytest.raises(ValueError, match="offer"):
            Offer.parse(wrong)


@pytest.mark.parametrize("wanted", [[], [0], [7, 3, 7], list(range(8)) * (MOST_SLOTS // 8)])
def test_a_request_survives_the_wire(wanted: list[int]) -> None:
    assert parse_request(pack_request(TOKEN, wanted), TOKEN, slots=8) == wanted


def test_a_request_without_the_token_or_beyond_the_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="token"):
        parse_request(pack_request(TOKEN, [1]), TOKEN[::-1], slots=8)
    with pytest.raises(ValueError, match="arena of 8"):
        parse_request(pack_request(TOKEN, [1, 8]), TOKEN, slots=8)
    too_many = bytearray(pack_request(TOKEN, [1]))
    too_many[16:20] = (MOST_SLOTS + 1).to_bytes(4, "big")
    with pytest.raises(ValueError, match=f"{MOST_SLOTS + 1} slots"):
        parse_request(too_many, TOKEN, slots=8)


def test_a_machine_without_ucx_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    with caplog.at_level(logging.INFO):
        assert open_ucx(arena(1, 4096)) is None
    assert "blocks go between hosts without UCX" in caplog.text
    assert "pip install 'paceline[ucx]'" in caplog.text


@needs_ucx
async def test_strangers_at_the_port_disturb_nobody() -> None:
    memory = arena(2, 4096)
    memory.slot(0)[:] = b"k" * 4096
    transport = UcxTransport(memory)
    try:
        port = Offer.parse(transport.offer()).port
        for words in (b"GET / HTTP/1.1\r\n\r\n", bytes(300), b"\xff" * 5000, b""):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(words)
        async with asyncio.timeout(30):
            await transport.read(Source("itself", "127.0.0.1:1", transport.offer()), [(0, 1)])
        assert memory.slot(1) == b"k" * 4096
    finally:
        await transport.close()


@pytest.mark.slow
@needs_ucx
@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes(3000), b"\xff" * 3000, b""])
async def test_a_port_where_something_else_listens_is_no_source(words: bytes) -> None:
    writers: list[asyncio.StreamWriter] = []

    def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(words)

    memory = arena(2, 4096)
    transport = UcxTransport(memory, silence_seconds=1)
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        offer = Offer(port, 4096, TOKEN).pack()
        async with asyncio.timeout(30):
            with pytest.raises(UnavailableError, match="something else"):
                await transport.read(Source("something else", "127.0.0.1:1", offer), [(0, 1)])
    finally:
        await transport.close()
        server.close()
        for writer in writers:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@needs_ucx
async def test_a_host_without_an_address_is_unavailable() -> None:
    transport = UcxTransport(arena(1, 4096))
    try:
        with pytest.raises(UnavailableError, match="nowhere"):
            await transport.read(Source("nowhere", "no.such.host.invalid:1", transport.offer()), [(0, 0)])
    finally:
        await transport.close()

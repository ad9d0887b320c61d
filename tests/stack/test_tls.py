"""A cluster of two hosts whose services speak TLS only, with certificates that are renewed while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from bench.common.namespaces import ONE_HOST
from bench.common.services import role_of
from paceline.services.common.certificates import CertificateFiles
from tests.authority import Authority, serial_number
from tests.services.gateway.toy_model import VOCAB_SIZE, write_toy_model
from tests.stack.cluster import Cluster
from tests.tiny_checkpoints import write_tiny

pytestmark = pytest.mark.stack

PROMPT = "a prompt of more than one block, so that its KV blocks go from host to host. " * 2


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("tls")
    model = write_toy_model(folder / "model")
    write_tiny(model, "llama", vocab_size=VOCAB_SIZE, eos_token_id=256, max_position_embeddings=512)
    files = authority.issue(folder, "127.0.0.1")
    with Cluster(folder, model, ONE_HOST, certificates=files) as running:
        workers = running.start_worker("prefill", 0, host=0), running.start_worker("decode", 0, host=1)
        running.wait_ready(*workers)
        running.start_gateway()
        yield running


def ports(cluster: Cluster) -> list[int]:
    """Return the TCP ports on which Paceline's processes listen."""
    family = [psutil.Process(each.popen.pid) for name, each in cluster.processes.items() if role_of(name) != "redis"]
    sockets = [one for process in family for one in process.net_connections("tcp")]
    return sorted({one.laddr.port for one in sockets if one.status == psutil.CONN_LISTEN})


async def served_numbers(cluster: Cluster, files: CertificateFiles) -> set[int]:
    """Return the serial numbers of the certificates that new connections to all ports get."""
    tls = ssl.create_default_context(cafile=files.ca_certs)
    tls.load_cert_chain(files.certfile, files.keyfile)
    numbers = set()
    for port in ports(cluster):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
        numbers.add(serial_number(writer.get_extra_info("ssl_object").getpeercert(binary_form=True)))
        writer.close()
    return numbers


async def test_streams_and_handoffs_go_on_while_certificates_are_renewed(
    cluster: Cluster, authority: Authority, tmp_path: Path
) -> None:
    await cluster.wait_workers(2)
    ours = authority.issue(tmp_path, "test")
    before = await served_numbers(cluster, ours)
    assert len(before) == 1
    expected = await cluster.stream(prompt=PROMPT)
    renewed = False

    def on_token(count: int) -> None:
        nonlocal renewed
        if count == 3:
            authority.issue(cluster.folder, "127.0.0.1")
            renewed = True

    again = await asyncio.gather(*(cluster.stream(on_token, PROMPT) for _ in range(3)))
    assert renewed
    assert again == [expected] * 3
    after = await served_numbers(cluster, ours)
    assert len(after) == 1
    assert not after & before
    # A worker that comes later meets the others with the new certificates.
    assert cluster.processes["prefill-0"].stop() == 0
    cluster.start_again("prefill-0")
    cluster.wait_ready("prefill-0")
    await cluster.wait_workers(2)
    assert await cluster.stream(prompt=f"new {PROMPT}") == await cluster.stream(prompt=f"new {PROMPT}")
    host = next(each for each in (await cluster.fleet())["workers"] if each["worker_id"] == "host-1")
    assert host["stats"]["transfers_grpc"] >= 2
    assert host["stats"]["transfer_failures"] == 0
    await cluster.settled()


async def test_no_port_answers_in_the_clear(cluster: Cluster) -> None:
    for greeting in (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)):
        for port in ports(cluster):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(greeting)
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionResetError):
                    answer = await reader.read()
                    assert not answer.startswith((b"HTTP/1.1 200", bytes(3))), (
                        port
                    )  # settings of HTTP/2 begin with zeros
            writer.close()


async def is_greeted(port: int, tls: ssl.SSLContext) -> bool:
    """Return whether a server of HTTP/2 sends anything to a client that has connected to it."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    except OSError:
        return False
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        async with asyncio.timeout(30):
            return bool(await reader.read(9))
    except OSError:  # also an ssl.SSLError, because the server ends the handshake after the client's side is done
        return False
    finally:
        writer.close()


async def test_no_service_talks_to_a_stranger(cluster: Cluster, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger").issue(tmp_path, "127.0.0.1")
    tls = ssl._create_unverified_context()
    tls.load_cert_chain(stranger.certfile, stranger.keyfile)
    tls.set_alpn_protocols(["h2"])
    gateway = int(cluster.url.rpartition(":")[2])
    for port in ports(cluster):
        if port != gateway:  # its clients need no certificate
            assert not await is_greeted(port, tls), port

"""The process of a kvtransfer service: makes the service from its options, and runs until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from paceline.core.cache_policy.registry import find_policy
from paceline.core.config import GIB, KV_TOKENS, KVTransferConfig, TransportChoice
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.machine import available_memory, give_back_large_memory
from paceline.core.options import parse_bytes
from paceline.proto import kvtransfer_pb2_grpc
from paceline.services.common.auth import HOST_SERVICE
from paceline.services.common.credentials import read_credentials
from paceline.services.common.lifecycle import announce_ready, reachable_address, stop_on_signals, unique_name
from paceline.services.common.member_signatures import MemberSignatures
from paceline.services.common.process_samples import ProcessSamples
from paceline.services.common.registry import Member, Registrar, connect, metrics_to_pb, read_members
from paceline.services.common.rpc import RpcServer, is_loopback
from paceline.services.kvtransfer.events import BlockEventPublisher
from paceline.services.kvtransfer.fast_transports import fast_transports
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService
from paceline.services.kvtransfer.transfers.disk_tier import DiskOptions

_AUTO_MOST = 2 * GIB
_WATCH_SECONDS = 0.5

log = logging.getLogger(__name__)


async def run(config: KVTransferConfig) -> None:
    """Serve until SIGTERM, then wait until the workers have left and their blocks were read. Raises PacelineError."""
    stop = stop_on_signals()
    give_back_large_memory()
    host_id = config.host_id or unique_name("host")
    credentials = read_credentials(config)
    options = HostOptions(
        host_id,
        _kv_memory(config),
        Path(config.arena_dir),
        config.lease_seconds,
        credentials,
        enough_tokens=KV_TOKENS if config.kv_memory == "auto" else 0,
        disk=_disk(config),
        cache_policy=find_policy(config.cache_policy),
        make_transports=await fast_transports(_transport(config), is_loopback(config.host)),
    )
    service = KVTransferService(options)
    server = RpcServer(config.host, config.port, credentials, host_id)
    kvtransfer_pb2_grpc.add_KVTransferServicer_to_server(service, server.server)
    address = server.known_as(reachable_address(config, server.bind()))
    server.known_as(HOST_SERVICE)
    client = connect(config.redis)
    signatures = MemberSignatures(credentials.secret, config.cluster)
    await service.start(
        address, lambda fingerprint: _find_hosts(client, config.cluster, signatures, host_id, fingerprint)
    )
    await server.start()
    epoch = time.time_ns()
    process = ProcessSamples()
    registrar = Registrar(
        config.redis, config.cluster, lambda: _describe(service, host_id, epoch, address, stop, process), signatures
    )
    publisher = BlockEventPublisher(config.redis, config.cluster, service.take_events, secret=credentials.secret)
    await registrar.start()
    await publisher.start()
    await server.set_ready(True)
    announce_ready(config, address)
    log.info("kvtransfer %s serves at %s, cache policy %s", host_id, address, config.cache_policy)
    try:
        while not stop.is_set():
            if not service.healthy:
                # When this service ends, its workers lose their sessions and end. Then all of them start anew.
                raise UnavailableError("the KV ledger is out of balance; see the log above")
            try:
                async with asyncio.timeout(_WATCH_SECONDS):
                    await stop.wait()
            except TimeoutError:
                continue
        registrar.announce()
        await service.departure.drain(config.drain_seconds)
    finally:
        await registrar.stop()
        await publisher.stop()
        await service.close()
        await server.close(0)
        await client.aclose()


async def _find_hosts(
    client: Redis, cluster: str, signatures: MemberSignatures, own: str, fingerprint: str
) -> list[str]:
    """Return the addresses of other hosts that are not leaving and have workers with this layout; none if Redis does
    not answer.
    """
    try:
        members = await read_members(client, cluster, signatures)
    except (RedisError, OSError) as error:
        log.warning("Redis does not answer (%s), so no hot prefixes are copied to other hosts", error)
        return []
    busy = {each.host_id for each in members if each.role in ("prefill", "decode") and each.state == "ready"}
    stay = [each for each in members if each.role == "kvtransfer" and each.state == "ready" and each.host_id in busy]
    return [each.address for each in stay if each.layout == fingerprint and each.worker_id != own]


def _transport(config: KVTransferConfig) -> TransportChoice:
    """Return the value of --transport. If services speak TLS, "auto" becomes gRPC, because UCX does not encrypt."""
    if not config.cluster_certfile:
        return config.transport
    if config.transport == "ucx":
        log.warning("UCX copies KV blocks in the clear; only gRPC speaks TLS: --transport grpc, or auto")
    return "grpc" if config.transport == "auto" else config.transport


def _kv_memory(config: KVTransferConfig) -> int:
    """Return the largest size of the arena in bytes. "auto" leaves most memory for weights and other processes."""
    if config.kv_memory != "auto":
        return parse_bytes(config.kv_memory)
    try:
        folder = os.statvfs(config.arena_dir)
    except OSError as error:
        raise ConfigError(f"cannot use {config.arena_dir} ({error.strerror}); choose another --arena-dir") from error
    room = min(available_memory() or _AUTO_MOST, folder.f_bavail * folder.f_frsize)
    return min(_AUTO_MOST, room // 4)


def _disk(config: KVTransferConfig) -> DiskOptions | None:
    return DiskOptions(Path(config.kv_disk_dir), parse_bytes(config.kv_disk_size)) if config.kv_disk_size else None


def _describe(
    service: KVTransferService,
    host_id: str,
    epoch: int,
    address: str,
    stop: asyncio.Event,
    process: ProcessSamples,
) -> Member:
    snapshot = service.snapshot()
    return Member(
        worker_id=host_id,
        role="kvtransfer",
        epoch=epoch,
        address=address,
        host_id=host_id,
        state="draining" if stop.is_set() else "ready",
        layout=snapshot.fingerprint,
        host=snapshot.report(),
        metrics=metrics_to_pb([*snapshot.samples(), *process]),
    )

"""The process of a kvtransfer service."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

from paceline.core.cache_policy.registry import find_policy
from paceline.core.config import GIB, KV_TOKENS, KVTransferConfig, TransportChoice
from paceline.core.errors import ConfigError, UnavailableError
from paceline.core.machine import available_memory, give_back_large_memory
from paceline.core.options import parse_bytes
from paceline.proto import kvtransfer_pb2_grpc
from paceline.services.common.credentials import read_credentials
from paceline.services.common.lifecycle import announce_ready, reachable_address, stop_on_signals, unique_name
from paceline.services.common.registry import Member, Registrar, metrics_to_pb
from paceline.services.common.rpc import RpcServer, is_loopback
from paceline.services.kvtransfer.disk_tier import DiskOptions
from paceline.services.kvtransfer.events import BlockEventPublisher
from paceline.services.kvtransfer.fast_transports import fast_transports
from paceline.services.kvtransfer.host_memory import HostOptions
from paceline.services.kvtransfer.service import KVTransferService

_AUTO_MOST = 2 * GIB
_WATCH_SECONDS = 0.5

log = logging.getLogger(__name__)


async def run(config: KVTransferConfig) -> None:
    """Serve until SIGTERM; the workers of the host must have ended by then. Raises PacelineError."""
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
    address = reachable_address(config, server.bind())
    await service.start(address)
    await server.start()
    epoch = time.time_ns()
    registrar = Registrar(config.redis, config.cluster, lambda: _describe(service, host_id, epoch, address))
    publisher = BlockEventPublisher(config.redis, config.cluster, service.take_events)
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
    finally:
        await registrar.stop()
        await publisher.stop()
        await service.close()
        await server.close(0)


def _transport(config: KVTransferConfig) -> TransportChoice:
    """Return --transport, so that "auto" copies nothing in the clear if services speak TLS."""
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


def _describe(service: KVTransferService, host_id: str, epoch: int, address: str) -> Member:
    snapshot = service.snapshot()
    return Member(
        worker_id=host_id,
        role="kvtransfer",
        epoch=epoch,
        address=address,
        host_id=host_id,
        layout=snapshot.fingerprint,
        host=snapshot.report(),
        metrics=metrics_to_pb(snapshot.samples()),
    )

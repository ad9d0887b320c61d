"""Options of the kvtransfer service."""

from __future__ import annotations

from paceline.core.config.service import ServiceConfig, TransportChoice
from paceline.core.options import AutoSize, Size, option


class KVTransferConfig(ServiceConfig):
    """Options of the service that owns a host's KV memory."""

    port: int = option(7300, "port to listen on; 0 takes a free port", "network", at_least=0, at_most=65535)
    kv_memory: AutoSize = option(
        "auto",
        "size of the memory for KV blocks that the workers of a host share, e.g. 4GiB; auto has room for 24,576 tokens "
        "or the longest context, whichever is more, but takes at most 2 GiB and at most a quarter of the free memory",
        "memory",
    )
    kv_disk_size: Size = option(
        "",
        "size of a file for blocks that the shared memory evicts, e.g. 64GiB, allocated at the start; default: no file",
        "memory",
    )
    kv_disk_dir: str = option("/var/tmp", "folder for the file of --kv-disk-size, on a fast disk", "memory")
    cache_policy: str = option(
        "adaptive",
        "policy that chooses which cached block the shared memory evicts. adaptive: the block that is least likely to "
        "be requested soon, by forecast or arc, whichever finds more. Others are forecast, arc, lru and the names of "
        "installed policies",
        "memory",
    )
    arena_dir: str = option("/dev/shm", "folder of the shared memory; all workers of the host must see it", "memory")
    transport: TransportChoice = option(
        "auto",
        "method of copying KV blocks between hosts. grpc: gRPC. ucx: over UCX (RDMA or TCP), which listens on all "
        "addresses of the machine. auto: ucx if it is installed, works, and --host is not a local address; else grpc, "
        "and grpc with --cluster-certfile, because UCX copies in the clear",
        "network",
    )
    host_id: str = option(
        "",
        "unique name of this host. If kvtransfer was killed, one that is started again with the same name takes over "
        "the KV memory, and running requests continue; default: a generated name, so a restart begins empty",
        "cluster",
    )
    lease_seconds: float = option(
        10.0,
        "a lease that its worker has not renewed for this many seconds ends: the worker stops the request and the "
        "gateway starts a new attempt. Blocks are given out again only when the worker has let go of them or has "
        "ended. Workers renew three times within this time",
        "limits",
        at_least=0.1,
    )

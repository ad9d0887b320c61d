"""The registry of live services in Redis, with their roles and loads. It is only a hint, and may be lost at any time.

Each service writes one key with a time-to-live and renews it. With each renewal it adds a *beat* to a stream: its name
and the version of its value. Gateways read the beats, and only values that have changed (`member_feed.py`). The value
contains the service's epoch, so that a restart under the same name counts as a new member. After a flush of Redis, the
next heartbeats restore all members. If the cluster has a secret, members are signed with it (`member_signatures.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, cast, get_args

import redis.asyncio as redis
from google.protobuf.message import DecodeError
from redis.exceptions import RedisError, ResponseError

import paceline
from paceline.core.errors import ConfigError
from paceline.core.metrics import Family, MetricKind, Sample
from paceline.core.numerics import Numerics
from paceline.proto import fleet_pb2 as pb
from paceline.proto.fleet_pb2 import (
    AdapterChange,
    AdapterReport,
    HostReport,
    KeyUse,
    LoadReport,
    MetricFamily,
    PlanReport,
    Sleep,
    TrafficReport,
    WorkReport,
)
from paceline.services.common.member_signatures import TTL_SECONDS, MemberSignatures
from paceline.services.common.redis_url import without_password
from paceline.services.common.streams import oldest_kept, remove_unusable
from paceline.services.common.tasks import end_tasks
from paceline.services.common.wire_version import OURS, WireVersions

HEARTBEAT_SECONDS = 1.0
LEFT = b""
"""The version in the last beat of a member that removes itself from Redis."""
_BEATS_SECONDS = 30.0
"""Age up to which the stream keeps beats, in seconds. Gateways read it twice a second; a lost beat does no harm."""
_MOST_BYTES = 1 << 20
"""Largest size of a member's value that is read, in bytes. A longer value must come from another program."""
_STREAM_SECONDS = 600
"""Time after a member has left until the stream expires, in seconds, so that an ended cluster leaves nothing."""

Role = Literal["gateway", "prefill", "decode", "encode", "pool", "kvtransfer", "planner", "standby"]
"""The role of a member. A standby worker has loaded the model and waits for a role."""
WORKING_ROLES: tuple[Role, ...] = ("prefill", "decode", "standby")
"""Roles between which a running worker can change."""
State = Literal["starting", "ready", "draining", "sleeping"]
_ROLES, _STATES = frozenset(get_args(Role)), frozenset(get_args(State))

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """One live service and its load."""

    worker_id: str
    role: Role
    epoch: int
    """A number that increases with every start of the service, and with every change of its role."""
    address: str
    """host:port of the member's gRPC server; of the HTTP server if the member is a gateway."""
    host_id: str
    """Id of the kvtransfer service whose arena the member uses. A handoff within one host moves no bytes."""
    state: State = "ready"
    model: str = ""
    """Digest of the model's config and tokenizer. A gateway gives requests only to workers with the same digest."""
    layout: str = ""
    """Fingerprint of the KV layout. Only workers with the same fingerprint can hand over to each other."""
    weights: str = ""
    """Digest of the model's config and weights. Only workers with the same digest continue an answer that has begun.
    "" if unknown, because the worker has not loaded the weights or is of an earlier release."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests of the files that `model` covers, by their names."""
    max_model_len: int = 0
    max_seqs: int = 0
    events: str = ""
    """Path of the Unix socket from which gateways on the same host read events; set by decode workers only."""
    load: LoadReport = dataclasses.field(default_factory=LoadReport)
    host: HostReport = dataclasses.field(default_factory=HostReport)
    """State of the host's memory; set by kvtransfer services only."""
    metrics: Sequence[MetricFamily] = ()
    keys: Sequence[KeyUse] = ()
    """Use of each API key's limits; set by gateways only."""
    traffic: TrafficReport = dataclasses.field(default_factory=TrafficReport)
    """Totals of requests by class for the planner; set by gateways only."""
    work: WorkReport = dataclasses.field(default_factory=WorkReport)
    """Steps and requests of a worker for the planner; set by prefill, decode, encode and pool workers only."""
    plan: PlanReport = dataclasses.field(default_factory=PlanReport)
    """The planner's newest decisions; set by planners only."""
    numerics: Numerics | None = None
    """Numerics of a worker; None if unknown, because the member is no worker, is starting, or is of an old release."""
    wire: WireVersions = OURS
    """Versions of the protocol between services that the member speaks."""
    release: str = paceline.__version__
    """Release of the member; "" for earlier releases, which do not name it."""
    adapters: Sequence[AdapterChange] = ()
    """Changes of the names of adapters; set by gateways only."""
    lora: AdapterReport = dataclasses.field(default_factory=AdapterReport)
    """Adapters in a worker's memory; set by workers that take adapters only."""
    sleep: Sleep = dataclasses.field(default_factory=Sleep)
    """Of a worker: the sleep that it has reached. Of a gateway: the newest sleep that it knows to be wanted."""
    beats: bool = True
    """Whether the member writes beats. Members of earlier releases write none."""

    def to_bytes(self) -> bytes:
        """Serialize the member as a message, which `MemberSignatures` then signs for Redis."""
        values = {name: getattr(self, name) for name in _FIELDS}
        values["numerics"] = self.numerics and pb.Numerics(**dataclasses.asdict(self.numerics))
        values["wire"] = self.wire.to_pb()
        return pb.Member(**values).SerializeToString(deterministic=True)

    @staticmethod
    def from_bytes(data: bytes) -> Member | None:
        """Parse a serialized member; None if it has another format. Fields of newer releases are ignored."""
        try:
            message = pb.Member.FromString(data)
        except DecodeError:
            return None
        if not message.worker_id or message.role not in _ROLES or message.state not in _STATES:
            return None
        values = {name: getattr(message, name) for name in _FIELDS}
        parsed = {"numerics": _numerics_from_pb(message.numerics), "wire": WireVersions.from_pb(message.wire)}
        return Member(**{**values, **parsed, "files": dict(message.files)})


_FIELDS = tuple(field.name for field in dataclasses.fields(Member))


def _numerics_from_pb(message: pb.Numerics) -> Numerics | None:
    values = message.instruction_set, message.dtype, message.quantization
    return Numerics(*values, message.implementation or "native") if all(values) else None


_KINDS: dict[MetricKind, pb.MetricKind.ValueType] = {
    "counter": pb.METRIC_KIND_COUNTER,
    "gauge": pb.METRIC_KIND_GAUGE,
    "histogram": pb.METRIC_KIND_HISTOGRAM,
}
_NO_FAMILY = Family("", "", "gauge")


def metrics_to_pb(samples: Iterable[Sample]) -> list[pb.MetricFamily]:
    """Return the metric families of samples, for the report of the member that counted them."""
    families: dict[str, pb.MetricFamily] = {}
    for sample in samples:
        family = sample.family or _NO_FAMILY
        if family.name not in families:
            kind = _KINDS[family.kind]
            families[family.name] = pb.MetricFamily(
                name=family.name, help=family.help, kind=kind, has_role=family.has_role
            )
        suffix = "_total" if family.kind == "counter" else sample.suffix
        families[family.name].samples.add(figure=sample.figure, value=sample.value, labels=sample.labels, suffix=suffix)
    return list(families.values())


def connect(url: str) -> redis.Redis:
    """Return a Redis client whose calls time out soon, so that an unreachable Redis does not delay requests.

    With TLS (rediss://), options of the URL name files, such as ssl_ca_certs. Raises ConfigError if one is not valid.
    """
    try:
        client: redis.Redis = redis.Redis.from_url(url, socket_timeout=1.0, socket_connect_timeout=1.0)
        client.connection_pool.make_connection()  # type: ignore[no-untyped-call]  # checks the options only
    except (ValueError, TypeError, RedisError) as error:
        # The text of a ValueError may have a part of the password in it.
        reason = "write redis:// or rediss://HOST:PORT/0, or unix://PATH" if isinstance(error, ValueError) else error
        raise ConfigError(f"--redis {without_password(url)} is not a URL of Redis: {reason}") from None
    return client


def reason(error: Exception) -> str:
    """Return a phrase for a message that says why Redis does not answer."""
    text = str(error) or type(error).__name__
    if "authenticat" in text.lower() or "WRONGPASS" in text or "invalid username-password" in text:
        return "it wants a password: --redis-password-file"
    return text


def member_key(cluster: str, worker_id: str) -> str:
    """Return the Redis key of a member's value."""
    return f"paceline:{cluster}:member:{worker_id}"


def names_key(cluster: str) -> str:
    """Return the Redis key of the set of all members' names, which makes a search through all keys unnecessary."""
    return f"paceline:{cluster}:members"


def beats_key(cluster: str) -> str:
    """Return the Redis key of the stream of beats. An entry maps names of members to versions of their values."""
    return f"paceline:{cluster}:beats"


async def read_values(client: redis.Redis, keys: Sequence[str]) -> list[bytes | None]:
    """Return the value at each key; None if the value is gone, too long, or of another type. Raises RedisError."""
    async with client.pipeline(transaction=False) as pipeline:
        for key in keys:
            pipeline.getrange(key, 0, _MOST_BYTES)  # one byte more than a member has; "" if there is no value
        found = await pipeline.execute(raise_on_error=False)
    return [value if isinstance(value, bytes) and 0 < len(value) <= _MOST_BYTES else None for value in found]


async def read_members(client: redis.Redis, cluster: str, signatures: MemberSignatures) -> list[Member]:
    """Return all members that Redis lists now, sorted by name. Raises RedisError."""
    # SORT would need only one round trip, but Redis denies it to users who may not read all keys.
    names = sorted(await cast(Awaitable[set[bytes]], client.smembers(names_key(cluster))))
    if not names:
        return []
    # A name that is not UTF-8 is not ours. Under its decoded form there is no value, so it is taken off the list.
    texts = [name.decode(errors="replace") for name in names]
    values = await read_values(client, [member_key(cluster, text) for text in texts])
    if ended := [name for name, value in zip(names, values) if value is None]:
        await client.srem(names_key(cluster), *ended)
    opened = (signatures.open(text, value) for text, value in zip(texts, values) if value is not None)
    members = (Member.from_bytes(message) for message in opened if message is not None)
    return sorted((member for member in members if member is not None), key=lambda member: member.worker_id)


async def read_ages(client: redis.Redis, cluster: str, members: Sequence[Member]) -> list[float]:
    """Return the age of each member's value, in seconds; TTL_SECONDS if the value is gone.

    Raises RedisError.
    """
    async with client.pipeline(transaction=False) as pipeline:
        for member in members:
            pipeline.pttl(member_key(cluster, member.worker_id))
        left: list[int] = await pipeline.execute()
    return [TTL_SECONDS - max(0, milliseconds) / 1000 for milliseconds in left]


async def write_member(
    client: redis.Redis, cluster: str, member: Member, signatures: MemberSignatures, last_beat: bytes = b""
) -> bytes:
    """Write a member's value and a beat, and trim old beats. Return the beat's id. Raises RedisError.

    Args:
        last_beat: id of an earlier beat, whose time decides which beats are trimmed; empty to trim none.
    """
    name = member.worker_id
    names, beats = names_key(cluster), beats_key(cluster)
    value, text = signatures.sign(name, member.to_bytes())
    minid = oldest_kept(last_beat, _BEATS_SECONDS)
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.set(member_key(cluster, name), value, px=int(TTL_SECONDS * 1000))
        pipeline.sadd(names, name)
        pipeline.xadd(beats, {name: text}, minid=minid, approximate=True)
        results = await pipeline.execute(raise_on_error=False)
    for key, result in zip(("", names, beats), results, strict=True):
        if isinstance(result, ResponseError) and key:
            await remove_unusable(client, key, result)
        if isinstance(result, Exception):
            raise result
    return bytes(results[-1])


async def remove_member(client: redis.Redis, cluster: str, name: str) -> None:
    """Remove a member's value, and write a last beat that says so. Raises RedisError."""
    async with client.pipeline(transaction=False) as pipeline:
        pipeline.delete(member_key(cluster, name))
        pipeline.srem(names_key(cluster), name)
        pipeline.xadd(beats_key(cluster), {name: LEFT})
        pipeline.expire(beats_key(cluster), _STREAM_SECONDS)  # if others are left, their next beats make it again
        await pipeline.execute()


class Registrar:
    """A task that keeps one member in Redis from `start` to `stop`."""

    def __init__(self, url: str, cluster: str, describe: Callable[[], Member], signatures: MemberSignatures) -> None:
        self._client = connect(url)
        self._cluster = cluster
        self._signatures = signatures
        self._describe = describe
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.create_task(self._beat(), name="registrar")

    async def stop(self) -> None:
        """Remove the member from Redis. Stopping twice is no error."""
        if self._task is None:
            return
        await end_tasks(self._task)
        self._task = None
        with contextlib.suppress(RedisError, OSError):
            await remove_member(self._client, self._cluster, self._describe().worker_id)
        await self._client.aclose()

    def announce(self) -> None:
        """Write the member now instead of with the next heartbeat, for example because it begins to drain."""
        self._wake.set()

    async def _beat(self) -> None:
        reachable, beat = True, b""
        while True:
            try:
                beat = await write_member(self._client, self._cluster, self._describe(), self._signatures, beat)
                if not reachable:
                    log.info("Redis answers again")
                reachable = True
            except (RedisError, OSError) as error:
                if reachable:
                    log.warning("Redis does not answer (%s); going on without it", reason(error))
                reachable = False
            except Exception:
                log.exception("unexpected error in a heartbeat")
            # Random, so that services that started together, or found Redis again together, do not stay in step.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_SECONDS * random.uniform(0.9, 1.1)):
                    await self._wake.wait()
            self._wake.clear()

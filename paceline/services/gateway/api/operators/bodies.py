"""Bodies of answers to operators, as `/openapi.json` shows them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from paceline.services.gateway.api.api_schema import AnswerBody

Json = dict[str, Any]


class Version(AnswerBody):
    version: str


class ServerInfo(AnswerBody):
    version: str
    model: str
    tasks: list[str]
    max_model_len: int
    started: int
    members: dict[str, int]
    """Number of services that the gateway can reach, by role."""
    numerics: list[str]
    """The numerics of all workers, such as "avx2 bfloat16 mxfp4": instruction set, dtype, and format of the weights."""
    weight_bytes: dict[str, int]
    """Bytes of the weights in memory of one worker, by format. Workers of a host may share them."""
    options: Json


class Load(AnswerBody):
    server_load: int
    """Number of requests that wait or run."""


class FleetWorker(AnswerBody):
    model_name: str
    """Name of the worker's model, as clients send it."""
    worker_id: str
    role: str
    epoch: int
    address: str
    host_id: str
    state: str
    model: str
    """Digest of the model that the worker has loaded."""
    max_model_len: int
    max_seqs: int
    numerics: str | None
    release: str
    wire: str
    """Versions of the protocol between services that the worker speaks, such as "1-2"."""
    running: int
    waiting: int
    in_flight: int
    stats: dict[str, float]


class LeaseKey(AnswerBody):
    request_id: str
    attempt: int
    generation: int


class LeaseBody(AnswerBody):
    key: LeaseKey
    state: str
    owner: str
    writer: str
    blocks: int
    blocks_by_group: dict[str, int]
    shared_blocks: int
    filled_tokens: int
    token_count: int
    age_ms: int
    expires_in_ms: int


class OwnedBlocks(AnswerBody):
    """Blocks of one owner's leases that are in one state."""

    owner: str
    state: str
    blocks: int


class FleetHost(AnswerBody):
    model_name: str
    worker_id: str
    address: str
    host_id: str


class SilentHost(FleetHost):
    error: str
    """Reason why the host's ledger could not be read."""


class HostLedger(FleetHost):
    hit_rate: float | None
    """Fraction of the looked-up prompt tokens that were found in the cache; None if no token was looked up."""
    encoding_hit_rate: float | None
    """Fraction of the looked-up encoder rows (of images, frames and audio) that were cached; None without look-ups."""
    total: int
    free: int
    held: int
    in_flight: int
    cached: int
    balanced: bool
    expired_leases: int
    evicted_blocks: int
    hinted_blocks: int
    """Number of blocks for which hints said that requests will need them again."""
    hinted_kept_blocks: int
    """Number of hinted blocks that were requested again while they were cached."""
    hinted_wasted_blocks: int
    """Number of hinted blocks that were evicted before a request needed them."""
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    encoding_queries_rows: int
    encoding_hits_rows: int
    slot_bytes: int
    leases_left_out: int
    blocks_left_out: int
    used_by_group: dict[str, int]
    """Number of blocks that leases have, by group. The sum is held + in_flight."""
    cached_by_group: dict[str, int]
    """Number of cached blocks that could be evicted, by group. The sum is cached."""
    blocks_of_leases: int
    adds_up: bool
    owners: list[OwnedBlocks]
    """Blocks that are held or in flight, by owner and state. Their number is held + in_flight."""
    leases: list[LeaseBody]


class PlannedChange(AnswerBody):
    age_seconds: float
    decision: str
    acted: bool


class PlannerState(AnswerBody):
    model_name: str
    worker_id: str
    leads: bool
    advisory: bool
    pinned: dict[str, int]
    decisions: list[PlannedChange]


class AdapterState(AnswerBody):
    model_name: str
    """Name of the model that the adapter changes."""
    name: str
    digest: str
    """Digest of the adapter's content, in hexadecimal digits."""
    running: int
    """Number of sequences of this gateway that run with it."""
    waiting: int
    """Number of sequences of this gateway that wait for a worker to run with it."""
    workers: list[str]
    """Ids of the workers that have it in memory, by their last reports."""


class FleetState(AnswerBody):
    workers: list[FleetWorker]
    hosts: list[HostLedger | SilentHost]
    waiting: int
    adapters: list[AdapterState]
    """At most 50 adapters of each model. Those that sequences use come first."""
    planners: list[PlannerState]


class WorkerSteps(AnswerBody):
    worker_id: str
    role: str
    host_id: str
    epoch: int
    max_batched_tokens: int
    takes_turns: bool
    """Whether the worker shares its cores with other workers, and takes turns with them."""
    itl_target_seconds: float
    """Target for the inter-token latency that the turns aim at, in seconds; 0 if no target was set."""
    steps: list[list[float]]
    """Newest steps, the newest last. Each step is a list of the numbers that FleetSteps.fields names."""


class HostBlocks(AnswerBody):
    host_id: str
    token_bytes: float
    """Size of the KV of one token, in bytes."""
    fetched_bytes: int
    """Bytes that the host has fetched from other hosts since its start."""
    fetch_seconds: float
    """Time that fetches from other hosts took since the host's start, in seconds."""


class FleetSteps(AnswerBody):
    fields: list[str]
    """number: of the step, among all of the worker. ended: seconds on the worker's own clock. seconds: length of the
    step. prompt_tokens: computed tokens of prompts. prompt_pairs: sum of the tokens to which they attend. sequences:
    those that got a token after their prompt. drafts: those that were verified for them. context_tokens: sum of the
    tokens to which these attend."""
    workers: list[WorkerSteps]
    hosts: list[HostBlocks]


class Trace(AnswerBody):
    request_id: str
    own_id: str
    session_id: str | None
    earlier: list[str]
    state: Literal["running", "finished", "failed", "client gone"]
    arrived: datetime
    ms: float
    model: str
    endpoint: str
    streamed: bool
    asked: Json
    sequences: int
    parts: list[Json]
    parts_left_out: int


class RequestLine(AnswerBody):
    request_id: str
    own_id: str
    state: Literal["running", "finished", "failed", "aborted", "client gone"]
    arrived: datetime
    ms: float
    ttft_ms: float | None
    model: str
    endpoint: str
    streamed: bool
    sequences: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    attempts: int
    workers: list[str]
    """Names of the workers of the request's last attempt."""


class RequestList(AnswerBody):
    requests: list[RequestLine]
    """The gateway's requests, the newest first."""


class RoleState(AnswerBody):
    wanted: int
    ready: int
    draining: int
    given_up: int
    """Number of workers that ended again and again, so that the supervisor no longer starts them."""


class Scale(AnswerBody):
    """The workers of each role. A stack leaves out roles for which its model has no use."""

    prefill: RoleState | None = None
    decode: RoleState | None = None
    encode: RoleState | None = None
    pool: RoleState | None = None


class SleepState(AnswerBody):
    """Whether a model's workers sleep, or are told to sleep, at least in part."""

    is_sleeping: bool


class CacheReset(AnswerBody):
    """Numbers of blocks that were forgotten."""

    blocks: int
    disk_blocks: int
    device_blocks: int

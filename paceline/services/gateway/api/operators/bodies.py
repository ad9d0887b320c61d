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
    max_model_len: int
    started: int
    members: dict[str, int]
    """Number of services that can be reached, by role."""
    options: Json


class Load(AnswerBody):
    server_load: int
    """Requests that wait or run."""


class FleetWorker(AnswerBody):
    model_name: str
    """The model of its fleet, as clients call it."""
    worker_id: str
    role: str
    epoch: int
    address: str
    host_id: str
    state: str
    model: str
    """Digest of the model that it has loaded."""
    max_model_len: int
    max_seqs: int
    numerics: str | None
    release: str
    wire: str
    """Versions of the protocol between services, such as "1-2"."""
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
    """Blocks of an owner's leases in one state."""

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
    """Why there is no ledger."""


class HostLedger(FleetHost):
    hit_rate: float | None
    """Share of prompt tokens that were found in the cache, among those that were looked up; None if there were none."""
    encoding_hit_rate: float | None
    """The same for rows of encodings of images, frames and audio."""
    total: int
    free: int
    held: int
    in_flight: int
    cached: int
    balanced: bool
    expired_leases: int
    evicted_blocks: int
    hinted_blocks: int
    """Blocks about which there were hints that requests need them again."""
    hinted_kept_blocks: int
    """Number of these that were requested again while they were cached."""
    hinted_wasted_blocks: int
    """Number of these that were evicted before."""
    prefix_queries_tokens: int
    prefix_hits_tokens: int
    encoding_queries_rows: int
    encoding_hits_rows: int
    slot_bytes: int
    leases_left_out: int
    blocks_left_out: int
    used_by_group: dict[str, int]
    """Blocks that leases have. Their sum is held + in_flight."""
    cached_by_group: dict[str, int]
    """Blocks that are cached and could be evicted. Their sum is cached."""
    blocks_of_leases: int
    adds_up: bool
    owners: list[OwnedBlocks]
    """Blocks that are held or in flight, by owner and state. Their sum is held + in_flight."""
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


class FleetState(AnswerBody):
    workers: list[FleetWorker]
    hosts: list[HostLedger | SilentHost]
    waiting: int
    planners: list[PlannerState]


class WorkerSteps(AnswerBody):
    worker_id: str
    role: str
    host_id: str
    epoch: int
    max_batched_tokens: int
    takes_turns: bool
    """Whether it shares its cores with other workers, and takes turns with them."""
    itl_target_seconds: float
    """Target for the time between two tokens by which they take turns; 0 if none was given."""
    steps: list[list[float]]
    """Newest steps in order, each with the numbers that FleetSteps.fields names."""


class HostBlocks(AnswerBody):
    host_id: str
    token_bytes: float
    """Bytes of KV for each token of a context."""
    fetched_bytes: int
    """Bytes that the host has fetched from other hosts since its start."""
    fetch_seconds: float
    """Time that these fetches took."""


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
    """Workers that took part last, by name."""


class RequestList(AnswerBody):
    requests: list[RequestLine]
    """The newest first."""


class RoleState(AnswerBody):
    wanted: int
    ready: int
    draining: int
    given_up: int
    """Workers that kept ending, so that the supervisor does not start them any more."""


class Scale(AnswerBody):
    prefill: RoleState
    decode: RoleState
    encode: RoleState


class CacheReset(AnswerBody):
    """Numbers of blocks that were forgotten."""

    blocks: int
    disk_blocks: int
    device_blocks: int

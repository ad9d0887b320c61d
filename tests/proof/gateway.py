"""The gateway (runner.py, attempt_starter.py and attempt.py of services/gateway). It starts attempts, connects their
two workers, and starts another attempt if one fails. A worker learns later that an attempt was given up, in a move of
its own (`worker.cancel`)."""

from __future__ import annotations

from paceline.core.types import Key
from tests.proof import worker
from tests.proof.parties import DECODE, ENCODE, PREFILL, READ, Asked, Job, Transfer
from tests.proof.world import World, request_id

NOBODY = -1
"""Prefill worker of an attempt whose decode worker computes the prompt itself."""


def start(world: World, index: int, decoder: int, prefiller: int) -> None:
    """Begin an attempt: its decode worker reserves blocks."""
    asked = world.asked[index]
    key = Key(request_id(index, asked.life), asked.tries + 1, 1)
    world.asked[index] = asked._replace(
        tries=key.attempt, phase="admitting", prefiller=prefiller, opened=None, filled=None, encoded=""
    )
    place = world.setup.place(decoder)
    job = Job(DECODE, place, world.sessions[decoder], index, key, "reserving")
    computes_here = prefiller == NOBODY or world.setup.place(prefiller) == place
    worker.reserve(world, job, world.setup.prefix_source(index, place) if computes_here else None)


def call_prefill(world: World, index: int, another: bool = False) -> None:
    """Call the prefill worker after the decode worker's admission. It opens the decode worker's lease, or reserves one
    of its own if it is on another host."""
    asked, decode = world.asked[index], world.job(DECODE, index)
    assert decode is not None
    world.asked[index] = asked._replace(phase="prefilling")
    place = world.setup.place(asked.prefiller)
    job = Job(PREFILL, place, world.sessions[asked.prefiller], index, decode.key, "opening", another=another)
    if place == decode.host:
        world.send(world.put(job), "open")
    else:
        job = job._replace(phase="reserving", reserved=True)
        worker.reserve(world, job, world.setup.prefix_source(index, place))


def call_prefill_for_another_prompt(world: World, index: int) -> None:
    """Call the prefill worker with another prompt than the decode worker's."""
    call_prefill(world, index, another=True)


def prefill_here(world: World, index: int) -> None:
    """Let the decode worker, which has admitted the request, compute the prompt too."""
    decode = world.job(DECODE, index)
    assert decode is not None
    world.asked[index] = world.asked[index]._replace(phase="decoding")
    worker.begin(world, decode._replace(alone=True))


def call_encode(world: World, index: int, encoder: int) -> None:
    """Have the encoding of the request computed, by a worker on the host of its prefill worker."""
    asked = world.asked[index]
    world.asked[index] = asked._replace(encoded="called")
    key = Key(request_id(index, asked.life, ENCODE), asked.tries, 1)
    job = Job(ENCODE, world.setup.place(encoder), world.sessions[encoder], index, key, "reserving")
    world.send(world.put(job), "reserve")


def tell_ready(world: World, index: int) -> None:
    """Tell the prefill worker that the encoding is cached on its host. The worker leases the cached blocks."""
    asked, prefill = world.asked[index], world.job(PREFILL, index)
    assert prefill is not None
    world.asked[index] = asked._replace(encoded="told")
    key = Key(request_id(index, asked.life, READ), asked.tries, 1)
    world.send(world.put(Job(READ, prefill.host, prefill.session, index, key, "pinning")), "pin")


def call_fetch(world: World, index: int) -> None:
    """Tell the decode worker from which host its kvtransfer can fetch the blocks."""
    asked, decode = world.asked[index], world.job(DECODE, index)
    assert decode is not None
    assert asked.opened is not None
    world.put(decode, fetch="called")
    there = world.setup.place(asked.prefiller)
    transfer = Transfer(index, decode.host, there, decode.session, decode.id, decode.key, asked.opened)
    world.transfers[transfer.id] = transfer


def hand_over(world: World, index: int) -> None:
    """Tell the first token to the decode worker, which has its blocks."""
    decode = world.job(DECODE, index)
    assert decode is not None
    world.asked[index] = world.asked[index]._replace(phase="decoding")
    worker.begin(world, decode)


def fail(world: World, index: int) -> None:
    """Give up an attempt that cannot go on, or of which the gateway believes this, for example after a silence."""
    asked = world.asked[index]
    failures = asked.failures + 1
    phase = "waiting" if failures < world.setup.attempts else "failed"
    world.asked[index] = asked._replace(failures=failures, phase=phase, opened=None, filled=None, encoded="")


def restart(world: World) -> None:
    """Restart the gateway. All its calls break, and clients send their requests again with new ids."""
    world.asked = [
        Asked(life=asked.life + 1) if asked.phase not in ("done", "failed") else asked for asked in world.asked
    ]


# ---- conditions


def is_admitted(world: World, index: int) -> bool:
    job = world.job(DECODE, index)
    return world.asked[index].phase == "admitting" and job is not None and job.phase == "admitted"


def may_hand_over(world: World, index: int) -> bool:
    asked, job = world.asked[index], world.job(DECODE, index)
    if job is None or asked.phase != "prefilling" or asked.filled is None or job.phase != "adopted":
        return False
    return job.fetch == "answered" or job.host == world.setup.place(asked.prefiller)


def may_call_fetch(world: World, index: int) -> bool:
    asked, job = world.asked[index], world.job(DECODE, index)
    if job is None or asked.phase != "prefilling" or asked.opened is None or job.phase != "admitted" or job.fetch:
        return False
    return job.host != world.setup.place(asked.prefiller) and not world.hosts[job.host].away


def may_call_encode(world: World, index: int) -> bool:
    asked = world.asked[index]
    return bool(world.request(index).media) and _computes_prompt(world, index) and not asked.encoded


def may_tell_ready(world: World, index: int) -> bool:
    encode = world.job(ENCODE, index)
    is_cached = encode is not None and encode.phase == "holding"
    return world.asked[index].encoded == "called" and is_cached and _computes_prompt(world, index)


def needs_encoding(world: World, encode: Job) -> bool:
    """Return whether the prompt that needs an encoding is not computed yet, as far as the gateway knows."""
    asked = world.asked[encode.request]
    return world.is_current(encode) and asked.phase == "prefilling" and asked.filled is None


def _computes_prompt(world: World, index: int) -> bool:
    job = world.job(PREFILL, index)
    return world.asked[index].phase == "prefilling" and job is not None and job.phase == "writing"


def sees_failure(world: World, index: int) -> bool:
    """Return whether a worker that the attempt needs has no job for it any more."""
    asked = world.asked[index]
    if not asked.runs:
        return False
    if asked.encoded and _computes_prompt(world, index):
        needed = (ENCODE, READ) if asked.encoded == "told" else (ENCODE,)
        if any(world.job(role, index) is None for role in needed):
            return True
    prefilled = asked.phase != "prefilling" or asked.filled is not None
    return world.job(DECODE, index) is None or not (prefilled or world.job(PREFILL, index) is not None)

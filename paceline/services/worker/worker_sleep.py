"""A worker's sleep: it takes no work and gives memory back, and its process, session and place in the cluster stay.

    awake ──set──▶ takes nothing new, its requests end or move ──▶ asleep ──set──▶ awake

A worker that sleeps in part, such as after `wake_up?tags=weights`, takes no work either.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from paceline.core.errors import BusyError, DrainingError, InvalidRequestError
from paceline.core.machine import trim_heap
from paceline.models.files.weight_maps import WeightMaps
from paceline.proto.fleet_pb2 import Sleep
from paceline.services.common.tasks import end_tasks
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.worker_role import WorkerRole

LEVELS = (0, 1, 2)
"""Levels of the weights' sleep, see `Sleep.weights`."""
MODES = ("wait", "abort", "keep")
"""What may happen to running requests. For a worker, `abort` is `wait`: gateways end the requests."""
_LOOK_SECONDS = 0.1
"""Interval at which a worker that waits for its requests looks for a newer wish, in seconds."""

log = logging.getLogger(__name__)


class Sleeping(Protocol):
    """The part of a worker that its sleep needs. All methods are called while no request runs."""

    admission: WorkerAdmission

    def check_sleep(self, wish: Sleep) -> None:
        """Raise InvalidRequestError if the worker cannot give the parts of its memory back that shall sleep."""

    async def sleep_weights(self, level: int) -> None:
        """Give the memory of the weights back.

        Args:
            level: 1 or 2, see `Sleep.weights`.
        """

    async def wake_weights(self) -> None:
        """Bring the weights back into memory. Raises PacelineError if this fails."""

    async def sleep_blocks(self) -> None:
        """Forget cached blocks, and give the memory of KV blocks back.

        Raises PacelineError if this fails. A part of the memory may be given back then, until `wake_blocks`.
        """

    async def wake_blocks(self) -> None:
        """Allocate the memory of KV blocks again. Raises BusyError if there is too little memory now."""


def check_maps(maps: WeightMaps | None) -> None:
    """Raise InvalidRequestError if the weights are not mapped from files.

    Args:
        maps: the maps of the worker's weights; None if it has none.
    """
    if maps is None:
        raise InvalidRequestError(
            "this worker's weights are in memory of its own or of a GPU, and it cannot give them back; only workers on "
            "a CPU with --packed-dir sleep"
        )
    maps.check()


async def give_back_weights(maps: WeightMaps | None, level: int) -> None:
    """Give the memory of mapped weights back, and free what earlier requests have left. `check_maps` has passed.

    Args:
        level: 1 or 2, see `Sleep.weights`.
    """
    assert maps is not None
    size = await asyncio.to_thread(maps.give_back, from_cache=level == LEVELS[-1])
    trim_heap()
    log.info("%d bytes of weights are given back", size)


async def take_back_weights(maps: WeightMaps | None) -> None:
    """Bring mapped weights back into memory."""
    assert maps is not None
    await asyncio.to_thread(maps.take_back)


class WorkerSleep:
    """The sleep of one worker, and the newest wish for it.

    Args:
        role: the worker's role, which tells the cluster of changes.
    """

    def __init__(self, worker: Sleeping, role: WorkerRole) -> None:
        self.state = Sleep()
        """The sleep that the worker has reached."""
        self._worker = worker
        self._role = role
        self._wanted = Sleep()
        self._task: asyncio.Task[None] | None = None

    def check(self, wish: Sleep) -> None:
        """Raise InvalidRequestError if the wish is not valid, or if the worker cannot sleep so."""
        if wish.weights not in LEVELS or wish.mode not in ("", *MODES):
            raise InvalidRequestError(f"level {wish.weights} with mode {wish.mode!r} is no sleep that workers know")
        self._worker.check_sleep(wish)

    async def set(self, wish: Sleep) -> None:
        """Sleep or wake as it is wanted. Return when this is done, or when a newer wish has replaced this one.

        Does nothing if a newer wish is known. A wish that failed may be repeated.

        Raises:
            InvalidRequestError: the wish is not valid, or the worker cannot sleep.
            BusyError: there is too little memory to wake now, or requests or blocks do not end.
            DrainingError: the worker ends, or is about to get another role.
            PacelineError: memory could not be given back, or could not be had again.
        """
        has_failed = self._task is not None and self._task.done() and self._task.exception() is not None
        if wish.changed > self._wanted.changed or (wish.changed == self._wanted.changed and has_failed):
            self.check(wish)
            self._wanted = wish
            self._task = asyncio.create_task(self._follow(wish, self._task), name="sleep")
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """End a change under way, because the worker ends."""
        if self._task is not None:
            await end_tasks(self._task)

    async def _follow(self, wish: Sleep, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))  # memory is given back and taken again in one order only
        if self._wanted is not wish:
            return
        admission, is_sleep = self._worker.admission, bool(wish.weights or wish.kv_cache)
        if admission.draining:
            raise DrainingError("this worker is draining")
        try:
            if is_sleep:
                admission.asleep = True
                await self._role.announce()
                if not await self._is_idle(wish):
                    return  # the newer wish decides what follows
            await self._change_memory(wish)
        finally:
            if self._wanted is wish:
                admission.asleep = bool(self.state.weights or self.state.kv_cache)
            await self._role.announce()
        log.info("sleeps" if is_sleep else "is awake")

    async def _is_idle(self, wish: Sleep) -> bool:
        """Wait until no request runs. Return False if a newer wish comes before."""
        admission = self._worker.admission
        if wish.mode == "keep":
            await self._move(admission)
        while self._wanted is wish:
            if await admission.is_idle_within(_LOOK_SECONDS):
                return True
        return False

    async def _move(self, admission: WorkerAdmission) -> None:
        """Give all requests back to their gateways, where they wait. Raises BusyError if they do not end."""
        idle = await admission.drain(0)
        # Gateways remember that a member has drained until it has a new epoch.
        self._role.renew()
        admission.reopen()
        if not idle:
            raise BusyError("the worker's requests do not end, so it cannot sleep")

    async def _change_memory(self, wish: Sleep) -> None:
        """Give memory back and take it again, until it is as wanted."""
        reached = self.state
        # Without the instant of a wish, because nobody has wished for what is between two wishes.
        self.state = state = Sleep(weights=reached.weights, kv_cache=reached.kv_cache, by_itself=reached.by_itself)
        try:
            await self._change_parts(state, wish)
        except Exception:
            # It stays so until it is told again. A gateway that starts meanwhile and knows no newer wish leaves it so,
            # and knows whether a request wakes it.
            state.changed = reached.changed
            raise
        self.state = wish

    async def _change_parts(self, state: Sleep, wish: Sleep) -> None:
        """Bring the parts of `state` to those of `wish` one by one. Keep count in `state`, because any may fail."""
        worker = self._worker
        if state.kv_cache and not wish.kv_cache:
            await worker.wake_blocks()
            state.kv_cache = False
        if wish.weights < state.weights:
            await worker.wake_weights()
            state.weights = 0
        if wish.kv_cache and not state.kv_cache:
            state.kv_cache = True  # for as long as a part of the memory may be missing
            try:
                await worker.sleep_blocks()
            except Exception:
                await worker.wake_blocks()
                state.kv_cache = False
                raise
        if wish.weights > state.weights:
            await worker.sleep_weights(wish.weights)
            state.weights = wish.weights

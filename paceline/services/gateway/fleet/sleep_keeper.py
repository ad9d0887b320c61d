"""Keeps the sleep of one model's workers as it is wanted: tells workers, and lets an idle model sleep by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from paceline.core.errors import InvalidRequestError, PacelineError, UnavailableError
from paceline.proto import worker_pb2_grpc
from paceline.proto.fleet_pb2 import Sleep
from paceline.services.common.registry import Role
from paceline.services.common.rpc_errors import unmapped_error
from paceline.services.common.tasks import end_tasks, heeding_cancellation, is_cancelled
from paceline.services.gateway.fleet.fleet import Fleet
from paceline.services.gateway.fleet.remote_worker import RemoteWorker
from paceline.services.gateway.fleet.sleep_book import SleepBook, agree, is_sleep

_ORDER: tuple[tuple[Role, ...], ...] = (("decode",), ("prefill", "standby", "pool"), ("encode",))
"""The order in which workers fall asleep. A running request is on a decode worker from its beginning to its end, and
may need workers of the later roles until then.
"""
_CHECK_SECONDS = 5.0
"""Longest wait until a worker has said whether it can sleep, in seconds. A worker that is silent is told anyway."""

log = logging.getLogger(__name__)


class ReplacedSleepError(PacelineError):
    """A newer wish for the sleep of the same model came before all workers had fulfilled this one."""


class SleepKeeper:
    """The sleep of one model's workers, as one gateway sees it.

    All gateways of the model do the same. The newest wish counts, a worker may be told twice, and a worker that was
    restarted is told again. So gateways may come and go.

    Args:
        after: seconds without requests after which the model sleeps by itself; 0 for never.
        is_used: returns whether a request of the model waits or runs at this gateway.
        abort: ends all requests of the model at this gateway.
        announce: tells the cluster this gateway's newest wish.
    """

    def __init__(
        self,
        fleet: Fleet,
        after: float,
        *,
        is_used: Callable[[], bool],
        abort: Callable[[], None],
        announce: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book = SleepBook()
        self._fleet = fleet
        self._after = after
        self._is_used, self._abort, self._announce = is_used, abort, announce
        self._clock = clock
        self._used = clock()
        """Instant at which the model was last seen to be used, or to wake."""
        self._arrivals = 0
        self._telling: asyncio.Task[None] | None = None
        self._told = Sleep()
        """The wish of the newest task that tells workers."""
        self._refusal: PacelineError | None = None
        """The error with which a worker refused the newest wish; None if none did."""

    @property
    def is_asleep(self) -> bool:
        """Whether the workers sleep, or shall sleep, at least in part."""
        return is_sleep(self.book.wish)

    @property
    def wakes_when_used(self) -> bool:
        """Whether the model sleeps until a request comes."""
        return self.is_asleep and self.book.wish.by_itself

    async def want(self, weights: int, kv_cache: bool, mode: str = "") -> None:
        """Let all workers sleep or wake, and wait until they have. The mode of a sleep is that of `Sleep`.

        Raises:
            ReplacedSleepError: a newer wish came meanwhile, so that this one does not count any more.
            InvalidRequestError: a worker cannot sleep, so nothing happens. If it has come just now, all workers wake
                again.
            UnavailableError: a worker cannot do it now. The gateways go on trying.
        """
        if weights or kv_cache:
            await self._check(Sleep(weights=weights, kv_cache=kv_cache, mode=mode))
        wish = self._want(weights, kv_cache, mode)
        while agree(newest := self.book.wish, wish) and (self._is_telling or not self._is_reached(newest)):
            if self._refusal is not None and self._told is newest:
                refusal = self._refusal
                if isinstance(refusal, InvalidRequestError):
                    self._want(0, kv_cache=False)
                    raise refusal
                raise UnavailableError(f"not all workers have done it yet, and the gateway goes on trying: {refusal}")
            await self._fleet.refreshed()
        if not agree(self.book.wish, wish):
            raise ReplacedSleepError("somebody else has let the model sleep or wake meanwhile; see GET /is_sleeping")

    def follow_fleet(self) -> None:
        """Act on what other members say and on the time without requests. Call this after each refresh of the fleet."""
        members = [*self._fleet.gateways, *(worker.member for worker in self._fleet.workers())]
        if self.book.merge(member.sleep for member in members if member.model == self._fleet.model):
            self._note_wish()
        self._note_use()
        self.wake_if_used()
        if self._after and not self.is_asleep and self._clock() >= self._used + self._after and self._has_workers():
            log.info("nobody has used the model for %g s, so it sleeps until a request comes", self._after)
            self._want(1, kv_cache=True, mode="wait", by_itself=True)
        self._tell_workers()

    def wake_if_used(self) -> None:
        """Wake the model if it sleeps by itself and a request of this gateway waits for it."""
        if self.wakes_when_used and self._is_used():
            log.info("a request wakes the model")
            self._want(0, kv_cache=False)

    async def close(self) -> None:
        if self._telling is not None:
            await end_tasks(self._telling)

    def _want(self, weights: int, kv_cache: bool, mode: str = "", by_itself: bool = False) -> Sleep:
        wish = self.book.want(weights, kv_cache, mode, by_itself)
        self._note_wish()
        self._announce()
        self._tell_workers()
        return wish

    def _note_wish(self) -> None:
        """Act on a new wish of this gateway or of another one."""
        self._used, self._refusal = self._clock(), None
        wish = self.book.wish
        if is_sleep(wish) and wish.mode == "abort" and not self._is_reached(wish):
            self._abort()

    def _note_use(self) -> None:
        """Note whether any gateway has had requests since the last call."""
        gateways = self._fleet.gateways
        arrivals = sum(each.arrivals for gateway in gateways for each in gateway.traffic.classes)
        is_busy = any(gateway.load.running or gateway.load.waiting for gateway in gateways)
        if is_busy or arrivals != self._arrivals or self._is_used():
            self._used, self._arrivals = self._clock(), arrivals

    # ---- the workers

    @property
    def _is_telling(self) -> bool:
        return self._telling is not None and not self._telling.done()

    def _workers(self, roles: Sequence[Role]) -> list[RemoteWorker]:
        found = (worker for worker in self._fleet.workers() if worker.member.role in roles and worker.available)
        own = (worker for worker in found if worker.member.model == self._fleet.model)
        return [worker for worker in own if worker.member.state in ("ready", "sleeping")]

    def _has_workers(self) -> bool:
        return any(self._workers(roles) for roles in _ORDER)

    def _is_reached(self, wish: Sleep) -> bool:
        return all(agree(worker.member.sleep, wish) for roles in _ORDER for worker in self._workers(roles))

    async def _check(self, wish: Sleep) -> None:
        """Ask the workers whether they can sleep, before requests end for it. Raises InvalidRequestError."""
        workers = [worker for roles in _ORDER for worker in self._workers(roles)]
        answers = await asyncio.gather(*(_check_sleep(worker, wish) for worker in workers), return_exceptions=True)
        for answer in answers:
            # Any other error may pass, or the worker's member ends.
            if isinstance(answer, InvalidRequestError):
                raise answer

    def _tell_workers(self) -> None:
        """Begin to tell workers the newest wish, if some have not fulfilled it and none is being told."""
        wish = self.book.wish
        if self._telling is not None and self._is_telling:
            if self._told is wish:
                return
            self._telling.cancel()
        if self._is_reached(wish) or isinstance(self._refusal, InvalidRequestError):
            return
        self._told = wish
        self._telling = asyncio.create_task(self._tell(wish), name="sleep")

    async def _tell(self, wish: Sleep) -> None:
        groups = _ORDER if is_sleep(wish) else (tuple(role for roles in _ORDER for role in roles),)
        refusal: PacelineError | None = None
        for roles in groups:
            behind = [worker for worker in self._workers(roles) if not agree(worker.member.sleep, wish)]
            outcomes = await asyncio.gather(*(_set_sleep(worker, wish) for worker in behind), return_exceptions=True)
            refusals = [outcome for outcome in outcomes if isinstance(outcome, PacelineError)]
            if refusals:
                # A refusal that would come again counts more than one that may pass.
                refusal = next((each for each in refusals if isinstance(each, InvalidRequestError)), refusals[0])
                break
        self._fleet.hurry()  # whoever waits for the workers need not wait for the next regular look at them
        if refusal is None:
            self._refusal = None
        else:
            self._note_refusal(wish, refusal)

    def _note_refusal(self, wish: Sleep, refusal: PacelineError) -> None:
        if self._refusal is None:
            log.warning("not all workers %s: %s", "sleep" if is_sleep(wish) else "wake", refusal)
        self._refusal = refusal
        if isinstance(refusal, InvalidRequestError) and wish.by_itself:
            self._after = 0.0  # it would be refused again
            self._want(0, kv_cache=False)


async def _check_sleep(worker: RemoteWorker, wish: Sleep) -> None:
    """Raise PacelineError if a worker cannot sleep so, or does not answer."""
    await _ask(worker, worker_pb2_grpc.MaintenanceStub(worker.channel).CheckSleep(wish, timeout=_CHECK_SECONDS))


async def _set_sleep(worker: RemoteWorker, wish: Sleep) -> None:
    """Tell one worker, and wait until it has done it, or its member ends. Raises PacelineError if it cannot."""
    await _ask(worker, worker_pb2_grpc.MaintenanceStub(worker.channel).SetSleep(wish))


async def _ask(worker: RemoteWorker, call: Awaitable[object]) -> None:
    """Wait for a worker's answer, or until its member ends. Raises PacelineError."""
    try:
        await heeding_cancellation(call)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            raise InvalidRequestError(f"{worker} is of a release that cannot sleep") from error
        raise unmapped_error(error, str(worker)) from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        # The channel of a member is closed when it ends, also when the worker has a new epoch. Then it is told again.

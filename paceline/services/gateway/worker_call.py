"""A call to a worker, whose errors become ours, and whose silence is one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from paceline.core.errors import BusyError, InvalidRequestError, PacelineError, TransferError, UnavailableError
from paceline.services.common.rpc import heeding_cancellation, is_cancelled, unmapped_error
from paceline.services.gateway.fleet_worker import Worker
from paceline.services.gateway.router import Link

ADMIT_SECONDS = 10.0
"""A worker answers an admission without computing anything, so a longer silence is a failure."""


class WorkerFailedError(UnavailableError):
    """An attempt ended without a result; another one may succeed.

    `unreachable` says that the worker itself seems to be gone, rather than to have failed at this request. `link` names
    two hosts where it is between them that blocks did not get through.
    """

    def __init__(self, message: str, worker: Worker, unreachable: bool, link: Link | None = None) -> None:
        super().__init__(message)
        self.worker = worker
        self.unreachable = unreachable
        self.link = link


class WorkerBusyError(BusyError):
    """A worker has no room for this request now."""

    def __init__(self, message: str, worker: Worker) -> None:
        super().__init__(message)
        self.worker = worker


class WorkerCall:
    """One call.

    Args:
        link: between which hosts a failed transfer was to go.
    """

    def __init__(self, call: Any, worker: Worker, link: Link | None) -> None:
        self.worker = worker
        self.cancel: Callable[[], object] = call.cancel
        self._call = call
        self._link = link

    async def read(self, seconds: float | None) -> Any:
        """The next message. Raises WorkerFailedError, WorkerBusyError or InvalidRequestError."""
        try:
            async with asyncio.timeout(seconds):
                message = await heeding_cancellation(self._call.read())
        except TimeoutError:
            raise silence(self.worker, seconds) from None
        except grpc.aio.AioRpcError as error:
            raise self._error_of(error) from error
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            raise WorkerFailedError(f"{self.worker} cancelled the call", self.worker, True) from None
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
            raise WorkerFailedError(f"{self.worker} ended the call early", self.worker, True)
        return message

    async def write(self, message: Any) -> None:
        # gRPC goes on waiting for the beginning of a call that was cancelled before.
        writing = asyncio.ensure_future(self._call.write(message))
        self._call.add_done_callback(lambda _: writing.cancel())
        # A call that has failed already says so better when it is read.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            async with asyncio.timeout(ADMIT_SECONDS):
                try:
                    await heeding_cancellation(writing)
                except asyncio.CancelledError:
                    if is_cancelled():
                        raise

    def _error_of(self, error: grpc.aio.AioRpcError) -> PacelineError:
        mapped = unmapped_error(error, str(self.worker))
        if isinstance(mapped, InvalidRequestError):
            return mapped
        if isinstance(mapped, BusyError):
            return WorkerBusyError(str(mapped), self.worker)
        link = self._link if isinstance(mapped, TransferError) else None
        elsewhere = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED)
        return WorkerFailedError(str(mapped), self.worker, error.code() in elsewhere, link)


def silence(worker: Worker, seconds: float | None) -> WorkerFailedError:
    return WorkerFailedError(f"{worker} was silent for {seconds:g} seconds", worker, True)


def out_of_turn(worker: Worker) -> WorkerFailedError:
    return WorkerFailedError(f"{worker} said something that was not its turn to say", worker, False)

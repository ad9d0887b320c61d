"""Finds batches that no gateway runs, and runs them on this gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time

from starlette.types import ASGIApp

from paceline.core.options import parse_bytes
from paceline.services.common.lifecycle import unique_name
from paceline.services.common.tasks import end_tasks
from paceline.services.gateway.api.batches.batch import Batch, TransitionError
from paceline.services.gateway.api.batches.batch_run import BatchLimits, BatchRun
from paceline.services.gateway.api.batches.batch_store import BatchStore, LeaseLostError, inputs
from paceline.services.gateway.api.batches.file_store import FileStore
from paceline.services.gateway.api.batches.lines import Line, LineReply, call
from paceline.services.gateway.api.batches.pressure import LineGate, LinePlaces, places_of
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.bounds import Bounds
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.store.database import StoreError

LEASE_SECONDS = 15.0
"""Seconds for which a lease holds. A gateway that has not renewed its leases by then has lost its batches to others."""
LOOK_SECONDS = 2.0
"""Seconds between two searches for batches that no gateway runs. Leases are renewed at the same times."""
TICK_SECONDS = 0.25
"""Seconds between two checks whether more lines may run."""
AGAIN_SECONDS = 5.0
"""Seconds until a batch that could not go on, for example because the store failed, is tried again."""
CLEAN_SECONDS = 60.0
"""Seconds between two deletions of expired files and batches."""
MOST_RUNS = 64
"""Largest number of batches that one gateway runs at the same time. Their lines take turns."""
MOST_RUNS_OF_KEY = 4
"""Largest number of batches of one key that a gateway runs at a time. So a key's batches do not block other keys."""

log = logging.getLogger(__name__)


class BatchRunner:
    """Runs batches that no other gateway runs, from `start` to `close`."""

    def __init__(self, gateway: Gateway, batches: BatchStore, files: FileStore, app: ASGIApp) -> None:
        config = gateway.config
        self._gateway = gateway
        self._batches = batches
        self._files = files
        self._app = app
        self._name = unique_name("gateway")
        seconds = config.stored_files_seconds
        self._limits = BatchLimits(
            config.max_batch_lines,
            config.max_body_bytes,
            seconds,
            Bounds.of(config),
            parse_bytes(config.stored_files_size),
        )
        self._gates = {name: _gate(model) for name, model in gateway.models.items()}
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._looked = asyncio.Event()
        self._keeping: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for name, model in self._gateway.models.items():
            model.runner.queue.call_on_wait(self._gates[name].open)
        self._keeping = [asyncio.create_task(self._look_for_batches()), asyncio.create_task(self._tick())]

    async def close(self) -> None:
        """Stop all batches and give their leases back, so that other gateways can go on at once."""
        await end_tasks(*self._keeping, *self._tasks.values())

    def wake(self) -> None:
        """Search for batches now, without waiting for the next LOOK_SECONDS."""
        self._looked.set()

    async def cancel(self, batch: Batch) -> Batch:
        """Cancel a batch and return it in its new state. If another gateway runs the batch, that gateway notices soon.

        Raises ApiError if the batch has ended or was deleted.
        """
        if batch.status != "cancelling":
            try:
                batch = await self._batches.change(batch.id, lambda batch: batch.moved("cancelling", time.time()))
            except TransitionError as error:
                raise ApiError(409, str(error), param="batch_id") from None
            except LeaseLostError:
                raise ApiError(404, f"No batch found with id {batch.id!r}.", param="batch_id") from None
        self._stop(batch.id)
        return batch

    def _stop(self, batch_id: str) -> None:
        """Stop a batch that a client has cancelled, if this gateway runs it."""
        if (run := self._runs.get(batch_id)) is not None:
            run.is_cancelled.set()

    async def _tick(self) -> None:
        while not self._gateway.draining:
            for gate in self._gates.values():
                gate.open()
            await asyncio.sleep(TICK_SECONDS)
        await end_tasks(*self._tasks.values())

    async def _look_for_batches(self) -> None:
        cleaned = -CLEAN_SECONDS
        while not self._gateway.draining:
            with contextlib.suppress(StoreError):
                if time.monotonic() >= cleaned + CLEAN_SECONDS:
                    cleaned = time.monotonic()
                    await self._files.delete_expired(inputs)
                    await self._batches.delete_expired()
                await self._renew()
                await self._claim()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._looked.wait()
            self._looked.clear()

    async def _renew(self) -> None:
        if not self._tasks:
            return
        running = dict(self._tasks)
        own = await self._batches.renew(self._name, time.time() + LEASE_SECONDS, running)
        for batch_id, task in running.items():
            if batch_id not in own and not task.done():
                task.cancel()
            elif batch_id in own and own[batch_id].status == "cancelling":
                self._stop(batch_id)

    async def _claim(self) -> None:
        if (room := MOST_RUNS - len(self._tasks)) <= 0:
            return
        until = time.time() + LEASE_SECONDS
        for batch in await self._batches.claim(self._name, until, room, MOST_RUNS_OF_KEY, [*self._tasks]):
            log.info("batch %s goes on: %s, %d of %d lines", batch.id, batch.status, batch.completed, batch.total)
            self._tasks[batch.id] = asyncio.create_task(self._run(batch), name=batch.id)

    async def _run(self, batch: Batch) -> None:
        run = self._runs[batch.id] = BatchRun(
            batch,
            self._batches,
            self._files,
            name=self._name,
            limits=self._limits,
            gates=self._gates.values(),
            gate_of=self._gate_of,
            call=self._call,
        )
        try:
            await run.run()
        except* LeaseLostError:
            log.warning("batch %s: another gateway runs it now", batch.id)
        except* StoreError:
            await asyncio.sleep(AGAIN_SECONDS)
        except* Exception:
            log.exception("batch %s cannot go on; it is tried again", batch.id)
            await asyncio.sleep(AGAIN_SECONDS)
        finally:
            # This gateway claims the batch again only after this task has ended: its lease has the gateway's name.
            try:
                with contextlib.suppress(StoreError):
                    await self._batches.release(batch.id, self._name)
            finally:
                del self._runs[batch.id], self._tasks[batch.id]
                self.wake()

    def _gate_of(self, line: Line) -> LineGate:
        """Return the gate of the line's model. A line for no known model will be refused, so any open gate is good."""
        name = line.body.get("model")
        if isinstance(name, str) and (base := self._gateway.base_of(name)) is not None:
            name = base.name
        if isinstance(name, str) and name in self._gates:
            return self._gates[name]
        gates = list(self._gates.values())
        return next((gate for gate in gates if not gate.is_shut), gates[0])

    async def _call(self, endpoint: str, line: Line, owner: str) -> LineReply:
        caller = self._gateway.keys.caller(owner)
        if caller is None:
            refusal = ApiError(401, "the key of this batch is not accepted any more", code="invalid_api_key")
            told = json.dumps(refusal.body)
            return LineReply(refusal.status, "", told, error_type=refusal.body["error"]["type"])
        return await call(self._app, endpoint, line, caller)


def _gate(model: ModelFleet) -> LineGate:
    return LineGate(
        lambda: model.fleet.has_worker(model.generates),
        lambda: _places(model),
        model.waiting_requests,
        lambda: model.runner.client_sequences,
        time.monotonic,
    )


def _places(model: ModelFleet) -> LinePlaces:
    """Return a model's places for lines. Without a worker, one line may run: its waiting lets a planner start one, or
    wakes a model that sleeps until a request comes.
    """
    if (model.fleet.may_be_empty or model.sleep.wakes_when_used) and not model.fleet.has_worker(model.generates):
        return LinePlaces(1, 1)
    return places_of(model.fleet.snapshot(), model.generates)

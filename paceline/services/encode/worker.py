"""The core of an encode worker: a model's encoders over the host's arena, without its text model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from paceline.core.config import quantization_of
from paceline.core.errors import UnavailableError
from paceline.core.metrics import Sample
from paceline.engine.loading import LoadedEncoders, load_encoders_alone
from paceline.proto import common_pb2
from paceline.proto.fleet_pb2 import AdapterReport, LoadReport, Sleep, WorkReport
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.bare_engine import BareEngine
from paceline.services.worker.encoder import WorkerEncoder
from paceline.services.worker.encoding import EncodeHandler
from paceline.services.worker.encodings import Encodings
from paceline.services.worker.work_check import check_encode
from paceline.services.worker.worker_setup import ArenaPlace, WorkerSetup, max_model_len
from paceline.services.worker.worker_sleep import WorkerSleep, check_maps, give_back_weights, take_back_weights


async def make_worker(setup: WorkerSetup) -> EncodeWorker:
    """Load the encoders, join the arena and return the worker. Raises PacelineError."""
    loaded = await asyncio.to_thread(_load, setup)
    place = await setup.join(loaded.layout, loaded.max_position)
    return EncodeWorker(loaded, setup, place)


def _load(setup: WorkerSetup) -> LoadedEncoders:
    compute, config = setup.compute, setup.config
    return load_encoders_alone(
        setup.folder,
        compute.dtype,
        compute.device,
        compute.kernels,
        setup.speculative,
        setup.packed_dir,
        quantization_of(config),
        config.model_impl,
        config.kv_coding,
        setup.adapters,
    )


class EncodeWorker:
    """A worker that computes encodings for other workers.

    Its engine has no requests and runs only the encoders. If workers share the cores of a host, this worker takes turns
    with them.
    """

    def __init__(self, loaded: LoadedEncoders, setup: WorkerSetup, place: ArenaPlace) -> None:
        self.model_id = setup.model_id
        self.layout = loaded.layout
        self.weights = loaded.weights
        self.max_model_len = max_model_len(setup.config, loaded.layout, loaded.max_position, place.slots, place.slots)
        self.admission = WorkerAdmission(setup.config.max_seqs)
        self._weight_maps, self._session = setup.weight_maps, setup.kv.session
        self.sleep = WorkerSleep(self, setup.role)
        self._takes_turns = place.turns is not None
        self._bare = BareEngine(place.turns)
        self.engine, self.failed = self._bare.engine, self._bare.failed
        encodings = Encodings(setup.kv, loaded.layout, place.arena)
        encoder = WorkerEncoder(lambda: loaded.encoders, self.engine.encode)
        self.encoding = EncodeHandler(encoder, encodings, setup.kv.session.source, lambda: self._bare.goes_on)

    def admit(self, work: common_pb2.Work) -> contextlib.AbstractAsyncContextManager[None]:
        """Count one request for the body of a `with` statement. Raises the errors of `WorkerAdmission.admit`."""
        return self.admission.admit()

    def check(self, work: common_pb2.Work) -> None:
        """Refuse work that this worker can never do.

        Raises InvalidRequestError, or UnavailableError if another worker may be able to do it.
        """
        if work.model != self.model_id:
            raise UnavailableError("this worker serves another model")
        check_encode(work, self.max_model_len)

    def load(self) -> LoadReport:
        """Return the worker's load, by which gateways choose encode workers."""
        waiting = self.encoding.encoder.waiting
        # Work that was abandoned just now may still wait, although its call has ended.
        return LoadReport(running=max(0, self.admission.active - waiting), waiting=waiting)

    def lora(self) -> AdapterReport:
        """Return the report about adapters, which is empty, because the worker takes none."""
        return AdapterReport()

    def work(self) -> WorkReport:
        """Return the report for the planner. It has only `shares_cores`, because encode workers have no steps and no
        KV.
        """
        return WorkReport(shares_cores=self._takes_turns)

    # ---- sleep, see `Sleeping`

    def check_sleep(self, wish: Sleep) -> None:
        if wish.weights:
            check_maps(self._weight_maps)

    async def sleep_weights(self, level: int) -> None:
        await give_back_weights(self._weight_maps, level)

    async def wake_weights(self) -> None:
        await take_back_weights(self._weight_maps)

    async def sleep_blocks(self) -> None:
        await self._session.set_asleep(True)

    async def wake_blocks(self) -> None:
        await self._session.set_asleep(False)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the engine and of the encoders."""
        yield from self.engine.computing.samples()
        yield from self.encoding.encoder.samples()

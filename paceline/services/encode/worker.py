"""The core of an encode worker: a model's encoders over the host's arena, without its text model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from paceline.core.config import quantization_of
from paceline.core.errors import UnavailableError
from paceline.core.metrics import Sample
from paceline.engine.engine import Engine
from paceline.engine.limits import Limits
from paceline.engine.loading import LoadedEncoders, load_encoders_alone
from paceline.engine.scheduler import Scheduler
from paceline.engine.step import Step, StepResult
from paceline.proto import common_pb2
from paceline.proto.fleet_pb2 import LoadReport, WorkReport
from paceline.services.worker.admission import WorkerAdmission
from paceline.services.worker.encoder import WorkerEncoder
from paceline.services.worker.encoding import EncodeHandler
from paceline.services.worker.encodings import Encodings
from paceline.services.worker.event_stream import ALIVE_SECONDS
from paceline.services.worker.work_check import check_encode
from paceline.services.worker.worker_setup import ArenaPlace, WorkerSetup, max_model_len


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
        self._takes_turns = place.turns is not None
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        """A future that gets an exception if the engine fails, and never a result."""
        self.engine = Engine(
            Scheduler(Limits(max_batched_tokens=1, max_model_len=1, max_seqs=1)),
            _NoModel(),
            on_events=lambda events: None,
            on_failure=self._pass_failure,
            turns=place.turns,
        )
        encodings = Encodings(setup.kv, loaded.layout, place.arena)
        encoder = WorkerEncoder(lambda: loaded.encoders, self.engine.encode)
        self.encoding = EncodeHandler(encoder, encodings, setup.kv.session.source, lambda: self._goes_on)

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

    def work(self) -> WorkReport:
        """Return the report for the planner. It has only `shares_cores`, because encode workers have no steps and no
        KV.
        """
        return WorkReport(shares_cores=self._takes_turns)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the engine and of the encoders."""
        yield from self.engine.computing.samples()
        yield from self.encoding.encoder.samples()

    @property
    def _goes_on(self) -> bool:
        """Whether the encoder is idle or its piece under way began less than ALIVE_SECONDS ago."""
        return self.engine.step_seconds < ALIVE_SECONDS

    def _pass_failure(self, error: BaseException) -> None:
        """Pass the engine's error on to the event loop. Called on the engine's threads."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_exception(UnavailableError(f"the engine failed: {error}"))


class _NoModel:
    """The runner of an engine without requests."""

    def execute(self, step: Step) -> StepResult:
        raise AssertionError("an encode worker has no steps")

"""The steps from the work of an attempt to a request for the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from paceline.core.context import Context, Tail
from paceline.core.errors import BusyError, InvalidRequestError, PacelineError, TransferError
from paceline.core.kv_layout import BASE_TOKENS
from paceline.core.machine import yield_to_others
from paceline.core.types import Key, SamplingParams
from paceline.engine.constraint import Grammar
from paceline.engine.loading import Loaded
from paceline.engine.request import Request
from paceline.proto import common_pb2 as pb
from paceline.proto import worker_pb2 as wire
from paceline.services.common.wire import sampling_of
from paceline.services.worker.adapters import AdapterStore
from paceline.services.worker.kv_client import KVClient
from paceline.services.worker.leases import Reservation
from paceline.services.worker.work_check import check_token

_COMPILERS = 2
"""Number of constraints that a worker compiles at the same time."""

log = logging.getLogger(__name__)


class Intake:
    """Turns the work of attempts into requests for the engine: compiles constraints, fetches and reserves blocks.

    Args:
        loaded: the model.
        kv: the worker's connection to the kvtransfer service of its host.
        adapters: the adapters in the worker's memory.
    """

    def __init__(self, loaded: Loaded, kv: KVClient, adapters: AdapterStore) -> None:
        self._adapters = adapters
        self._layout = loaded.layout
        self._grammars = loaded.grammars
        self._vocab_size = loaded.model.config.vocab_size
        self._kv = kv
        # Running requests have the cores first. Constraints compile without Python's lock.
        self._compilers = ThreadPoolExecutor(_COMPILERS, "compile", yield_to_others)

    @contextlib.asynccontextmanager
    async def compiling(self, work: pb.Work) -> AsyncIterator[asyncio.Future[Grammar | None]]:
        """Compile the constraint of an output, if it has one, while the caller goes on.

        The future's result is None if there is no constraint. Awaiting it may raise ConstraintError or ModelError.
        """
        loop = asyncio.get_running_loop()
        constraint = sampling_of(work).constraint
        known = None if constraint is None else self._grammars.find(constraint)
        if constraint is None or known is not None:
            compiled: asyncio.Future[Grammar | None] = loop.create_future()
            compiled.set_result(known)
        else:
            compiled = loop.run_in_executor(self._compilers, self._grammars.compile, constraint)
        try:
            yield compiled
        finally:
            if not compiled.cancel() and not compiled.cancelled():
                compiled.exception()  # otherwise asyncio logs an error that nobody has waited for

    async def fetch_prefix(self, work: pb.Work, key: Key, context: Context, source: str) -> bool:
        """Bring cached blocks of a context into this host's cache, before the request reserves its blocks.

        The blocks come from the disk tier, or from another host that has them according to the gateway. If they do not
        come, the worker computes these tokens itself.

        Args:
            source: address of the other host's kvtransfer service; empty to ask only the disk.

        Returns:
            False if the source could not be read.
        """
        if not (source or self._kv.session.has_disk) or work.sampling.HasField("prompt_logprobs"):
            return True
        links = context.links(self._layout.fingerprint)
        try:
            await self._kv.fetch_prefix(key, source, links[: (len(context) - 1) // BASE_TOKENS])
        except BusyError:
            return True  # there is no room for the request either, and `reserve` will say so
        except PacelineError as error:
            log.warning("%s", error, extra={"request_id": key.request_id})
            return not isinstance(error, TransferError)
        return True

    async def reserve(self, work: pb.Work, key: Key, context: Context, token_count: int) -> Reservation:
        """Reserve blocks for `token_count` tokens. Cached blocks of the context are among them.

        Raises BusyError if there are not enough free blocks.
        """
        # The last token is always computed, because its logits are needed. Prompt logprobs need logits of all tokens.
        reusable = 0 if work.sampling.HasField("prompt_logprobs") else len(context) - 1
        links = context.links(self._layout.fingerprint)
        tails = context.tails(self._layout.fingerprint, work.tails) if self._layout.keeps_tails else ()
        return await self._kv.reserve(key, links, token_count, reusable, work.priority, tails=tails)

    async def reserve_spare(self, work: pb.Work, reservation: Reservation) -> list[int]:
        """Reserve blocks for copies at the place in the prompt whose state the gateway wants to keep.

        Returns one slot for each group. Returns nothing if the worker does not compute the tokens after this place, if
        all blocks are full there, or if too few are free. In these cases nothing is kept.
        """
        length = work.kept_tokens
        is_needed = self._layout.keeps_tails and length % self._layout.alignment > 0
        if not is_needed or not reservation.filled_tokens <= length <= work.prompt_tokens:
            return []
        return await self._kv.reserve_spare(reservation.key)

    def give_back_tail(self, reservation: Reservation) -> None:
        """Publish again the blocks that a reservation has taken over at a tail, because the worker has not written to
        them.

        If a prefill worker has opened the blocks meanwhile, kvtransfer refuses this.
        """
        if reservation.filled_tokens % self._layout.alignment:
            self._kv.keep(reservation.key, Tail(reservation.filled_tokens, reservation.context_hash))

    def make_request(
        self,
        work: pb.Work,
        reservation: Reservation,
        context: Context,
        grammar: Grammar | None,
        only_first_token: bool = False,
        has_readers: bool = False,
        spare: Sequence[int] = (),
    ) -> Request:
        """Return the engine's view of `work` in the blocks of `reservation`. The request adds its tokens to `context`.

        Args:
            spare: slots for copies at the place of the prompt that is to be kept; see `reserve_spare`.

        Raises InvalidRequestError if the blocks have KV of the whole context or more, UnavailableError if they belong
        to another context.
        """
        if not reservation.filled_tokens < len(context):
            filled = reservation.filled_tokens
            raise InvalidRequestError(f"the blocks have KV of {filled} tokens, the context has {len(context)}")
        # Otherwise the request would go on from the KV of another context, and publish it under its own name.
        reservation.check_context(context, self._layout.fingerprint)
        return Request(
            key=reservation.key,
            context=context,
            prompt_len=work.prompt_tokens,
            sampling=sampling_of(work),
            layout=self._layout,
            tables=reservation.tables,
            computed_len=reservation.filled_tokens,
            only_first_token=only_first_token,
            has_readers=has_readers,
            kept_len=work.kept_tokens if spare else 0,
            spare=list(spare),
            background=work.background,
            wanted_seconds=work.ttft_seconds if work.HasField("ttft_seconds") else None,
            adapter=self._adapters.adapter_of(work),
            grammar=grammar,
        )

    async def reserve_input(self, work: pb.Work, key: Key, context: Context, reusable: int) -> Reservation:
        """Reserve blocks for one input of work that pools. Cached blocks of its first `reusable` tokens are among them.

        Raises BusyError if there are not enough free blocks.
        """
        links = context.links(self._layout.fingerprint)
        return await self._kv.reserve(key, links, len(context), reusable, work.priority)

    def make_pool_request(
        self, work: pb.Work, reservation: Reservation, context: Context, states: Literal["last", "all"]
    ) -> Request:
        """Return a request for the hidden states of an input, in the blocks of `reservation`.

        Raises UnavailableError if the blocks belong to another context.
        """
        reservation.check_context(context, self._layout.fingerprint)
        return Request(
            key=reservation.key,
            context=context,
            prompt_len=len(context),
            sampling=SamplingParams(max_tokens=1),
            layout=self._layout,
            tables=reservation.tables,
            computed_len=reservation.filled_tokens,
            states=states,
            background=work.background,
            wanted_seconds=work.ttft_seconds if work.HasField("ttft_seconds") else None,
        )

    def check_handoff(self, work: pb.Work, handoff: wire.Handoff) -> None:
        """Refuse a handoff with an unknown token or of another attempt. Raises InvalidRequestError."""
        check_token(handoff.first_token_id, self._vocab_size)
        if (handoff.key.request_id, handoff.key.attempt) != (work.key.request_id, work.key.attempt):
            raise InvalidRequestError("the handoff is of another attempt than was admitted")

"""References to blocks of another host that are not right any more: no such transfer succeeds.

In vLLM #52234, requests with such references were answered with 200 and the tokens of another prompt. Its five cases
are an unknown request, block ids out of range (`a block behind the table` in `test_transfer_sources.py`), a reference
that was used up, a reference to blocks that hold another prompt by now, and a lease that has ended. Here a reference is
the key of a lease and blocks are named by their content, so the source itself knows what it may hand over. The decode
worker checks the name of the context, too (`another context` in `tests/services/worker/test_handoffs.py`).
"""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from paceline.proto import kvtransfer_pb2 as pb
from tests.services.kvtransfer.kv_host import key, release, reserve
from tests.services.kvtransfer.kv_pair import CONTEXT, TOKENS, Pair, failure, pair

OTHER = "uvwxyz"
"""Another prompt of the same length."""


async def open_lease(two: Pair, request: str, context: str) -> pb.Lease:
    """Return a lease of the prefill worker that may be read."""
    await two.prefill.do(reserve(key(request), context, TOKENS))
    return (await two.prefill.do(pb.Operation(open=pb.Open(key=key(request))))).lease


async def make_wrong(two: Pair, case: str) -> pb.Lease:
    """Return a lease of the source whose key is no right reference any more, by the name of the case."""
    if case == "unknown":
        return pb.Lease(key=key("unknown"))
    opened = await open_lease(two, "first", OTHER)
    await two.compute(opened, 0, 7, context=OTHER)
    await two.fill(opened)
    if case == "used up":
        reserved = (await two.decode.do(reserve(key("reader"), OTHER, TOKENS + 32))).lease
        await two.fetch(reserved, opened)
        await two.decode.do(release(reserved.key))
        return opened
    await two.prefill.do(release(opened.key))
    if case == "used for another prompt":
        for number in range(5):  # so many that all slots of the source are written again
            again = await open_lease(two, f"later {number}", "".join(chr(ord(letter) - number - 6) for letter in OTHER))
            await two.prefill.do(release(again.key))
    return opened


@pytest.mark.parametrize("case", ["unknown", "used up", "ended", "used for another prompt"])
async def test_a_wrong_reference_is_a_failed_transfer(tmp_path: Path, case: str) -> None:
    async with pair(tmp_path) as two:
        stale = await make_wrong(two, case)
        before = (await two.destination.ledger()).cached
        reserved = (await two.decode.do(reserve(key("asks"), CONTEXT, TOKENS + 32))).lease
        assert (await failure(two.fetch(reserved, stale))).code() is grpc.StatusCode.DATA_LOSS
        # Nothing of it is there under the names of the prompt's blocks, so the prompt is computed here.
        again = (await two.decode.do(reserve(key("asks again"), CONTEXT, TOKENS + 32))).lease
        assert again.filled_tokens == 0
        assert (await two.destination.ledger()).cached == before
        await two.decode.do(release(again.key))
        await two.destination.until(lambda reply: not (reply.held or reply.in_flight or reply.leases))

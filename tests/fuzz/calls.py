"""Calls that no correct client makes: broken messages, wrong sessions, calls that are cut off or left half open."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from paceline.proto import common_pb2, kvtransfer_pb2, worker_pb2
from paceline.services.common.credentials import Credentials
from paceline.services.common.rpc import open_channel
from tests.fuzz.messages import Method, break_bytes, methods, mutate, random_message

_CALL_SECONDS = 0.5

_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)

_STRANGERS: tuple[tuple[tuple[str, str | bytes], ...], ...] = (
    (),
    (("authorization", ""),),
    (("authorization", "Bearer "),),
    (("authorization", "Bearer wrong"),),
    (("authorization", "Basic " + "x" * 3000),),
    (("authorization", "Bearer a"), ("authorization", "Bearer b")),
    (("authorization-bin", b"\xff\x00"), ("traceparent", "00-zz-zz-01")),
)


@dataclass
class Valid:
    """Values of valid messages, which are then broken in small ways."""

    model: str
    layout: kvtransfer_pb2.KVLayout
    address: str
    """Address of kvtransfer."""
    session: int = 0
    """An open session of the fuzzer with kvtransfer."""
    socket_path: str = ""
    """Path of the Unix socket that takes this session's requests."""
    stream: str = ""
    """Name of the decode worker's stream of events, which the fuzzer reads."""

    def message(self, rng: random.Random, kind: type[Message]) -> Message:
        if kind is kvtransfer_pb2.AttachRequest:
            return kvtransfer_pb2.AttachRequest(worker_id="fuzz", role="decode", layout=self.layout, context_tokens=64)
        if kind is kvtransfer_pb2.BatchRequest:
            session = self.session if rng.random() < 0.9 else rng.getrandbits(63)
            operations = [self._operation(rng) for _ in range(rng.choice((1, 2, 8)))]
            return kvtransfer_pb2.BatchRequest(session=session, operations=operations)
        if kind is kvtransfer_pb2.FetchRequest:
            source = rng.choice((self.address, "127.0.0.1:1", "no.such.host.invalid:1"))
            return kvtransfer_pb2.FetchRequest(session=self.session, key=_key(rng), source=source, source_key=_key(rng))
        if kind is kvtransfer_pb2.ExportRequest:
            fingerprint, cached = self.layout.fingerprint, rng.choice((0, 0, 16, 1 << 31))
            return kvtransfer_pb2.ExportRequest(fingerprint=fingerprint, key=_key(rng), cached_tokens=cached)
        hashes = [rng.randbytes(16) for _ in range(rng.choice((0, 1, 3, 200)))]
        if kind is kvtransfer_pb2.FetchPrefixRequest:
            source = rng.choice((self.address, "127.0.0.1:1", "no.such.host.invalid:1"))
            return kvtransfer_pb2.FetchPrefixRequest(session=self.session, key=_key(rng), source=source, hashes=hashes)
        if kind is kvtransfer_pb2.ExportPrefixRequest:
            fingerprint, cached = self.layout.fingerprint, rng.choice((0, 0, 16, 1 << 31))
            return kvtransfer_pb2.ExportPrefixRequest(
                fingerprint=fingerprint, key=_key(rng), cached_tokens=cached, hashes=hashes
            )
        if kind is kvtransfer_pb2.ReadRequest:
            return kvtransfer_pb2.ReadRequest(token=rng.randbytes(16), slots=[rng.randrange(1 << 20) for _ in range(3)])
        if kind is worker_pb2.PrefillRequest:
            return worker_pb2.PrefillRequest(work=self._work(rng), host_id=rng.choice(("", "elsewhere")))
        if kind is worker_pb2.DecodeCommand:
            attempt = rng.choice((0, 1, 2**64 - 1, *(rng.getrandbits(64) for _ in range(9))))
            recipient = worker_pb2.Recipient(stream=self.stream, attempt=attempt)
            return worker_pb2.DecodeCommand(admit=self._work(rng), recipient=recipient)
        if kind is worker_pb2.EventsRequest:
            return worker_pb2.EventsRequest(stream=rng.choice((self.stream, "another", rng.randbytes(8).hex())))
        return random_message(rng, kind)

    def following(self, rng: random.Random) -> list[worker_pb2.DecodeCommand]:
        """Return commands that may come after an admission."""
        handoff = worker_pb2.Handoff(key=_key(rng), first_token_id=rng.choice((1, 299, 300, 2**32 - 1)))
        here = worker_pb2.DecodeCommand(prefill_here=worker_pb2.PrefillHere())
        fetch = worker_pb2.DecodeCommand(fetch=worker_pb2.Fetch(key=_key(rng), source=self.address))
        handed = worker_pb2.DecodeCommand(handoff=handoff)
        return rng.choice(([], [here], [here, here], [handed], [fetch], [fetch, handed]))

    def on_socket(self, rng: random.Random) -> bytes:
        """Return some requests of the session, broken in small ways. Their length prefix may be wrong."""
        data = b""
        for _ in range(rng.choice((1, 1, 3, 20))):
            message = self.message(rng, kvtransfer_pb2.BatchRequest)
            for _ in range(rng.choice((0, 0, 1, 5))):
                mutate(rng, message)
            body = message.SerializeToString()
            if rng.random() < 0.05:
                body = break_bytes(rng, body)
            length = len(body) if rng.random() < 0.97 else rng.choice((len(body) + 1, rng.getrandbits(32)))
            data += length.to_bytes(4, "big") + body
        return data

    def _work(self, rng: random.Random) -> common_pb2.Work:
        ids = [rng.randrange(300) for _ in range(rng.choice((1, 5, 40)))]
        sampling = common_pb2.Sampling(top_p=1, repetition_penalty=1, max_tokens=rng.choice((1, 4, 60)), seed=1)
        return common_pb2.Work(
            key=_key(rng), model=self.model, token_ids=ids, prompt_tokens=len(ids), sampling=sampling
        )

    def _operation(self, rng: random.Random) -> kvtransfer_pb2.Operation:
        """Return one of the existing operations, with plausible values."""
        operation = kvtransfer_pb2.Operation()
        (choices,) = operation.DESCRIPTOR.oneofs
        name = rng.choice([each.name for each in choices.fields])
        chosen: Any = getattr(operation, name)
        chosen.SetInParent()
        known = {each.name for each in chosen.DESCRIPTOR.fields}
        plausible: dict[str, Any] = {
            "token_count": rng.choice((1, 16, 40, 4096)),
            "filled_tokens": rng.choice((0, 1, 16, 40)),
            "group": 0,
            "first_block": rng.choice((0, 1)),
        }
        for key, value in plausible.items():
            if key in known:
                setattr(chosen, key, value)
        if "key" in known:
            chosen.key.CopyFrom(_key(rng))
        if "hashes" in known:
            chosen.hashes.extend(rng.randbytes(16) for _ in range(rng.choice((0, 1, 2))))
        return operation


@dataclass
class Caller:
    """One channel to one address. With credentials it is a faulty service of the cluster, without them a stranger."""

    role: str
    """Role of the service. Its own methods are called most often."""
    address: str
    credentials: Credentials
    valid: Valid
    rng: random.Random
    codes: Counter[str] = field(default_factory=Counter)
    """Number of calls by status code, except for calls that this side cancelled."""

    def __post_init__(self) -> None:
        self._methods = methods()
        self._own = [method for method in self._methods if method.service == self.role]
        self._channel = open_channel(self.address, self.credentials)

    async def close(self) -> None:
        await self._channel.close(None)

    async def attack(self) -> None:
        """Make one call."""
        method = self.rng.choice(self._own if self.rng.random() < 0.85 else self._methods)
        path = method.path if self.rng.random() < 0.97 else self.rng.choice(("/", "//", "/a/b", method.path + "x"))
        metadata = () if self.credentials else self.rng.choice(_STRANGERS)
        call = self._channel.stream_stream(path)(timeout=_CALL_SECONDS, metadata=metadata)
        try:
            for message in self._messages(method):
                await call.write(message)
                if self.rng.random() < 0.1:
                    await asyncio.sleep(self.rng.uniform(0, 0.05))
            if self.rng.random() < 0.1:
                if self.rng.random() < 0.2:  # close the whole connection too
                    await self._channel.close(None)
                    self._channel = open_channel(self.address, self.credentials)
                return  # the cancellation below cuts the call off
            if self.rng.random() < 0.6:
                await call.done_writing()
            stay = self.rng.choice((0.02, 0.3, 2 * _CALL_SECONDS))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stay):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                    self._note(await call.code(), await call.details())
        except grpc.aio.AioRpcError as error:
            self._note(error.code(), error.details())
        except (asyncio.InvalidStateError, grpc.aio.InternalError):  # the call ended while a message was written
            self._note(await call.code(), await call.details())
        finally:
            call.cancel()

    def _note(self, code: grpc.StatusCode, details: str | None) -> None:
        if details == "Internal error from Core":
            return  # this side's own error when it writes to a call that has ended
        self.codes[f"{code.name} {details[:100]}" if code in _BUGS and details else code.name] += 1

    def _messages(self, method: Method) -> list[bytes]:
        rng = self.rng
        if rng.random() < 0.05:
            return []
        message = random_message(rng, method.request)
        if rng.random() < 0.8:
            message = self.valid.message(rng, method.request)
            for _ in range(rng.choice((0, 1, 1, 2, 5))):
                mutate(rng, message)
        messages = [message.SerializeToString()]
        if method.request is worker_pb2.DecodeCommand:
            messages += [each.SerializeToString() for each in self.valid.following(rng)]
        if rng.random() < 0.1:
            messages = [break_bytes(rng, each) for each in messages]
        if rng.random() < 0.002:
            messages.append(bytes(17 << 20))  # larger than the limit of a message
        return messages if rng.random() < 0.9 else messages * 2


def _key(rng: random.Random) -> common_pb2.Key:
    """Return one of a few keys, so that operations meet each other's leases and stale generations."""
    return common_pb2.Key(
        request_id=f"fuzz-{rng.randrange(4)}", attempt=rng.choice((1, 2)), generation=rng.choice((0, 1, 1, 2, 2, 3, 9))
    )

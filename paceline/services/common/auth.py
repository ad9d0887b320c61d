"""A proof in every gRPC call that its caller has the cluster's secret. Servers require it for all methods.

The secret itself is never sent, because without TLS a caller does not know who listens at an address. A call carries a
keyed hash (HMAC-SHA-256) of its method, its time, a random number, and the address that the caller meant. So an
intercepted proof is useless for another method, for another service, a second time, or later. The answer to a health
check also proves that the service has the secret, so another program at the address of a member is not taken for it.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import grpc
import grpc.aio

from paceline.services.common.secret import Secret, is_one_of

CLOCK_SECONDS = 30.0
"""Largest difference between the clocks of two hosts of a cluster, in seconds."""
HOST_SERVICE = "kvtransfer"
"""Target in the proofs of a worker's calls to kvtransfer. It replaces the address, because kvtransfer may not know the
host name in the worker's --kvtransfer-address."""
ANY_SERVICE = "*"
"""Target in the proofs of health checks from the command line. Such a proof is valid for health checks only."""
REFUSAL = (
    "the caller does not have the secret of this service; start both with the same --auth-token-file, "
    "and restart the one that has an older secret"
)
SKEWED = ("paceline-clock", "differs")
"""Trailing metadata of a call that was refused because its caller's clock is wrong."""

_KEY = "authorization"
_SCHEME = "Paceline "
_OLD_SCHEME = "Bearer "
_PURPOSE = "gRPC calls"
_ANSWERS = "answers to health checks"
_CHALLENGE = "paceline-challenge"
_ANSWER = "paceline-answer"
_PROOF = re.compile(r"v1:([0-9]{1,12}):([0-9a-f]{24}):([0-9a-f]{64}):(.{1,300})")
_HEALTH = "/grpc.health.v1.Health/"


class Prover:
    """Makes the proofs for calls to one service.

    Args:
        meant: the target in the proofs: the address of the service, or a name that replaces it, such as HOST_SERVICE.
    """

    def __init__(self, secret: Secret, meant: str) -> None:
        self._key, self._answers = secret.key(_PURPOSE), secret.keys(_ANSWERS)
        # Metadata are ASCII, and an address may be a path or a name that somebody has mistyped.
        self._meant = quote(meant, safe="/:[]*")

    def header(self, method: str) -> tuple[str, str]:
        """Return the metadata entry with the proof for a new call.

        Args:
            method: full name of the method, such as "/paceline.v1.Decode/Generate".
        """
        now, nonce = str(int(time.time())), secrets.token_hex(12)
        mac = _mac(self._key, method, now, nonce, self._meant)
        return _KEY, f"{_SCHEME}v1:{now}:{nonce}:{mac}:{self._meant}"

    def challenge(self) -> tuple[str, str]:
        """Return a metadata entry that asks the service for a proof that it has the secret, too."""
        return _CHALLENGE, secrets.token_hex(12)

    def is_answered(self, challenge: tuple[str, str], metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        """Return whether the trailing metadata of a call contains the right proof for a challenge."""
        given = dict(metadata).get(_ANSWER)
        expected = (_answer(key, challenge[1], self._meant).encode() for key in self._answers)
        return isinstance(given, str) and is_one_of(given.encode(), expected)


def answer(secret: Secret, metadata: Iterable[tuple[str, str | bytes]]) -> tuple[tuple[str, str], ...]:
    """Return the trailing metadata for a caller that has asked for a proof that this service has the secret.

    The proof covers the address that the caller meant, which has been checked before. So a program at another address
    cannot use the proof.

    Args:
        metadata: the metadata of the call.
    """
    given = {key: value for key, value in metadata if isinstance(value, str)}
    found = _PROOF.fullmatch(given.get(_KEY, "").removeprefix(_SCHEME))
    if found is None or _CHALLENGE not in given:
        return ()
    return ((_ANSWER, _answer(secret.key(_ANSWERS), given[_CHALLENGE], found[4])),)


def _answer(key: bytes, challenge: str, meant: str) -> str:
    return hmac.digest(key, "\n".join((challenge, meant)).encode(), "sha256").hex()


def _mac(key: bytes, method: str, now: str, nonce: str, meant: str) -> str:
    # Only the last part can have a line break, so that no two calls have the same text.
    return hmac.digest(key, "\n".join((method, now, nonce, meant)).encode(), "sha256").hex()


class RequireProof(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs alone
    """An interceptor that ends every call without a valid proof with UNAUTHENTICATED, before any message is read.

    Health checks and calls of methods that do not exist need a proof, too.

    Args:
        known_as: targets that proofs for this server may have. The caller may add to the collection later.
    """

    def __init__(self, secret: Secret, known_as: Collection[str]) -> None:
        self._secret = secret
        self._keys = secret.keys(_PURPOSE)
        self._known_as = known_as
        self._used = _UsedNonces()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        given = [value for key, value in handler_call_details.invocation_metadata or () if key == _KEY]
        if len(given) != 1 or not isinstance(given[0], str):
            return _refusal(REFUSAL)
        if given[0].startswith(_OLD_SCHEME) and self._secret.matches(given[0][len(_OLD_SCHEME) :]):
            # Releases without proofs send the secret itself. It is accepted, so that a fleet can be updated while it
            # serves.
            return await continuation(handler_call_details)
        return self._problem(handler_call_details.method, given[0]) or await continuation(handler_call_details)

    def _problem(self, method: str, given: str) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return a handler that refuses the call; None if its proof is right.

        Args:
            given: the proof in the call's metadata.
        """
        found = _PROOF.fullmatch(given.removeprefix(_SCHEME))
        if found is None or not given.startswith(_SCHEME):
            return _refusal(REFUSAL)
        then, nonce, mac, meant = found.groups()
        if not is_one_of(mac.encode(), (_mac(key, method, then, nonce, meant).encode() for key in self._keys)):
            return _refusal(REFUSAL)
        # From here on, the caller has the secret, so it is told the reason.
        if unquote(meant) not in self._known_as and not (meant == ANY_SERVICE and method.startswith(_HEALTH)):
            return _refusal(
                f"the call was meant for {meant}, and this service is {' or '.join(sorted(self._known_as))}; give it "
                "the --advertise with which others call it"
            )
        if abs(late := time.time() - int(then)) > CLOCK_SECONDS:
            return _refusal(
                f"the clocks of the two hosts differ by about {abs(late):.0f} s, and at most {CLOCK_SECONDS:g} s are "
                "allowed; set both (NTP)",
                SKEWED,
            )
        return None if self._used.add(nonce) else _refusal("this call was sent before; each proof is accepted once")


class _UsedNonces:
    """The random numbers of accepted proofs. Each is kept until a proof of the same time would be too old anyway."""

    def __init__(self) -> None:
        self._newer: set[str] = set()
        self._older: set[str] = set()
        self._turn_at = time.monotonic()
        """Instant at which the newer numbers become the older ones, and the older ones are dropped."""

    def add(self, nonce: str) -> bool:
        """Add a random number. Return whether it is new; a number that is not new shows a replayed proof."""
        if (now := time.monotonic()) >= self._turn_at:
            # A caller's clock may be ahead, so its proof may be valid for twice the time.
            self._newer, self._older, self._turn_at = set(), self._newer, now + 2 * CLOCK_SECONDS
        if nonce in self._newer or nonce in self._older:
            return False
        self._newer.add(nonce)
        return True


def _refusal(reason: str, *metadata: tuple[str, str]) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: object, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, reason, metadata)

    # Handlers of this kind begin before a message has come; all other kinds wait for one.
    return grpc.stream_stream_rpc_method_handler(refuse)

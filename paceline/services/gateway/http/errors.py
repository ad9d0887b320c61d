"""Errors that requests are answered with, and refusals because no worker has room. `error_responses` writes answers."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, get_args

from starlette.requests import ClientDisconnect

from paceline.core.errors import BusyError, InvalidRequestError, PacelineError, UnavailableError

JITTER = 0.1
"""Clients that are refused at the same time are told random delays, which vary by this share of the delay plus one
second."""
MOST_SECONDS = 3600
"""Longest delay after which a refused client is asked to come back, in seconds."""

Reason = Literal["queue_full", "priority", "overload", "timeout", "deadline", "background", "limit"]
"""Reason why a request is refused.

queue_full: --max-waiting requests wait already. priority: more urgent requests took its place.
overload: it would miss the objective of its class. timeout: no worker had room within --queue-seconds.
deadline: the first token would come after the client's deadline. background: it is a background request and no worker
is idle. limit: it exceeds a limit of its API key.
"""
CountRefusal: TypeAlias = Callable[[str, Reason], object]
"""A function that counts a refused request, by its class and the reason."""
REASONS: tuple[Reason, ...] = get_args(Reason)

log = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = 1
"""Delay after which a client should try again if there is no forecast, in seconds."""


class NoRoomError(BusyError):
    """A request is refused because the fleet has no room for it in time.

    Args:
        seconds: delay after which the client should try again, in seconds.
    """

    def __init__(self, message: str, reason: Reason, seconds: int = 1) -> None:
        super().__init__(message)
        self.reason = reason
        self.seconds = seconds


def retry_after(seconds: float) -> int:
    """Return the delay in whole seconds after which a client should try again: at least `seconds`, up to MOST_SECONDS.

    The delay is random, so that clients that are refused together do not come back together.
    """
    spread = seconds + random.uniform(0.0, 1.0 + JITTER * seconds)
    return min(MOST_SECONDS, max(1, math.ceil(seconds), math.floor(spread)))


MESSAGE_CHARACTERS = 4000
"""Largest number of characters of an error's message. A message may quote what a client has sent, of any length."""


class ApiError(Exception):
    """An error to answer with: an HTTP status and a body. The middle of a long message is left out."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str = "",
    ) -> None:
        if len(message) > MESSAGE_CHARACTERS:
            message = f"{message[: MESSAGE_CHARACTERS // 2]} … {message[-MESSAGE_CHARACTERS // 2 :]}"
        super().__init__(message)
        self.status = status
        self.headers: dict[str, str] = {}
        """Further headers of the answer, in addition to the headers that its status needs."""
        self.is_for_others = False
        """Whether another gateway can serve the request at once, so that the client should retry there."""
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code or None}}


class NoWorkerError(UnavailableError):
    """No worker of the fleet could take a request, even if all workers had room."""

    def __init__(self) -> None:
        super().__init__("no decode worker is ready; try again later")


class ClientLeftError(ApiError):
    """The client closed its connection, so the answer is not sent. Its status only appears in the log of requests."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed its connection before the answer")


class LeavingError(UnavailableError):
    """This gateway shuts down. Another gateway can take the request or continue its stream."""

    def __init__(self) -> None:
        super().__init__(
            "this gateway is shutting down; send the request again to another one. If its events have ids, "
            "Last-Event-ID with the last one continues its stream"
        )


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together do not fit into the context of any worker.

    Args:
        prompt_tokens: length of the prompt in tokens; if it is not tokenized yet, a lower bound of its length.
        max_model_len: longest context of any worker, in tokens.
    """

    def __init__(self, message: str, param: str, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(message, param)
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class MediaError(InvalidRequestError):
    """An image, a video or an audio clip is refused by a rule, or cannot be decoded."""

    status = 400


class UnreachableMediaError(MediaError):
    """A media item could not be downloaded from its URL. The URL may be dead, or its server may have a problem."""

    status = 422


def to_api_error(error: Exception) -> ApiError:
    """Convert any error to the error to answer with. Unexpected errors are logged, and the client gets no details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnect):
        return ClientLeftError()
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=error.param, code="context_length_exceeded")
    if isinstance(error, MediaError):
        return ApiError(error.status, str(error), param=error.param, code="invalid_media")
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param)
    if isinstance(error, BusyError):
        answer = ApiError(429, str(error), type="rate_limit_exceeded", code="rate_limit_exceeded")
        if isinstance(error, NoRoomError):
            answer.headers["Retry-After"] = str(error.seconds)
        return answer
    if isinstance(error, LeavingError):
        answer = ApiError(503, str(error), type="service_unavailable", code="gateway_shutting_down")
        answer.is_for_others = True
        answer.headers = {"Connection": "close"}  # or a load balancer would send its next request here, too
        return answer
    if isinstance(error, PacelineError):
        return ApiError(503, str(error), type="service_unavailable", code="service_unavailable")
    log.error("unexpected error in a request", exc_info=error)
    return ApiError(500, "internal error of the gateway; its log says more", type="server_error")


NOT_UNICODE = "not valid Unicode (it holds half of a surrogate pair); send it in UTF-8"
"""The end of a sentence about a text, for error messages."""


def is_unicode(text: str) -> bool:
    """Return whether a text can be written in UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def is_unicode_json(value: object) -> bool:
    """Return whether all texts in a JSON value can be written in UTF-8. Otherwise no answer can have the value."""
    return is_unicode(json.dumps(value, ensure_ascii=False))

"""Errors in the form of the API that the request's path belongs to, with the field names that the client wrote."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from paceline.core.errors import BusyError, InvalidRequestError, PacelineError, UnavailableError
from paceline.services.gateway.http.messages_error import error_body
from paceline.services.gateway.http.refusals import NoRoomError, retry_after

log = logging.getLogger(__name__)

_ALL_THAT_FITS = "Input should be "
_AN_OBJECT = "Input should be a JSON object"
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")
_FRAMEWORKS = "There was an error parsing the body"
_NAME_CHARACTERS = 80
"""The most characters of a field name that an error message quotes, because a client may send any name."""


@dataclass(frozen=True, slots=True)
class FieldError:
    """A fault of one field of a request."""

    place: str
    """The path of the innermost field, such as "messages[0].role"."""
    rule: str
    """The rule's name, such as "missing", "int_type" or "less_than_equal"."""
    message: str
    """Pydantic's explanation, or ours if a JSON object is missing."""
    indexes: tuple[int, ...]
    """The list indexes in the path. If a list may have several types, each type fails at some element. The type that
    fails at the latest element is probably the one that the client meant."""

    @classmethod
    def of(cls, error: Mapping[str, Any], body: object) -> FieldError:
        """Return the error of one entry of pydantic's `errors()` about a request whose JSON was `body`."""
        place, indexes = "", []
        _, *path = error["loc"]
        for depth, part in enumerate(path, 1):
            if isinstance(body, list) and isinstance(part, int):
                place, body = f"{place}[{part}]", body[part] if part < len(body) else None
                indexes.append(part)
            elif isinstance(body, dict) and (part in body or (depth == len(path) and error["type"] == "missing")):
                name = str(part)[:_NAME_CHARACTERS]
                place, body = f"{place}.{name}" if place else name, body.get(part)
        message = _AN_OBJECT if error["type"] in _NO_OBJECT else error["msg"]
        return cls(place, error["type"], message, tuple(indexes))

    @property
    def is_about_type(self) -> bool:
        """Whether a value has the wrong type. If a field may have several types, most of them fail so."""
        return self.rule.endswith("_type")


def most_specific(errors: Sequence[FieldError]) -> FieldError:
    """Return the error to answer with.

    If all errors are about types, its message names every type that the field may have.
    """
    first = next((error for error in errors if not error.is_about_type), None)
    if first is not None:
        return first
    furthest = max(errors, key=lambda error: error.indexes)
    fitting = [each.message.removeprefix(_ALL_THAT_FITS) for each in errors if each.place == furthest.place]
    return replace(furthest, message=_ALL_THAT_FITS + " or ".join(dict.fromkeys(fitting)))


RETRY_AFTER_SECONDS = 1
"""Time after which a client comes back if nobody knows better."""


class ApiError(Exception):
    """An error to answer with: an HTTP status and a body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers: dict[str, str] = {}
        """Headers of the answer, besides those that its status needs."""
        self.is_for_others = False
        """Whether another gateway can give the answer at once."""
        self.body: dict[str, Any] = {"error": {"message": message, "type": type, "param": param, "code": code or None}}

    def response(self) -> ErrorResponse:
        """Log and return the answer, because a refused request leaves no other trace."""
        # Escaped and cut, because the message may contain text from the client.
        level = logging.WARNING if self.status >= 500 else logging.INFO
        log.log(level, "answered %d: %.500r", self.status, str(self), extra={"status": self.status})
        return self.silent_response()

    def silent_response(self) -> ErrorResponse:
        """Return the answer without logging it, because probes ask again and again."""
        headers = {"Retry-After": str(retry_after(RETRY_AFTER_SECONDS))} if self.status in (429, 503) else {}
        return ErrorResponse(self, headers | self.headers)


class ErrorResponse(JSONResponse):
    """The response to a request that failed. Its form is OpenAI's, or that of the Messages API on its paths."""

    def __init__(self, error: ApiError, headers: Mapping[str, str]) -> None:
        super().__init__(error.body, error.status, headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope.setdefault("state", {})["error_type"] = self._error.body["error"]["type"]
        if is_messages_path(scope["path"]):
            self.body = self.render(error_body(self._error.status, str(self._error), scope["state"]["request_id"]))
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's Messages API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


class NoWorkerError(UnavailableError):
    """No worker could take a request, even if all had room."""

    def __init__(self) -> None:
        super().__init__("no decode worker is ready; try again later")


class ClientLeftError(ApiError):
    """The client closed its connection. Nobody reads the answer; its status stands in the log of requests."""

    def __init__(self) -> None:
        super().__init__(499, "the client closed its connection before the answer")


class LeavingError(UnavailableError):
    """This gateway shuts down. Another one can take the request, or continue its stream."""

    def __init__(self) -> None:
        super().__init__(
            "this gateway is shutting down; send the request again to another one. If its events have ids, "
            "Last-Event-ID with the last one continues its stream"
        )


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together do not fit into the context of any worker.

    Args:
        prompt_tokens: length of the prompt; if nobody has tokenized it, the least length that it can have.
        max_model_len: longest context of any worker, in tokens.
    """

    def __init__(self, message: str, param: str, prompt_tokens: int, max_model_len: int) -> None:
        super().__init__(message, param)
        self.prompt_tokens = prompt_tokens
        self.max_model_len = max_model_len


class MediaError(InvalidRequestError):
    """An image, a video or an audio clip was refused, or cannot be decoded."""

    status = 400


class UnreachableMediaError(MediaError):
    """The server of a media item did not send it. The URL may be dead, or the server may have a problem."""

    status = 422


def to_api_error(error: Exception) -> ApiError:
    """Return the answer to any error. Unexpected errors are logged here; their details are not sent to the client."""
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


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer expected errors with an error body. RequestIdMiddleware answers unexpected ones."""
    app.add_exception_handler(ApiError, _respond)
    app.add_exception_handler(PacelineError, _respond)
    app.add_exception_handler(ClientDisconnect, _respond)  # the body did not come to its end
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


def _respond(request: Request, error: Exception) -> JSONResponse:
    return to_api_error(error).response()


def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"no such path: {request.method} {request.url.path}",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = messages.get(error.status_code, str(error.detail))
    if message == _FRAMEWORKS:
        message = "the body is not valid JSON in UTF-8"
    kind = "rate_limit_exceeded" if error.status_code == 429 else "invalid_request_error"
    response = ApiError(error.status_code, message, type=kind).response()
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # The framework names the methods of one route only, but a path may have several.
        response.headers["Allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> list[str]:
    """Return the methods that a request's path takes."""
    scopes = {method: {**request.scope, "method": method} for method in ("GET", "POST", "PUT", "DELETE")}
    routes = request.app.routes
    found = [name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return [*found, *(["HEAD"] if "GET" in found else [])]


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    """Return the most specific error with its field's path and OpenAI's status 400; FastAPI would use 422."""
    assert isinstance(error, RequestValidationError)
    # A frame of the framework refers to the error, and its traceback to the frame. The error has the request's body,
    # which would stay in memory until a garbage collection finds this cycle.
    for each in (error, error.__cause__):
        if each is not None:
            each.__traceback__ = None
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {errors[0]['ctx']['error']}").response()
    query = dict(request.query_params)
    bodies = (query if each["loc"][0] == "query" else error.body for each in errors)
    found = most_specific([FieldError.of(each, body) for each, body in zip(errors, bodies, strict=True)])
    if not found.place:
        message = "the body must be a JSON object, sent with the header Content-Type: application/json"
        return ApiError(400, message).response()
    # vLLM's clients look for the rule's name in the message, other clients look in the code.
    message = f"{found.place}: {found.message} ({found.rule})"
    return ApiError(400, message, param=found.place, code=found.rule).response()

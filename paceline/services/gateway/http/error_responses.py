"""Answers to errors, in the format of the API that the path belongs to, with the field names that the client wrote."""

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

from paceline.core.errors import PacelineError
from paceline.services.gateway.http import tei_errors
from paceline.services.gateway.http.errors import RETRY_AFTER_SECONDS, ApiError, retry_after, to_api_error
from paceline.services.gateway.http.request_scope import scope_of

log = logging.getLogger(__name__)

_ALL_THAT_FITS = "Input should be "
_AN_OBJECT = "Input should be a JSON object"
_NO_OBJECT = ("dict_type", "model_type", "model_attributes_type")
_FRAMEWORKS = "There was an error parsing the body"
_NAME_CHARACTERS = 80
"""Largest number of characters of a field name that an error message quotes, because a client may send any name."""


_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}

_MESSAGES_FIELDS = {
    "response_format.json_schema.schema": "output_config.format.schema",
    ".function.parameters": ".input_schema",
}
"""Names of chat fields that error messages may contain, and the names of the same fields in the Messages API."""


class ErrorResponse(JSONResponse):
    """The response to a failed request. It has the format of the API that the path belongs to, else OpenAI's."""

    def __init__(self, error: ApiError) -> None:
        headers = {"Retry-After": str(retry_after(RETRY_AFTER_SECONDS))} if error.status in (429, 503) else {}
        super().__init__(error.body, error.status, headers | error.headers)
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error, request_scope = self._error, scope_of(scope)
        request_scope.error_type = error.body["error"]["type"]
        if is_messages_path(scope["path"]):
            self.body = self.render(messages_error_body(error.status, str(error), request_scope.id))
            self.headers["content-length"] = str(len(self.body))
        elif request_scope.is_tei or scope["path"] in tei_errors.PATHS:
            self.status_code, body = tei_errors.tei_error(error)
            self.body = self.render(body)
            self.headers["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def logged_response(error: ApiError) -> ErrorResponse:
    """Return the response to an error, and log the error, because nothing else records a refused request."""
    # Escaped and cut, because the message may contain text from the client.
    level = logging.WARNING if error.status >= 500 else logging.INFO
    log.log(level, "answered %d: %.500r", error.status, str(error), extra={"status": error.status})
    return ErrorResponse(error)


def is_messages_path(path: str) -> bool:
    """Return whether a path belongs to Anthropic's Messages API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def messages_error_body(status: int, message: str, request_id: str) -> dict[str, Any]:
    """Return the body of an error response in the format of the Messages API.

    Args:
        status: HTTP status of the response.
    """
    for field, messages_field in _MESSAGES_FIELDS.items():
        message = message.replace(field, messages_field)
    error = {"type": _MESSAGES_TYPES.get(status, "invalid_request_error"), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def install_error_handlers(app: FastAPI) -> None:
    """Make `app` answer expected errors with an error body. `RequestScopeMiddleware` answers unexpected errors."""
    app.add_exception_handler(ApiError, _respond)
    app.add_exception_handler(PacelineError, _respond)
    app.add_exception_handler(ClientDisconnect, _respond)  # the body did not come to its end
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _validation_error)


def _respond(request: Request, error: Exception) -> JSONResponse:
    return logged_response(to_api_error(error))


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
    response = logged_response(ApiError(error.status_code, message, type=kind))
    response.headers.update(error.headers or {})
    if error.status_code == 405:
        # The framework names the methods of one route only, but a path may have several.
        response.headers["Allow"] = ", ".join(_allowed(request))
    return response


def _allowed(request: Request) -> list[str]:
    """Return the HTTP methods that the path of a request accepts."""
    scopes = {method: {**request.scope, "method": method} for method in ("GET", "POST", "PUT", "DELETE")}
    routes = request.app.routes
    found = [name for name, scope in scopes.items() if any(route.matches(scope)[0] is Match.FULL for route in routes)]
    return [*found, *(["HEAD"] if "GET" in found else [])]


def _validation_error(request: Request, error: Exception) -> JSONResponse:
    """Return the response to a validation error: the most specific fault and its field's path, with status 400.

    OpenAI uses 400, too; FastAPI itself would use 422.
    """
    assert isinstance(error, RequestValidationError)
    # A frame of the framework refers to the error, and its traceback to the frame. The error has the request's body,
    # which would stay in memory until a garbage collection finds this cycle.
    for each in (error, error.__cause__):
        if each is not None:
            each.__traceback__ = None
    errors = error.errors()
    if errors[0]["type"] == "json_invalid":
        return logged_response(ApiError(400, f"the body is not valid JSON: {errors[0]['ctx']['error']}"))
    query = dict(request.query_params)
    bodies = (query if each["loc"][0] == "query" else error.body for each in errors)
    found = most_specific([FieldError.of(each, body) for each, body in zip(errors, bodies, strict=True)])
    if not found.place:
        message = "the body must be a JSON object, sent with the header Content-Type: application/json"
        return logged_response(ApiError(400, message))
    # vLLM's clients look for the rule's name in the message, other clients look in the code.
    message = f"{found.place}: {found.message} ({found.rule})"
    return logged_response(ApiError(400, message, param=found.place, code=found.rule))


@dataclass(frozen=True, slots=True)
class FieldError:
    """A fault of one field of a request."""

    place: str
    """The path of the innermost field, such as "messages[0].role"."""
    rule: str
    """Name of the rule that the value breaks, such as "missing", "int_type" or "less_than_equal"."""
    message: str
    """Explanation of the fault: pydantic's text, or our own text if a JSON object is missing."""
    indexes: tuple[int, ...]
    """The list indexes in the path. If a list may have several types, validation reports for each type the element at
    which it fails. The client probably meant the type that fails at the latest element."""

    @classmethod
    def of(cls, error: Mapping[str, Any], body: object) -> FieldError:
        """Convert one entry of pydantic's `errors()`.

        Args:
            body: the parsed JSON of the request, to find out which objects the client has sent.
        """
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
        """Whether the fault is a value of the wrong type. A field that may have several types reports it for each other
        type."""
        return self.rule.endswith("_type")


def most_specific(errors: Sequence[FieldError]) -> FieldError:
    """Return the error to answer with: the fault that the client most probably has to mend.

    If all errors are about types, the message of the returned error names every type that the field may have.
    """
    first = next((error for error in errors if not error.is_about_type), None)
    if first is not None:
        return first
    furthest = max(errors, key=lambda error: error.indexes)
    fitting = [each.message.removeprefix(_ALL_THAT_FITS) for each in errors if each.place == furthest.place]
    return replace(furthest, message=_ALL_THAT_FITS + " or ".join(dict.fromkeys(fitting)))

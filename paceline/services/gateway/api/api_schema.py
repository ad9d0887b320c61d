"""The description of answers in `/openapi.json`.

Most routes have the same errors, which `create_app` adds. A route names the body of a successful answer, which is a
class of the module `bodies` of its API:

    @router.get("/version", response_model=None, responses=answers(Version))

The bodies of errors and of streamed events are named by reference. FastAPI would compile a class anew for every route.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema

from paceline.services.gateway.http.request_scope import aside

_REFERENCE = "#/components/schemas/{model}"

Json = dict[str, Any]
Responses = dict[int | str, Json]


class AnswerBody(BaseModel):
    """A body of an answer, or a part of one.

    Answers are plain JSON, so these classes only describe them. The classes are compiled when a client first reads the
    description. Compiling them for each route at the start would take longer than the rest of the start.
    """

    model_config = ConfigDict(defer_build=True)


class ErrorDetail(AnswerBody):
    message: str
    type: str
    param: str | None
    """Path of the field that is wrong; None if the error is not about a field."""
    code: str | None


class ErrorBody(AnswerBody):
    error: ErrorDetail


def errors_of(*bodies: type[AnswerBody]) -> Responses:
    """Return FastAPI's `responses` for the errors of any route of an API.

    Args:
        bodies: the JSON bodies that the API's errors may have.
    """
    references = [{"$ref": _REFERENCE.format(model=body.__name__)} for body in bodies]
    content = {"application/json": {"schema": references[0] if len(references) == 1 else {"anyOf": references}}}
    return {
        "4XX": {"description": "The request is wrong, or it may not be served", "content": content},
        "5XX": {"description": "The server cannot serve the request", "content": content},
    }


ERRORS = errors_of(ErrorBody)
"""FastAPI's `responses` for the errors that every route may give."""


def text_of(media_type: str = "text/plain") -> Responses:
    """Return FastAPI's `responses` for a route that succeeds with a text of a media type."""
    return {200: {"description": "Success", "content": {media_type: {"schema": {"type": "string"}}}}}


def answers(body: object, *, chunk: type[AnswerBody] | None = None) -> Responses:
    """Return FastAPI's `responses` for a route that succeeds with status 200.

    Args:
        body: the JSON body.
        chunk: the JSON of each event, if the answer can be streamed; `add_schema` must get this class, too.
    """
    described: Json = {"model": body, "description": "Success"}
    if chunk is not None:
        described["description"] += ". A stream may end with the body of an error"
        described["content"] = {"text/event-stream": {"schema": {"$ref": _REFERENCE.format(model=chunk.__name__)}}}
    return {200: described}


def add_schema(app: FastAPI, referenced: Sequence[type[AnswerBody]]) -> None:
    """Add the route `/openapi.json`. Its text is made once, at the first request: this takes a tenth of a second.

    Args:
        referenced: bodies of streamed events and errors, which routes name by reference and FastAPI does not know.
    """
    make = app.openapi

    def openapi() -> Json:
        schema = make()
        _, described = models_json_schema([(body, "serialization") for body in referenced], ref_template=_REFERENCE)
        schema["components"]["schemas"] |= described["$defs"]
        return schema

    @functools.cache
    def written() -> bytes:
        return bytes(JSONResponse(openapi()).body)

    @app.get("/openapi.json", include_in_schema=False)
    async def describe(request: Request) -> Response:
        return Response(await aside(request, written), media_type="application/json")

    app.openapi = openapi  # type: ignore[method-assign]

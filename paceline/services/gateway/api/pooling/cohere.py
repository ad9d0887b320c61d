"""Embeddings in the forms of Cohere's API, versions 1 and 2."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeAlias

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray
from pydantic import Field, model_validator
from pydantic_core import to_json

from paceline.services.gateway.api.api_schema import answers
from paceline.services.gateway.api.pooling.bodies import CohereEmbeddings
from paceline.services.gateway.api.pooling.conversations import conversation_inputs
from paceline.services.gateway.api.pooling.encoding import (
    Json,
    Values,
    base64_json,
    json_list,
    json_object,
    numbers_json,
    to_bytes,
    written,
    written_json,
)
from paceline.services.gateway.api.pooling.inputs import check_count, choose_model, prompt_named
from paceline.services.gateway.api.pooling.pool import Pooled, pool
from paceline.services.gateway.api.respond import choose_id
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.chat_schemas import ChatMessage, ContentPart, TextPart, text_of
from paceline.services.gateway.planning.media.parts import MediaPart
from paceline.services.gateway.planning.pooling import PoolOptions, Side, TextInput
from paceline.services.gateway.planning.request_body import Body, NamedRequest

EmbeddingType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]

PURPOSES: Mapping[str, tuple[str, ...]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage", "corpus"),
    "classification": (),
    "clustering": (),
}
"""Cohere's own input types, with other names that models have for such a prompt. A model without a prompt for one of
them takes the texts as they are, because Cohere's clients always send a type."""
_SIDES: Mapping[str, Side | None] = {"NONE": None, "START": "start", "END": "end"}


class MixedInput(Body):
    """An input that is given in parts: texts and images."""

    content: Annotated[list[ContentPart], Field(min_length=1)]

    @property
    def is_text(self) -> bool:
        return all(isinstance(part, TextPart) for part in self.content)


class CohereRequest(NamedRequest):
    """The body of POST /v2/embed and /v1/embed."""

    texts: list[str] | None = None
    inputs: list[MixedInput] | None = None
    images: list[str] | None = None
    """Images as data URLs or URLs, of which each is an input."""
    input_type: str | None = None
    """Purpose of the embeddings: one of PURPOSES, or the name of a prompt of the model."""
    output_dimension: int | None = Field(None, ge=1)
    embedding_types: Annotated[list[EmbeddingType], Field(min_length=1)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    """End at which texts that are too long are cut; NONE refuses them."""
    max_tokens: int | None = Field(None, ge=1)
    """Largest number of tokens of a text."""
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)

    @model_validator(mode="after")
    def _check_forms(self) -> CohereRequest:
        if sum(each is not None for each in (self.texts, self.inputs, self.images)) != 1:
            raise ApiError(400, "send one of texts, inputs and images", param="texts")
        return self

    @property
    def written(self) -> list[str]:
        """The texts of the inputs, which the answer repeats; "" for an image."""
        if self.texts is not None:
            return self.texts
        return [text_of(each.content) for each in self.inputs or ()] or [""] * len(self.images or ())

    async def pool_inputs(self, model: ModelFleet, request: Request, prompt: str) -> list[TextInput]:
        """Return the inputs. If any has an image, all of them are conversations: the prompt as the system message, and
        the parts as the user's message.

        Raises ApiError if there are none or too many, and the errors of `conversation_inputs`.
        """
        place = "texts" if self.texts is not None else "inputs" if self.inputs is not None else "images"
        check_count(len(self.written), place, place)
        parts = [each.content for each in self.inputs or ()]
        if self.images is None and all(each.is_text for each in self.inputs or ()):
            return [TextInput(text, f"{place}[{index}]") for index, text in enumerate(self.written)]
        parts += [[MediaPart.model_validate({"type": "image_url", "image_url": url})] for url in self.images or ()]
        system = [ChatMessage(role="system", content=prompt)] if prompt else []
        conversations = {
            f"{place}[{index}]": [*system, ChatMessage(role="user", content=each)] for index, each in enumerate(parts)
        }
        return await conversation_inputs(model, request, conversations)


def add_cohere(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes POST /v2/embed and /v1/embed to a router."""
    api = CohereApi(gateway)
    router.post("/v2/embed", response_model=None, responses=answers(CohereEmbeddings))(api.embed_v2)
    router.post("/v1/embed", response_model=None, responses=answers(CohereEmbeddings))(api.embed_v1)


class CohereApi:
    """The routes for embeddings of Cohere's API."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def embed_v2(self, body: CohereRequest, request: Request) -> Response:
        return await self._embed(body, request, "2")

    async def embed_v1(self, body: CohereRequest, request: Request) -> Response:
        """Answer like version 1, which has a plain list of vectors unless the client names types."""
        return await self._embed(body, request, "1")

    async def _embed(self, body: CohereRequest, request: Request, version: str) -> Response:
        model = choose_model(self._gateway, body.model, "embed")
        prompt = purpose_prompt(model, body.input_type)
        inputs = await body.pool_inputs(model, request, prompt)
        types = list(dict.fromkeys(body.embedding_types or ["float"]))
        if {"binary", "ubinary"} & {*types}:
            _check_bits(model, body.output_dimension)
        options = PoolOptions(
            dimensions=body.output_dimension,
            prompt=prompt,
            truncate=_SIDES[body.truncate],
            max_tokens=body.max_tokens,
            priority=body.priority,
        )
        response_id = choose_id(None, request)
        pooled = await pool(model, request, inputs, options)
        texts = body.written

        def write() -> Response:
            is_plain = version == "1" and body.embedding_types is None
            lists = (b'"%s":%s' % (each.encode(), json_list(map(_WRITERS[each], pooled.rows))) for each in types)
            head = {
                "id": response_id,
                "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
                "meta": _meta(version, pooled),
            }
            return written_json(
                json_object(
                    head,
                    embeddings=json_list(map(numbers_json, pooled.rows)) if is_plain else b"{%s}" % b",".join(lists),
                    texts=json_list(map(to_json, texts)),
                )
            )

        return await written(request, pooled.rows, write, sum(map(len, texts)))


def purpose_prompt(model: ModelFleet, purpose: str | None, place: str = "input_type") -> str:
    """Return the text that a model puts before texts for a purpose. Raises ApiError if the purpose is unknown."""
    prompts = {} if model.pooling is None else model.pooling.prompts
    for name in () if purpose is None else (purpose, *PURPOSES.get(purpose, ())):
        if name in prompts:
            return prompts[name]
    return "" if purpose in PURPOSES else prompt_named(model, purpose, place)


def _check_bits(model: ModelFleet, dimensions: int | None) -> None:
    size = dimensions or (model.pooling.dim if model.pooling is not None else 0)
    if size % 8:
        message = f"binary embeddings have a bit for each of their numbers, which must be a multiple of 8, not {size}"
        raise ApiError(400, message, param="embedding_types")


def _meta(version: str, pooled: Pooled) -> Json:
    tokens = sum(pooled.prompt_tokens)
    cut = sum(map(bool, pooled.cut_tokens))
    warnings = [f"{cut} texts were too long and lost {sum(pooled.cut_tokens)} tokens"] if cut else None
    return {
        "api_version": {"version": version},
        "billed_units": {"input_tokens": tokens},
        "tokens": {"input_tokens": tokens},
        **({"warnings": warnings} if warnings else {}),
    }


def _int8(row: Values) -> NDArray[np.int8]:
    """Return a vector scaled so that its largest number is 127 or -127, which keeps the cosine with others."""
    most = float(np.abs(row).max())
    scaled: NDArray[np.int8] = np.rint(row * (127 / most if most else 0.0)).astype(np.int8)
    return scaled


def _bits(row: Values) -> NDArray[np.uint8]:
    """Return a bit for each number of a vector, set unless it is negative; the first one is the highest of a byte."""
    return np.packbits(row >= 0)


_WRITERS: Mapping[str, Callable[[Values], bytes]] = {
    "float": numbers_json,
    "int8": lambda row: numbers_json(_int8(row)),
    "uint8": lambda row: numbers_json(_int8(row).astype(np.int16) + 128),
    "binary": lambda row: numbers_json(_bits(row).astype(np.int16) - 128),
    "ubinary": lambda row: numbers_json(_bits(row)),
    "base64": lambda row: base64_json(to_bytes(row)),
}
"""Function that makes the JSON of a vector, by type. Signed bytes are the unsigned ones minus 128."""

"""The tokens of texts in the forms of vLLM and of Text Embeddings Inference (TEI), and the texts of tokens in that of
TEI."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Discriminator, Tag
from pydantic_core import to_json

from paceline.services.gateway.api.api_schema import answers, errors_of
from paceline.services.gateway.api.chat_planning import encode_conversation
from paceline.services.gateway.api.openai.bodies import Tokens
from paceline.services.gateway.api.pooling.bodies import TeiError, TeiTokens, Texts
from paceline.services.gateway.api.pooling.encoding import Json, json_list, written_json
from paceline.services.gateway.api.pooling.inputs import check_count, prompt_named
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.request_scope import aside, scope_of
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.request_body import NamedRequest
from paceline.services.gateway.planning.sampling import check_ids
from paceline.services.gateway.planning.schemas import TokenId, TokenizeRequest
from paceline.services.gateway.planning.tokenizer import Tokenizer


class TeiTokenizeRequest(NamedRequest):
    """The body of POST /tokenize in TEI's form."""

    inputs: str | list[str]
    add_special_tokens: bool = True
    prompt_name: str | None = None
    """Name of the model's prompt to put before each text."""


class TeiDecodeRequest(NamedRequest):
    """The body of POST /decode."""

    ids: list[TokenId] | list[list[TokenId]]
    skip_special_tokens: bool = True


def _form(body: Any) -> str:
    """Return the tag of a body's form. It is no field's name, for clear errors."""
    is_tei = isinstance(body, TeiTokenizeRequest) or (isinstance(body, dict) and "inputs" in body)
    return "form of TEI" if is_tei else "form of vLLM"


LIST_PIECE = 10_000
"""Number of values of a long list that are written to JSON at once, while no other thread runs."""

DESCRIPTION_COST = 200
"""Bytes of memory that are counted for each character of a text whose tokens are described: a character may be a token,
and its description is in the answer twice while it is written."""

AnyTokenizeRequest = Annotated[
    Annotated[TokenizeRequest, Tag("form of vLLM")] | Annotated[TeiTokenizeRequest, Tag("form of TEI")],
    Discriminator(_form),
]


def add_tokenizing(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes POST /tokenize, in the forms of vLLM and TEI, and POST /decode to a router."""
    api = TokenizingApi(gateway)
    router.post("/tokenize", response_model=None, responses=answers(Tokens | TeiTokens))(api.tokenize)
    router.post("/decode", response_model=None, responses=answers(Texts) | errors_of(TeiError))(api.decode)


class TokenizingApi:
    """The routes POST /tokenize and /decode."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, body: AnyTokenizeRequest, request: Request) -> Response:
        model = self._gateway.pick(body.model)
        if isinstance(body, TokenizeRequest):
            return await _tokenize(model, body, request)
        scope_of(request).is_tei = True
        prompt = prompt_named(model, body.prompt_name, "prompt_name") if body.prompt_name is not None else ""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        check_count(len(texts), "inputs")
        special = body.add_special_tokens

        scope = scope_of(request)
        scope.memory.take(scope.owner, DESCRIPTION_COST * sum(len(prompt) + len(text) for text in texts))

        def encode() -> Response:
            # Text by text, because each description takes hundreds of bytes before it is written.
            return written_json(
                json_list(_list_json(tokens_of(prompt + text, model.tokenizer, special)) for text in texts)
            )

        return await aside(request, encode)

    async def decode(self, body: TeiDecodeRequest, request: Request) -> Response:
        tokenizer = self._gateway.pick(body.model).tokenizer
        check_count(len(body.ids), "ids")
        lists: Any = body.ids if isinstance(body.ids[0], list) else [body.ids]

        def decode() -> Response:
            for ids in lists:
                check_ids(ids, tokenizer.vocab_size, "ids")
            return written_json(json_list(to_json(tokenizer.decode(ids, body.skip_special_tokens)) for ids in lists))

        return await aside(request, decode)


def tokens_of(text: str, tokenizer: Tokenizer, add_special_tokens: bool) -> list[Json]:
    """Return TEI's description of each token of a text. Places are in characters, and missing for special tokens.

    Raises InvalidRequestError if the text is not valid Unicode, or too long.
    """
    (own,) = tokenizer.encode_batch([(text, "inputs")], add_special_tokens)
    return [
        {
            "id": token,
            "text": tokenizer.token_string(token) if special else text[start:stop],
            "special": bool(special),
            "start": None if special else start,
            "stop": None if special else stop,
        }
        for token, special, (start, stop) in zip(
            own.ids, own.special_tokens_mask, tokenizer.offsets(text, add_special_tokens), strict=True
        )
    ]


def _list_json(values: Sequence[Json]) -> bytes:
    """Return a list as JSON, written in pieces because it may have a million values."""
    begins = range(0, len(values), LIST_PIECE)
    return json_list(to_json(values[begin : begin + LIST_PIECE])[1:-1] for begin in begins)


async def _tokenize(model: ModelFleet, body: TokenizeRequest, request: Request) -> Response:
    """Return the tokens of a text or a conversation, in vLLM's form."""
    tokenizer, special = model.tokenizer, body.add_special_tokens
    if body.prompt is None:
        tokens = (await encode_conversation(model, body, request, special is True)).token_ids
    else:
        tokens = await aside(request, tokenizer.encode, body.prompt, special is not False)

    def encode() -> bytes:
        strings = [tokenizer.token_string(token) for token in tokens] if body.return_token_strs else None
        count = json.dumps({"count": len(tokens), "max_model_len": model.fleet.max_model_len()})
        written = "null" if strings is None else _write_list(strings)
        return f'{count[:-1]}, "tokens": {_write_list(tokens)}, "token_strs": {written}}}'.encode()

    return Response(await aside(request, encode), media_type="application/json")


def _write_list(values: Sequence[int] | Sequence[str]) -> str:
    """Return a list as JSON text, written in pieces because it may have millions of values."""
    pieces = (json.dumps(values[begin : begin + LIST_PIECE])[1:-1] for begin in range(0, len(values), LIST_PIECE))
    return f"[{', '.join(pieces)}]"

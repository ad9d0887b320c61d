"""The endpoints that name adapters and forget their names while the server runs, as in vLLM."""

from __future__ import annotations

import os
import re
from typing import Annotated

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response
from pydantic import AfterValidator, Field

from paceline.core.adapters import MOST_NAME_CHARACTERS, is_adapter_name
from paceline.core.errors import InvalidRequestError
from paceline.services.gateway.api.api_schema import text_of
from paceline.services.gateway.fleet.adapter_check import check_adapter
from paceline.services.gateway.gateway import Gateway
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.model_fleet import ModelFleet
from paceline.services.gateway.planning.request_body import Body


def _checked_name(name: str) -> str:
    if not is_adapter_name(name):
        raise ValueError(f"an adapter's name has 1 to {MOST_NAME_CHARACTERS} visible characters other than a comma")
    return name


_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@.+)?", re.ASCII)


class LoadAdapterRequest(Body):
    """An adapter to be named."""

    lora_name: Annotated[str, AfterValidator(_checked_name)]
    lora_path: str = Field(min_length=1, max_length=4096)
    """Folder of the adapter on the machines of workers, or its name on the hub: org/name, or org/name@revision."""
    load_inplace: bool = False
    """Whether the name may have another adapter already, which it then loses."""
    base_model_name: str | None = None
    """The model that the adapter changes; a gateway with one model needs no name."""


class UnloadAdapterRequest(Body):
    """An adapter whose name is to be forgotten."""

    lora_name: str = Field(min_length=1)


def add_adapters(router: APIRouter, gateway: Gateway) -> None:
    """Add the routes POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter to a router."""
    api = AdaptersApi(gateway)
    router.post("/v1/load_lora_adapter", response_class=Response, responses=text_of())(api.load)
    router.post("/v1/unload_lora_adapter", response_class=Response, responses=text_of())(api.unload)


class AdaptersApi:
    """The routes POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def load(self, body: LoadAdapterRequest) -> Response:
        model = self._gateway.find(body.base_model_name)
        if not model.config.enable_lora:
            raise ApiError(400, "this server takes no adapters; start it with --enable-lora", param="lora_name")
        self._check_name(model, body)
        try:
            adapter = await check_adapter(model.fleet, body.lora_name, _place(body.lora_path))
        except InvalidRequestError as error:
            raise ApiError(400, str(error), param="lora_path") from None
        self._check_name(model, body)  # another request may have given the name meanwhile
        model.name_adapter(adapter)
        return PlainTextResponse(f"Success: LoRA adapter '{adapter.name}' added successfully.")

    def _check_name(self, model: ModelFleet, body: LoadAdapterRequest) -> None:
        """Raise ApiError if an adapter cannot get the name that a request gives it."""
        name = body.lora_name
        if name in self._gateway.models or any(name in each for each in self._others(model)):
            raise ApiError(400, f"{name!r} is the name of another model; choose another name", param="lora_name")
        if model.adapters.find(name) is not None and not body.load_inplace:
            message = f"the adapter {name!r} is there already; set load_inplace to replace it"
            raise ApiError(400, message, param="lora_name")

    async def unload(self, body: UnloadAdapterRequest) -> Response:
        name = body.lora_name
        for model in self._gateway.models.values():
            if model.adapters.find(name) is not None:
                model.forget_adapter(name)
                return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
        raise ApiError(404, f"there is no adapter {name!r}", param="lora_name", code="model_not_found")

    def _others(self, model: ModelFleet) -> list[set[str]]:
        """Return the names of the adapters of each other model."""
        fleets = self._gateway.models.values()
        return [{adapter.name for adapter in fleet.adapters} for fleet in fleets if fleet is not model]


def _place(path: str) -> str:
    """Return the absolute path of a folder, or a name on the hub, which workers fetch."""
    return path if _HUB_NAME.fullmatch(path) and not os.path.exists(path) else os.path.abspath(os.path.expanduser(path))

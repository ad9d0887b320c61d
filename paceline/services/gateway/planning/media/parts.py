"""Parts of messages that are images, videos or audio, in the forms of OpenAI, vLLM and Anthropic."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from paceline.services.gateway.planning.media.items import Expansions, ItemKind, MediaItem
from paceline.services.gateway.planning.request_body import Body

Json = dict[str, Any]

MediaType = Literal["image_url", "video_url", "audio_url", "input_image", "input_audio"]
MEDIA_TYPES = get_args(MediaType)
MAX_UUID_CHARACTERS = 256
_NESTS = (list, BaseModel)
_DETAILS = ("auto", "low", "high", "original")


class Placed(Body):
    """Base class of message parts that know their path in the request."""

    _place: str = PrivateAttr("")

    @property
    def place(self) -> str:
        """The path to the part, such as `messages[0].content[1]`; "" if `name_places` has not seen the part."""
        return self._place


def name_places(body: object, place: str) -> None:
    """Set the paths of all parts in `body`, whose own path is `place`. Parts that have a path already keep it."""
    for path, part in _parts_of(body, place):
        part._place = part._place or path


def pin_meanings(body: object, media: Expansions) -> None:
    """Record in each part that has only a uuid the digest of its media, so that a stored response keeps its meaning."""
    for _, part in _parts_of(body, ""):
        if isinstance(part, MediaPart) and part.url is None and part.item in media:
            part.digest = media[part.item].digest


def _parts_of(body: object, place: str) -> Iterator[tuple[str, Placed]]:
    """Yield the path and the part of each part in `body`, whose own path is `place`."""
    if isinstance(body, Placed):
        yield place, body
    elif isinstance(body, list):
        for index, entry in enumerate(body):
            if isinstance(entry, _NESTS):
                yield from _parts_of(entry, f"{place}[{index}]")
    elif isinstance(body, BaseModel):
        # The fields, without the generator that pydantic has for them: most messages are only texts.
        for name, value in body.__dict__.items():
            if isinstance(value, _NESTS):
                yield from _parts_of(value, f"{place}.{name}")


class MediaPart(Placed):
    """An image, a video or audio in a message. A part without a URL stands for the earlier item with the same uuid."""

    model_config = ConfigDict(json_schema_extra=lambda schema: _as_clients_write(schema))

    type: MediaType
    url: str | None = None
    uuid: str | None = None
    digest: str = ""
    """Digest of the item that the uuid must stand for; "" for any item. This server adds it to a stored part that has
    only a uuid."""
    detail: str = "auto"
    """OpenAI's field for an image's resolution. It is kept and has no effect; use `mm_processor_kwargs` instead."""
    audio_format: str | None = None
    """The field `format` of an `input_audio`, such as "wav"; None for other parts."""

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("type") not in MEDIA_TYPES:
            return data
        kind, uuid = data["type"], data.get("uuid")
        if uuid is not None and not (isinstance(uuid, str) and 0 < len(uuid) <= MAX_UUID_CHARACTERS):
            raise _error(f"uuid must be a text of 1 to {MAX_UUID_CHARACTERS} characters")
        if kind == "input_image" and data.get("file_id") is not None:
            raise _error("file_id is not supported, because this server keeps no files; send an image_url")
        field = "image_url" if kind == "input_image" else kind
        given = data.get(field)
        url = _audio_url(given) if kind == "input_audio" else _url(given, field)
        if url is None and uuid is None:
            raise _error(f"{field} is missing or empty; only an item with the uuid of an earlier one may leave it out")
        read = {"type": kind, "url": url, "uuid": uuid, "digest": data.get("digest") or ""}
        if kind == "input_audio" and isinstance(given, dict):
            read["audio_format"] = given["format"]
        detail = given.get("detail") if kind == "image_url" and isinstance(given, dict) else data.get("detail")
        if detail is not None and detail not in _DETAILS:
            raise _error(f"detail must be one of {', '.join(_DETAILS)}")
        return read if detail is None else {**read, "detail": detail}

    @property
    def item(self) -> MediaItem:
        return MediaItem(self.kind, self.url, self.uuid, self.digest, self.place)

    @property
    def kind(self) -> ItemKind:
        return "image" if "image" in self.type else "video" if "video" in self.type else "audio"

    def for_template(self) -> Json:
        return {"type": self.kind}

    @model_serializer
    def stored(self) -> Json:
        """Return the part as JSON in a form that a client can send in a new request."""
        names = {name: value for name in ("uuid", "digest") if (value := getattr(self, name))}
        if self.kind == "image":
            return {"type": "input_image", "image_url": self.url, "detail": self.detail, **names}
        if self.type == "input_audio":
            beginning = data_url(f"audio/{self.audio_format}", "")
            sent = self.url and {"data": self.url.removeprefix(beginning), "format": self.audio_format}
            return {"type": "input_audio", "input_audio": sent, **names}
        field = f"{self.kind}_url"
        return {"type": field, field: {"url": self.url}, **names}


def _url(given: Any, field: str) -> str | None:
    """Return the URL in `given`: an object with a `url`, or the URL itself, which vLLM allows."""
    if isinstance(given, dict):
        given = given.get("url")
    if given is not None and not isinstance(given, str):
        raise _error(f"{field} must be an object with a url")
    return given or None


def _audio_url(given: Any) -> str | None:
    """Return the data of an `input_audio` as a data: URL."""
    if given is None:
        return None
    data, form = (given.get("data"), given.get("format")) if isinstance(given, dict) else (None, None)
    if not isinstance(data, str) or not isinstance(form, str) or not form.isalnum():
        raise _error("input_audio must be an object with data, in base64, and format, such as wav or mp3")
    return data_url(f"audio/{form}", data)


def data_url(media_type: str, data: str) -> str:
    """Return data in base64 as a data: URL. Data that already is such a URL stays unchanged."""
    return data if data[:5].lower() == "data:" else f"data:{media_type};base64,{data}"


def _error(message: str) -> PydanticCustomError:
    # The message may have braces of the client's, which must not be read as a format.
    return PydanticCustomError("media", "{message}", {"message": message})


def _as_clients_write(schema: Json) -> None:
    """Change the JSON schema of MediaPart into the schema of the parts that clients send."""
    about = {key: schema[key] for key in ("title", "description")}
    text, null = {"type": "string"}, {"type": "null"}
    link = {"anyOf": [{"type": "object", "properties": {"url": text}, "required": ["url"]}, text, null]}
    audio = {"type": "object", "properties": {"data": text, "format": text}, "required": ["data", "format"]}
    fields = dict.fromkeys(("image_url", "video_url", "audio_url"), link)
    forms = {**{name: (name, own) for name, own in fields.items()}, "input_image": ("image_url", link)}
    forms["input_audio"] = ("input_audio", {"anyOf": [audio, null]})
    kinds = [
        {"type": "object", "properties": {"type": {"const": kind}, name: own, "uuid": text}, "required": ["type"]}
        for kind, (name, own) in forms.items()
    ]
    schema.clear()
    schema |= {"anyOf": kinds, **about}

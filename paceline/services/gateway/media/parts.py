"""Parts of messages that are images, videos or audio, in the forms of OpenAI, vLLM and Anthropic."""

from __future__ import annotations

from typing import Any, Literal, get_args

from pydantic import ConfigDict, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from paceline.services.gateway.answer_format import Body
from paceline.services.gateway.media.items import ItemKind, MediaItem

Json = dict[str, Any]

MediaType = Literal["image_url", "video_url", "audio_url", "input_image", "input_audio"]
MEDIA_TYPES = get_args(MediaType)
MAX_UUID_CHARACTERS = 256


class MediaPart(Body):
    """An image, a video or audio in a message. Without data, it is the one that came before with the same uuid."""

    model_config = ConfigDict(json_schema_extra=lambda schema: _as_clients_write(schema))

    type: MediaType
    url: str | None = None
    uuid: str | None = None

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
            raise _error(f"{field} is missing; only an item with the uuid of an earlier one may leave it out")
        return {"type": kind, "url": url, "uuid": uuid}

    @property
    def item(self) -> MediaItem:
        return MediaItem(self.kind, self.url, self.uuid)

    @property
    def kind(self) -> ItemKind:
        return "image" if "image" in self.type else "video" if "video" in self.type else "audio"

    def for_template(self) -> Json:
        return {"type": self.kind}

    @model_serializer
    def stored(self) -> Json:
        """Return the part as a client may send it again."""
        uuid = {} if self.uuid is None else {"uuid": self.uuid}
        if self.kind == "image":
            return {"type": "input_image", "image_url": self.url, "detail": "auto", **uuid}
        field = f"{self.kind}_url"
        return {"type": field, field: {"url": self.url}, **uuid}


def _url(given: Any, field: str) -> str | None:
    """Return the URL in `given`, which may be an object or, as vLLM allows it, the URL itself."""
    if isinstance(given, dict):
        given = given.get("url")
    if given is not None and not isinstance(given, str):
        raise _error(f"{field} must be an object with a url")
    return given or None


def _audio_url(given: Any) -> str | None:
    """Return the data of an `input_audio` as a URL."""
    if given is None:
        return None
    data, form = (given.get("data"), given.get("format")) if isinstance(given, dict) else (None, None)
    if not isinstance(data, str) or not isinstance(form, str) or not form.isalnum():
        raise _error("input_audio must be an object with data, in base64, and format, such as wav or mp3")
    return data_url(f"audio/{form}", data)


def data_url(media_type: str, data: str) -> str:
    """Return data in base64 as a URL. Data that is such a URL already stays as it is."""
    return data if data.startswith("data:") else f"data:{media_type};base64,{data}"


def _error(message: str) -> PydanticCustomError:
    # The message may have braces of the client's, which must not be read as a format.
    return PydanticCustomError("media", "{message}", {"message": message})


def _as_clients_write(schema: Json) -> None:
    """Change the JSON schema of MediaPart into that of what clients send."""
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

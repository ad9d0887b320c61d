"""The events of an answer that is streamed, for every API, and the chunks of the OpenAI API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from paceline.services.gateway.api.choice import Delta
from paceline.services.gateway.api.generation import Generation
from paceline.services.gateway.api.response_format import Json, ResponseFormat, TextChunk
from paceline.services.gateway.api.resume import StreamIds
from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.http.event_streams import ENCODER, event, framed
from paceline.services.gateway.planning.schemas import StreamOptions

_MARK = "\0"
"""Stand-in for the text of a chunk. No other string in a chunk equals it."""
_DONE = b"data: [DONE]\n\n"


class StreamWriter(Protocol):
    """A converter of one response's deltas into server-sent events of an API. Empty bytes are no event."""

    def begin(self) -> bytes:
        """Return the events before the first delta. They are sent with it, or with an earlier ping."""

    def write(self, delta: Delta) -> bytes:
        """Return the events of a delta."""

    def end(self) -> bytes:
        """Return the events after the last delta."""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream which has begun and cannot go on."""


async def event_stream(
    generation: Generation, writer: StreamWriter, ids: StreamIds | None = None
) -> AsyncGenerator[bytes]:
    """Yield the server-sent events of a generation. Events that are ready together are joined.

    A caller that stops early must close the generator.

    Args:
        ids: the ids of the events; None if they have none.
    """
    begun = ids is not None and ids.resumes
    if begun:
        writer.begin()  # the client has these events
    async with generation.running():
        while batch := await generation.batch():
            if ids is None:
                data = b"".join(map(writer.write, batch))
            else:
                data = b"".join(ids.mark(delta, writer.write(delta)) for delta in batch)
            if not begun:
                beginning = writer.begin()
                begun, data = True, (beginning if ids is None else ids.begin(beginning)) + data
            if data:
                yield data
    yield writer.end()


class ChunkWriter:
    """The stream of OpenAI's chats and completions: chunks, and `[DONE]` at the end; see `StreamWriter`.

    Args:
        usage: returns the usage, counting all tokens that have come.
    """

    def __init__(self, response_format: ResponseFormat, options: StreamOptions, usage: Callable[[], Json]) -> None:
        self._format = response_format
        self._options = options
        self._usage = usage
        self._around_text: dict[tuple[int, str | int], list[str]] = {}
        """For each choice and place, the JSON around the text of its chunks, which differ in nothing but the text."""

    def begin(self) -> bytes:
        return b""

    def write(self, delta: Delta) -> bytes:
        return b"".join(map(self._write_chunk, self._format.chunks(delta)))

    def end(self) -> bytes:
        usage = event(self._format.usage_chunk(self._usage())) if self._options.include_usage else b""
        return usage + _DONE

    def error(self, error: ApiError) -> bytes:
        return event(error.body) + _DONE

    def _write_chunk(self, chunk: Json | TextChunk) -> bytes:
        if not isinstance(chunk, TextChunk):
            return event(self._with_usage(chunk))
        if self._options.continuous_usage_stats:
            return event(self._with_usage(self._format.text_chunk(*chunk)))
        choice, text, place = chunk
        if (around := self._around_text.get((choice, place))) is None:
            whole = ENCODER.encode(self._with_usage(self._format.text_chunk(choice, _MARK, place)))
            around = self._around_text[choice, place] = whole.split(ENCODER.encode(_MARK))
        return framed(ENCODER.encode(text).join(around))

    def _with_usage(self, chunk: Json) -> Json:
        if self._options.include_usage:
            continuous = self._options.continuous_usage_stats
            chunk["usage"] = self._format.usage_so_far(self._usage()) if continuous else None
        return chunk

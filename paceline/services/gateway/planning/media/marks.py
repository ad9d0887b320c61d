"""The places of media in a rendered conversation, which no text of a client can forge."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from paceline.services.gateway.planning.media.items import ItemKind


class MediaMarks:
    """Unguessable texts that a chat template writes instead of the model's markers.

    A client may write a marker such as `<|image|>` in a message, even spread over several fields that the template
    joins. So the markers in the template's own source are replaced before it is compiled. Then a mark in the rendered
    text comes from the template alone.

    Args:
        markers: the text that the template writes for an item of each kind.
    """

    def __init__(self, markers: Mapping[ItemKind, str]) -> None:
        self._markers = dict(markers)
        # Letters and digits pass through all filters of templates.
        self._marks: dict[str, ItemKind] = {f"media{secrets.token_hex(16)}": kind for kind in markers}
        self._any_mark = re.compile("|".join(self._marks) or r"(?!)")

    def hide_markers(self, source: str) -> str:
        """Return a template's source with marks instead of markers."""
        for mark, kind in self._marks.items():
            source = source.replace(self._markers[kind], mark)
        return source

    def show_markers(self, rendered: str) -> str:
        """Return a rendered text as the model's own template writes it."""
        if not self._marks:
            return rendered
        return self._any_mark.sub(lambda found: self._markers[self._marks[found[0]]], rendered)

    def marker(self, kind: ItemKind) -> str:
        """Return the text that the template writes for an item."""
        return self._markers[kind]

    def split(self, rendered: str) -> tuple[list[str], list[ItemKind]]:
        """Return the texts between the marks of a rendered text, and the kinds of these marks: one less than texts."""
        if not self._marks:  # A search for nothing takes long in a long text.
            return [rendered], []
        kinds = [self._marks[mark] for mark in self._any_mark.findall(rendered)]
        return self._any_mark.split(rendered), kinds

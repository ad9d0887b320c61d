"""The context of a sequence: everything that its KV depends on. Only this file gives KV blocks their names.

A *link* is a hash of the context up to a multiple of `BASE_TOKENS` tokens. Each link hashes the link before it and the
tokens after it, so two contexts have the same link exactly if they are equal up to the link's end. The first link
hashes the *root*. A block of a group is named by the link at its end.

    root ──▶ link 0 (tokens 0-15) ──▶ link 1 (tokens 16-31) ──▶ …

`ContextRoot` has everything that the KV of every token depends on: the KV layout, which includes the model, the cache
salt, and the content of the adapter. If the context begins with tokens that all owners share, such as an operator's
system prompt, the links of these tokens do not hash the salt, and the next link does:

    root without salt ──▶ link 0 ──▶ … ──▶ last shared link ──▶ salt ──▶ next link ──▶ …

The name of a tail within the shared tokens hashes the salt, unless the tail ends on a link.

The KV of an image's tokens depends on the image, so the links of these tokens also hash its digest, its grid and the
place of the link within it. The positions of later tokens may depend on the grid, so they follow from the links, too.
An absent part must not change the hash, because cached blocks outlive a release.

An encoding is a context, too: its root has the digest of the encoder's input, and its tokens have no ids.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from paceline.core.kv_layout import BASE_TOKENS, KVGroup, KVLayout
from paceline.core.media import MediaSpan

HASH_BYTES = 16
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class ContextRoot:
    """The properties of a context on which the KV of all of its tokens depends, besides the tokens themselves."""

    layout: str
    """Fingerprint of the KV layout: model, weights, dtype and shapes."""
    cache_salt: str = ""
    """Contexts with different salts share no block, except for those of shared tokens, whose root has no salt."""
    encoding: bytes = b""
    """Digest of an encoder's input if the blocks hold the encoding of this input; empty if they hold KV."""
    adapter: bytes = b""
    """Digest of the content of the adapter with which the KV is computed; empty for the model alone."""

    def digest(self) -> bytes:
        parts: tuple[object, ...] = (self.layout, self.cache_salt)
        if self.encoding or self.adapter:
            parts += (self.encoding,)
        if self.adapter:
            parts += (self.adapter,)
        return _hash(repr(parts).encode())


class Tail(NamedTuple):
    """A place in a context at which another request has ended. The last blocks before it may be cached, even partial
    ones.
    """

    length: int
    """Number of tokens of the context before the place."""
    name: bytes
    """Name of the tokens before the place, from `Context.name`. Every partial block that ends at the place has this
    name.
    """


class Context:
    """The tokens of one sequence, prompt first, and the names of their blocks.

    Tokens are only added at the end. The names depend on the layout: a worker asks for the names of its own layout; a
    gateway may see hosts with several layouts and asks for the names of each.

    Args:
        token_ids: the tokens so far. The list is copied.
        cache_salt, encoding, adapter: the fields of `ContextRoot`.
        media: runs of placeholder tokens, in order and apart from each other.
        shared_tokens: number of tokens at the front whose links do not depend on the salt, a multiple of `BASE_TOKENS`.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        cache_salt: str = "",
        media: Sequence[MediaSpan] = (),
        encoding: bytes = b"",
        shared_tokens: int = 0,
        adapter: bytes = b"",
    ) -> None:
        self.token_ids = list(token_ids)
        self.media = tuple(media)
        self.cache_salt = cache_salt
        self.adapter = adapter
        self._encoding = encoding
        self._shared_links = shared_tokens // BASE_TOKENS
        self._links: dict[str, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self.token_ids)

    def links(self, layout: str) -> Sequence[bytes]:
        """Return the links of the context, one for each full `BASE_TOKENS` tokens.

        Args:
            layout: fingerprint of the KV layout.
        """
        links = self._links.setdefault(layout, [])
        if (len(links) + 1) * BASE_TOKENS <= len(self.token_ids):
            self._grow(layout, links)
        return links

    def name(self, layout: str, length: int) -> bytes:
        """Return the name of the first `length` tokens: a hash of all of them. It is a link if `length` is the end of a
        link.
        """
        count, rest = divmod(length, BASE_TOKENS)
        links = self.links(layout)[:count]
        if not rest:
            return links[-1] if links else self._parent(layout, links)
        parent = self._parent(layout, links)
        if count < self._shared_links:  # only whole links are shared
            parent = self._salted(parent)
        return self._link(parent, length - rest, length)

    def block_name(self, layout: KVLayout, group: int, block: int, length: int) -> bytes:
        """Return the name of a block's content while only the first `length` tokens of the context are computed.

        Args:
            block: index of the block in the sequence. The block may be partly filled.
        """
        end = (block + 1) * layout.groups[group].block_tokens
        return self.name(layout.fingerprint, min(end, length))

    def tails(self, layout: str, lengths: Iterable[int]) -> list[Tail]:
        """Return one tail for each of these lengths, which are numbers of tokens. Lengths beyond the context are left
        out.
        """
        return [Tail(length, self.name(layout, length)) for length in lengths if 0 < length <= len(self.token_ids)]

    def _parent(self, layout: str, links: Sequence[bytes]) -> bytes:
        """Return the beginning of the input to the next hash, given all links of the context before it."""
        if not links:
            salt = "" if self._shared_links else self.cache_salt
            return ContextRoot(layout, salt, self._encoding, self.adapter).digest()
        return self._salted(links[-1]) if len(links) == self._shared_links else links[-1]

    def _salted(self, parent: bytes) -> bytes:
        return _hash(repr((parent, self.cache_salt)).encode())

    def _grow(self, layout: str, links: list[bytes]) -> None:
        begin, end = len(links) * BASE_TOKENS, len(self.token_ids) // BASE_TOKENS * BASE_TOKENS
        ids = self._packed(begin, end)
        for start in range(begin, end, BASE_TOKENS):
            block_ids = ids[_ID_BYTES * (start - begin) : _ID_BYTES * (start - begin + BASE_TOKENS)]
            links.append(_hash(self._parent(layout, links) + block_ids + self._seen(start, start + BASE_TOKENS)))

    def _link(self, parent: bytes, start: int, end: int) -> bytes:
        """Return the hash of tokens [start, end) and everything before them."""
        return _hash(parent + self._packed(start, end) + self._seen(start, end))

    def _packed(self, start: int, end: int) -> bytes:
        return struct.pack(f"<{end - start}I", *self.token_ids[start:end])

    def _seen(self, start: int, end: int) -> bytes:
        """Return the part of the hash input of tokens [start, end) that stands for the media among them."""
        if not self.media:
            return b""
        return b"".join(
            _identity(span, span.start - start) for span in self.media if span.start < end and start < span.end
        )


def _identity(span: MediaSpan, place: int) -> bytes:
    """Return the part of a hash input that stands for one span: everything that the KV of its tokens depends on.

    Args:
        place: the span's start, counted from the first token of the hash. Negative if the span begins before it.
    """
    grid = () if span.grid is None else span.grid
    return span.digest + struct.pack(f"<i{len(grid)}I", place, *grid)


def encoding_context(digest: bytes, length: int, cache_salt: str, layout: KVLayout) -> Context:
    """Return the context of an encoding, rounded up to full blocks. Its last link names the whole encoding.

    Args:
        digest: name of the encoder's input, from `MediaInput.digest`.
        length: rows of the encoding.
        layout: a layout with encodings.
    """
    (group,) = layout.part(encoding=True).groups
    padded = group.blocks_for(length) * group.block_tokens
    return Context([0] * padded, cache_salt, encoding=digest)


def full_block_names(group: KVGroup, links: Sequence[bytes], length: int) -> Sequence[bytes]:
    """Return the names of the group's full blocks within the first `length` tokens of a context.

    Args:
        links: the links of the context.
    """
    stride = group.block_tokens // BASE_TOKENS
    return links[stride - 1 : length // BASE_TOKENS : stride]


def _hash(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]

"""The identity of cached content: a chained hash over everything that the KV of a token depends on."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from paceline.core.kv_layout import BASE_TOKENS

HASH_BYTES = 16


class HashChain:
    """The hashes of one context, grown as its tokens come.

    Link i covers tokens [0, (i + 1) * BASE_TOKENS) by way of its parent. The root holds what all tokens depend on:
    model and cache salt (later: adapter, images).
    """

    def __init__(self, fingerprint: str, cache_salt: str = "") -> None:
        self._root = self._parent = _digest(repr((fingerprint, cache_salt)).encode())
        self.hashes: list[bytes] = []

    def extend(self, token_ids: Sequence[int]) -> None:
        """Adds the links that `token_ids`, the whole context so far, completes."""
        while (len(self.hashes) + 1) * BASE_TOKENS <= len(token_ids):
            start = len(self.hashes) * BASE_TOKENS
            tokens = token_ids[start : start + BASE_TOKENS]
            self._parent = _digest(self._parent + struct.pack(f"<{BASE_TOKENS}I", *tokens))
            self.hashes.append(self._parent)

    def digest(self, token_ids: Sequence[int], length: int) -> bytes:
        """Names the first `length` tokens of `token_ids`, the whole context so far: the link there, if there is one."""
        self.extend(token_ids)
        links, rest = divmod(length, BASE_TOKENS)
        parent = self.hashes[links - 1] if links else self._root
        return _digest(parent + struct.pack(f"<{rest}I", *token_ids[length - rest : length])) if rest else parent


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:HASH_BYTES]

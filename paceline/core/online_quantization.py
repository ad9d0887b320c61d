"""Online quantization: the formats to which a worker rounds the matrices of a model while it loads them."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from paceline.core.errors import ConfigError

OnlineFormat = Literal["fp8", "mxfp8", "mxfp4", "int8", "int4"]
"""A format to which matrices can be rounded."""
ONLINE_FORMATS: tuple[OnlineFormat, ...] = get_args(OnlineFormat)

_MEMORY_BITS: Mapping[OnlineFormat, float] = {"fp8": 8.25, "mxfp8": 8.25, "mxfp4": 4.25, "int8": 8.5, "int4": 4.5}
"""Bits of a weight in memory, with its share of the scales."""
E2M1 = 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0
"""The number that each code of a float of 4 bits stands for."""
_OTHER_NAMES: Mapping[str, OnlineFormat] = {"fp8_per_channel": "fp8", "fp8_per_channel_static": "fp8"}
"""Names that vLLM has for some of the formats."""
_PATTERN = "re:"
"""Prefix that marks an entry of `ignore` as a regular expression."""
_EXPERTS = re.compile(r"(?:.*\.)?(?:experts|block_sparse_moe\.(?:input|output)_linear)(?=\.|$)")
"""The name of a layer's experts, at the beginning of a matrix's name."""
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "word_embeddings", "tok_embeddings")
"""Last parts of the names of embeddings and heads."""
_ROUTERS = re.compile(r"(?:.*\.)?(?:router|gate)(?=\.|$)")
"""The name of a layer's router, at the beginning of a matrix's name."""
_TABLES = ("embed_tokens_per_layer", "position_embeddings", "token_type_embeddings")
"""Last parts of the names of tables that are never rounded: they stay in the checkpoint's file, or are small."""
_PART = re.compile(r"(?:\[\d+\])+$")
_FLAG = "--quantization-config"


def rounded_bytes(weights: int, form: OnlineFormat) -> int:
    """Return the bytes that this many weights take in memory after they were rounded."""
    return int(weights * _MEMORY_BITS[form] / 8)


@dataclass(frozen=True, slots=True)
class OnlineQuantization:
    """The format of each kind of matrix. Matrices of the other kinds, such as routers, are never rounded."""

    linear: OnlineFormat | None
    """Format of linear layers, and of experts that compute all tokens; None leaves them as they are."""
    moe: OnlineFormat | None
    """Format of the experts that a router chooses; None leaves them as they are."""
    embedding: OnlineFormat | None = None
    """Format of the embedding and the head; None leaves them as they are."""
    ignore: tuple[str, ...] = ()
    """Names of layers that stay as they are: whole names, names with wildcards, or regular expressions after "re:"."""

    @classmethod
    def of(cls, name: OnlineFormat) -> OnlineQuantization:
        """Return what `--quantization NAME` means. Only int8 is exact enough for embeddings and heads."""
        return cls(name, name, "int8" if name == "int8" else None)

    def format_of(self, matrix: str) -> OnlineFormat | None:
        """Return the format of a matrix; None if it stays as it is.

        Args:
            matrix: the name of the matrix in the checkpoint, such as "model.layers.0.mlp.up_proj.weight". A number in
                brackets after it means a part of the matrix.
        """
        layer = _PART.sub("", matrix).removesuffix(".weight")
        experts = _EXPERTS.match(layer)
        names = (layer,) if experts is None else (layer, experts.group())
        if any(_matches(entry, name) for entry in self.ignore for name in names):
            return None
        if experts is not None:
            return self.moe
        last = layer.rsplit(".", 1)[-1]
        if last in _TABLES or _ROUTERS.match(layer):
            return None
        return self.embedding if last in _EMBEDDINGS else self.linear

    def __str__(self) -> str:
        """Return a name that differs from those of all other values."""
        if self.linear is not None and self == OnlineQuantization.of(self.linear):
            return self.linear
        kinds = {"linear": self.linear, "moe": self.moe, "embedding": self.embedding}
        parts = [f"{kind}-{found}" for kind, found in kinds.items() if found is not None]
        if self.ignore:
            parts.append(f"ignore-{hashlib.sha256(repr(self.ignore).encode()).hexdigest()[:8]}")
        return "-".join(parts)


def as_online(quantization: object) -> OnlineQuantization | None:
    """Return what a value of --quantization rounds matrices to; None if it rounds none."""
    if isinstance(quantization, OnlineQuantization):
        return quantization
    return OnlineQuantization.of(quantization) if quantization in ONLINE_FORMATS else None


def read_online_quantization(quantization: str, text: str) -> OnlineQuantization | None:
    """Return the formats that --quantization and --quantization-config ask for; None if nothing is rounded.

    Args:
        quantization: the value of --quantization.
        text: the value of --quantization-config: a JSON object, or empty.

    Raises:
        ConfigError: the values are not valid, or contradict each other.
    """
    base = as_online(quantization)
    if not text:
        return base
    if base is None and quantization != "auto":
        raise ConfigError(
            f"{_FLAG} rounds matrices when they are loaded, which --quantization {quantization} excludes; leave out "
            "one of them"
        )
    try:
        given = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{_FLAG} is not valid JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{_FLAG} must be a JSON object, not {given!r:.80}")
    if unknown := sorted(given.keys() - {"linear", "moe", "ignore"}):
        raise ConfigError(f"{_FLAG} has the key {unknown[0]!r:.80}; supported are linear, moe and ignore")
    base = base or OnlineQuantization(None, None)
    linear, moe = (_format(kind, given, getattr(base, kind)) for kind in ("linear", "moe"))
    found = OnlineQuantization(linear, moe, base.embedding, _ignored(given.get("ignore", [])))
    if (found.linear, found.moe, found.embedding) == (None, None, None):
        raise ConfigError(f'{_FLAG} names no format; give one for linear or moe, such as {{"linear": "mxfp8"}}')
    return found


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ConfigError if it has a key twice, because Python would take the last one."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"{_FLAG} has the key {key!r:.80} twice; give it once")
        found[key] = value
    return found


def _format(kind: str, given: Mapping[str, Any], default: OnlineFormat | None) -> OnlineFormat | None:
    """Return the format that the object `given` names for a kind of layers; `default` if it names none."""
    if kind not in given:
        return default
    spec = given[kind]
    spec = {"weight": spec} if isinstance(spec, str) else spec
    if not isinstance(spec, dict) or spec.keys() - {"weight", "activation"}:
        raise ConfigError(
            f"{_FLAG}: {kind} must be a format, or an object with weight, not {spec!r:.80}; "
            '{"weight": null} leaves these layers as they are'
        )
    if spec.get("activation") is not None:
        raise ConfigError(f"{_FLAG}: {kind}.activation must be null, because activations are never quantized")
    if "weight" not in spec:
        return default
    weight = spec["weight"]
    name = _OTHER_NAMES.get(weight, weight) if isinstance(weight, str) else weight
    if name is not None and name not in ONLINE_FORMATS:
        raise ConfigError(
            f"{_FLAG}: the format of {kind} must be {', '.join(ONLINE_FORMATS)} or null, not {weight!r:.80}"
        )
    return cast("OnlineFormat | None", name)


def _ignored(entries: Any) -> tuple[str, ...]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) and entry for entry in entries):
        raise ConfigError(f"{_FLAG}: ignore must be a list of names, not {entries!r:.80}")
    for entry in entries:
        try:
            re.compile(entry.removeprefix(_PATTERN) if entry.startswith(_PATTERN) else "")
        except re.error as error:
            raise ConfigError(f"{_FLAG}: {entry!r:.80} is no regular expression: {error}") from None
    return tuple(entries)


def _matches(entry: str, name: str) -> bool:
    if entry.startswith(_PATTERN):
        return re.match(entry.removeprefix(_PATTERN), name) is not None
    return fnmatch.fnmatchcase(name, entry)

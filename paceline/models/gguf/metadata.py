"""The metadata of a GGUF file, read by key with a type and bounds.

Each error names the key of the wrong value.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gguf import GGUFReader, GGUFValueType, ReaderField

from paceline.core.errors import ModelError
from paceline.models.gguf.reader import DamagedError

# Keys below the architecture's name. A file must have the first ones.
_SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length")
_OPTIONAL_SIZES = (
    "vocab_size",
    "attention.key_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "expert_feed_forward_length",
)

# Lists of a tokenizer, and the one from which each kind of vocabulary knows what to merge first.
_MERGES = "tokenizer.ggml.merges"
_LISTS: Mapping[str, GGUFValueType] = {
    _MERGES: GGUFValueType.STRING,
    "tokenizer.ggml.scores": GGUFValueType.FLOAT32,
    "tokenizer.ggml.token_type": GGUFValueType.INT32,
}
_RANKS: Mapping[str, str] = {"gpt2": _MERGES, "llama": "tokenizer.ggml.scores", "gemma4": _MERGES}
_TOKEN_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "padding"))
_FLAGS = tuple(f"tokenizer.ggml.add_{name}" for name in ("bos_token", "eos_token", "space_prefix"))


class TokenizerList(NamedTuple):
    """A list of a tokenizer without its entries, because there can be a million of them."""

    entries: GGUFValueType
    length: int

    def __repr__(self) -> str:
        return f"a list of {self.length} {self.entries.name} values"


class Metadata(dict[str, Any]):
    """Values by key, with a `TokenizerList` for each list of the tokenizer. Methods raise DamagedError."""

    def __init__(self, reader: GGUFReader, others: Sequence[GGUFReader] = ()) -> None:
        """Read the metadata of a file, or of the first part of one.

        Args:
            others: readers of the other parts, which have further tensors.
        """
        try:
            super().__init__((name, _value(name, field)) for name, field in reader.fields.items())
        except ValueError as error:
            raise DamagedError(f"its metadata have a text that is not UTF-8: {error}") from error
        tensors = (tensor for each in (reader, *others) for tensor in each.tensors)
        self.tensors: dict[str, list[int]] = {tensor.name: tensor.shape.tolist()[::-1] for tensor in tensors}
        """Shapes by the tensors' names in the file, outer dimension first."""

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture"))

    def whole(self, key: str, least: int = 1, most: int | None = None, default: int | None = None) -> int:
        """Return a whole number within these bounds. Without a default, the file must have the key."""
        value = self.get(key, default)
        if isinstance(value, list):
            raise ModelError(f"its {key} differs from layer to layer, which would be lost")
        if type(value) is int and least <= value and (most is None or value <= most):
            return value
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise self._unexpected(key, f"a whole number {bounds}")

    def real(self, key: str, least: float, default: float | None = None) -> float:
        """Return a finite number of at least `least`. Without a default, the file must have the key."""
        value: Any = self.get(key, default)
        if type(value) in (int, float) and math.isfinite(value) and value >= least:
            return float(value)
        raise self._unexpected(key, f"a finite number of at least {least}")

    def length(self, key: str, entries: GGUFValueType, wanted: int | None = None) -> int:
        """Return the length of a list of the tokenizer, which must be `wanted` if this is not None."""
        value = self.get(key)
        if isinstance(value, TokenizerList) and value.entries == entries and wanted in (None, value.length):
            return value.length
        raise self._unexpected(key, f"a list of {'' if wanted is None else f'{wanted} '}{entries.name} values")

    def flag(self, key: str) -> bool:
        """Return a truth value, which the file must have."""
        value = self.get(key)
        if isinstance(value, bool):
            return value
        raise self._unexpected(key, "true or false")

    def _unexpected(self, key: str, wanted: str) -> DamagedError:
        if key not in self:
            return DamagedError(f"it has no {key}, which must be {wanted}")
        # A damaged value can be a text of any length.
        return DamagedError(f"its {key} is {repr(self[key])[:100]}, but must be {wanted}")


def _value(name: str, field: ReaderField) -> Any:
    is_list = field.types[0] == GGUFValueType.ARRAY
    if is_list and name.startswith("tokenizer."):
        entries = field.types[-1]
        is_text = entries == GGUFValueType.STRING
        return TokenizerList(
            entries, len(field.data) if is_text else sum(len(field.parts[part]) for part in field.data)
        )
    return field.contents()


def check_parts(names: Sequence[str], readers: Sequence[GGUFReader]) -> None:
    """Check that files are all parts of one split GGUF file, in their order.

    Raises:
        DamagedError: a part belongs to another file, or has another place.
        ModelError: a single file is one part of several.
    """
    parts = [Metadata(reader) for reader in readers]
    if len(parts) == 1 and "split.count" not in parts[0]:
        return
    for number, (name, part) in enumerate(zip(names, parts)):
        count, own = part.whole("split.count", default=1), part.whole("split.no", least=0, default=0)
        if len(parts) == 1 and count > 1:
            raise ModelError(
                f"it is part {own + 1} of {count}; put all parts beside it, with names that end in "
                f"-00001-of-{count:05}.gguf and so on, and give the first one"
            )
        if (count, own) != (len(parts), number):
            raise DamagedError(f"{name} says that it is part {own + 1} of {count}")
    total = parts[0].whole("split.tensors.count", least=0, default=sum(len(part.tensors) for part in parts))
    found = [name for part in parts for name in part.tensors]
    if twice := sorted(name for name in set(found) if found.count(name) > 1):
        raise DamagedError(f"its tensor {twice[0]} is in two parts")
    if total != len(found):
        raise DamagedError(
            f"its parts have {len(found)} tensors, but {names[0]} says {total}, so one is of another file"
        )


def check_sizes(metadata: Metadata) -> None:
    """Check that the sizes of a model that `convert_dense` converts are possible and fit together.

    Raises:
        DamagedError: a size is missing, of the wrong type or out of bounds.
        ModelError: the file has tensors of more or fewer layers than its metadata say.
    """
    place = metadata.architecture
    for name in (*_SIZES, *(name for name in _OPTIONAL_SIZES if f"{place}.{name}" in metadata)):
        metadata.whole(f"{place}.{name}")
    metadata.real(f"{place}.attention.layer_norm_rms_epsilon", 0)
    # A Llama whose config.json had no base has none in its file either.
    metadata.real(f"{place}.rope.freq_base", 1, default=10_000.0 if place == "llama" else None)
    if f"{place}.expert_used_count" in metadata:
        metadata.whole(f"{place}.expert_used_count", most=metadata.whole(f"{place}.expert_count"))
    heads = metadata.whole(f"{place}.attention.head_count")
    kv_heads = metadata.whole(f"{place}.attention.head_count_kv", most=heads)
    if heads % kv_heads:
        raise DamagedError(f"its {place}.attention.head_count {heads} is not a multiple of head_count_kv {kv_heads}")
    hidden = metadata.whole(f"{place}.embedding_length")
    if f"{place}.attention.key_length" not in metadata and hidden % heads:
        raise DamagedError(f"its {place}.embedding_length {hidden} is not a multiple of attention.head_count {heads}")
    layers = {int(name.split(".")[1]) for name in metadata.tensors if re.match(r"blk\.\d+\.", name)}
    count = metadata.whole(f"{place}.block_count")
    if layers and max(layers) + 1 != count:
        raise ModelError(f"it has tensors of {max(layers) + 1} layers, but its metadata say {count}")


def check_tokenizer(metadata: Metadata) -> None:
    """Check that the tokenizer is complete, and of a kind that is converted.

    Raises:
        DamagedError: a list is missing or too short, or a token id has no token.
        ModelError: this kind of tokenizer is not converted.
    """
    kind = str(metadata.get("tokenizer.ggml.model"))
    if kind not in _RANKS:
        raise ModelError(f"its tokenizer.ggml.model is {kind!r:.100}, and only {', '.join(_RANKS)} are converted")
    count = metadata.length("tokenizer.ggml.tokens", GGUFValueType.STRING)
    for key in {_RANKS[kind], *(key for key in _LISTS if key in metadata)}:
        metadata.length(key, _LISTS[key], None if key == _MERGES else count)
    for key in _TOKEN_IDS:
        if key in metadata:
            metadata.whole(key, least=0, most=count - 1)
    for key in _FLAGS:
        if key in metadata:
            metadata.flag(key)
    rows = metadata.tensors.get("token_embd.weight", [count])[0]
    if count > rows:
        raise DamagedError(f"its tokenizer has {count} tokens, but its token_embd.weight only {rows} rows")

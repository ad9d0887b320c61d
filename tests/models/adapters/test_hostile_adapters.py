"""Hostile adapters are refused with a sentence, in bounded time, or loaded as they are written."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.adapters import AdapterFiles, read_adapter_files
from paceline.core.errors import ModelError
from paceline.models.adapters.loading import AdapterRules, LoadedAdapter, load_adapter
from paceline.models.adapters.peft_config import read_peft_config
from tests.fuzz.adapters import Damage, check, layers
from tests.models.adapters.test_adapter_loading import BASE, CONFIG, Q0, SIZE, load, tensors


def test_any_damage_is_refused_or_harmless() -> None:
    damage = Damage(1)
    torch.manual_seed(1)
    outcomes = Counter(check(damage.files()) for _ in range(400))
    assert min(outcomes["loaded"], outcomes["refused"]) > 20


def header(**entry: object) -> bytes:
    text = json.dumps({Q0: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0], **entry}}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(16)


HEADERS = [
    header(shape=[0, 10**30]),
    header(shape=[1] * 5000, data_offsets=[0, 4]),
    header(shape=[-1, -4], data_offsets=[0, 16]),
    header(shape=[4], data_offsets=[8, 24]),
    header(shape=[4], data_offsets=[16, 0]),
    header(shape="4"),
    header(dtype=["F32"]),
    b"\xff" * 7 + b"\x7f",
    struct.pack("<Q", 4) + b"null",
    struct.pack("<Q", 9) + b'{"x": []}',
    struct.pack("<Q", 2) + b"[]",
    b"",
    struct.pack("<Q", 20000) + b"[" * 20000,
]


@pytest.mark.parametrize("content", HEADERS, ids=range(len(HEADERS)))
def test_hostile_headers_are_refused(content: bytes) -> None:
    files = AdapterFiles(json.dumps(CONFIG).encode(), bytearray(content))
    with pytest.raises(ModelError, match="safetensors"):
        load_adapter(files, layers(), torch.float32, AdapterRules(), BASE)


def file_of(entries: list[tuple[str, object]], data: bytes, text: str = "") -> bytes:
    """Return a safetensors file with these entries in its header, which may be there twice."""
    header = "{" + ", ".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in entries) + "}" + text
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


def entries_of(own: dict[str, Tensor]) -> tuple[list[tuple[str, Any]], bytes]:
    found: list[tuple[str, Any]] = []
    data = b""
    for key, tensor in own.items():
        content = tensor.numpy().tobytes()
        entry = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(content)]}
        found.append((key, entry))
        data += content
    return found, data


def load_file(content: bytes, config: dict[str, Any] = CONFIG) -> LoadedAdapter:
    files = AdapterFiles(json.dumps(config).encode(), bytearray(content))
    return load_adapter(files, layers(), torch.float32, AdapterRules(), BASE)


def test_tensors_at_odd_places_are_read() -> None:
    entries, data = entries_of(tensors())
    plain = file_of(entries, data)
    part = load_file(file_of(entries, data, " " * (1 - len(plain) % 2 + 2 * (len(plain) % 2)))).parts[0]
    assert part is not None
    assert torch.equal(part.down, tensors()[Q0])


def test_each_byte_belongs_to_one_tensor() -> None:
    entries, data = entries_of(tensors())
    load_file(file_of(entries, data))
    (key, first), *others = entries
    second = entries[1][1]
    moved = {**first, "data_offsets": [second["data_offsets"][0], second["data_offsets"][0] + 64]}
    for name, content in {
        "is there twice": file_of([*entries, entries[0]], data),
        "overlaps": file_of([(key, moved), *others], data),
        "bytes before it belong to none": file_of(others, data),
        "more or fewer bytes": file_of(entries, data + bytes(4)),
        "is no name": file_of([*entries, ("\ud800", second)], data),
        "no shape": file_of([*entries, ("x", {**second, "shape": [10**30]})], data),
    }.items():
        with pytest.raises(ModelError, match=name) as caught:
            load_file(content)
        str(caught.value).encode()


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "an expression that never ends": ({"target_modules": "(a+)+(b|" + "x" * 5000 + ")"}, "target_modules"),
    "an expression of any length": ({"target_modules": "a" * 5000}, "characters"),
    "a list of layers by expression": ({"layers_to_transform": 1, "layers_pattern": "(a+)+"}, "layers_pattern"),
    "a number of lists": ({"layers_pattern": 5}, "layers_pattern"),
    "numbers as names": ({"target_modules": [1]}, "target_modules"),
    "an object as names": ({"exclude_modules": {"q_proj": 1}}, "exclude_modules"),
    "layers by words": ({"layers_to_transform": ["1"]}, "layers_to_transform"),
    "a flag of words": ({"use_rslora": "yes"}, "use_rslora"),
    "a huge scale": ({"lora_alpha": -1e300}, "lora_alpha"),
    "a huge rank": ({"r": 10**30}, "r must be"),
    "ranks in a list": ({"rank_pattern": [1]}, "rank_pattern"),
    "too many ranks": ({"rank_pattern": {f"x{index}": 1 for index in range(5000)}}, "rank_pattern"),
    "deep values": ({"new_idea": [[[[1]]]]}, "new_idea"),
    "a name that cannot be shown": ({"\ud800": 1}, "not supported"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_settings_of_a_wrong_form_are_refused(name: str) -> None:
    changed, named = CONFIGS[name]
    entries, data = entries_of(tensors())
    with pytest.raises(ModelError) as caught:
        load_file(file_of(entries, data), {**CONFIG, **changed})
    assert named in str(caught.value)
    assert len(str(caught.value).encode()) < 500


@pytest.mark.parametrize(
    "content", [b'{"r": 1, "r": 2}', b"[" * 100_000, b"\xff\xfe{\0}\0", b"[]", b'{"r": ' + b"9" * 9999]
)
def test_settings_that_are_no_object_are_refused(content: bytes) -> None:
    with pytest.raises(ModelError, match="adapter_config") as caught:
        read_peft_config(content)
    assert len(str(caught.value)) < 500


def test_numbers_that_are_too_large_for_their_type_are_refused(tmp_path: Path) -> None:
    own = {**tensors(), Q0: torch.full((2, SIZE), 3.4e38)}
    assert load(tmp_path, own=own).parts[0] is not None
    with pytest.raises(ModelError, match="--lora-dtype"):
        load_adapter(read_adapter_files(tmp_path), layers(), torch.bfloat16, AdapterRules(), BASE)


def test_a_path_that_cannot_be_one_is_refused() -> None:
    with pytest.raises(ModelError, match="is no path"):
        read_adapter_files(Path("/x\0y"))

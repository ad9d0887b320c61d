"""How vectors are written: as numbers, base64 and bytes."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
import torch

from paceline.services.gateway.api.pooling import encoding
from paceline.services.gateway.api.pooling.encoding import (
    EncodingFields,
    base64_json,
    numbers_json,
    to_bytes,
    value_json,
)
from paceline.services.gateway.http.errors import ApiError

NUMBERS = np.array([0.0, -0.0, 1.0, -1.5, 3.14159, 1e-5, -448.0, 1e9, 0.1, 2.0**-9, 1.0625], np.float32)


def test_numbers_come_back_exactly() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    told = np.array(json.loads(value_json(values, EncodingFields())), np.float32)
    assert told.tobytes() == values.tobytes()
    text = json.loads(value_json(values, EncodingFields(encoding_format="base64")))
    assert base64.b64decode(text) == values.tobytes()


def test_large_results_are_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = np.random.default_rng(0).standard_normal(50_000).astype(np.float32)
    written: list[int] = []
    to_json = encoding.to_json

    def counted(value: Any) -> bytes:
        written.append(len(value))
        return to_json(value)

    monkeypatch.setattr(encoding, "to_json", counted)
    for shaped in (values, values[:0], values.reshape(2, -1), values.reshape(-1, 10)):
        assert np.array_equal(np.array(json.loads(numbers_json(shaped)), np.float32).reshape(shaped.shape), shaped)
    assert max(written) < 10_000
    assert base64.b64decode(json.loads(base64_json(values.tobytes()))) == values.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_numbers_are_rounded_to_the_nearest_of_a_type(dtype: Any) -> None:
    values = np.concatenate([NUMBERS, np.random.default_rng(0).standard_normal(5000).astype(np.float32) * 3])
    kind = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}.get(dtype) or getattr(torch, dtype)
    most = torch.finfo(kind).max
    expected = torch.from_numpy(values).clamp(-most, most).to(kind).view(torch.uint8)
    assert to_bytes(values, dtype) == bytes(expected.tolist())
    swapped = np.frombuffer(to_bytes(values, dtype, "big"), f">u{kind.itemsize}")
    assert swapped.tolist() == np.frombuffer(to_bytes(values, dtype), f"<u{kind.itemsize}").tolist()


def test_ties_go_to_even() -> None:
    # 1.0625 is between 1 and 1.125, whose last bits are even and odd.
    assert to_bytes(np.array([1.0625], np.float32), "fp8_e4m3") == to_bytes(np.array([1.0], np.float32), "fp8_e4m3")
    assert to_bytes(np.array([1.1875], np.float32), "fp8_e4m3") == to_bytes(np.array([1.25], np.float32), "fp8_e4m3")


def test_a_header_has_room_for_a_number_of_shapes() -> None:
    EncodingFields(encoding_format="bytes").check_count(encoding.MOST_DESCRIBED)
    EncodingFields(encoding_format="bytes_only").check_count(2048)
    with pytest.raises(ApiError, match="bytes_only"):
        EncodingFields(encoding_format="bytes").check_count(encoding.MOST_DESCRIBED + 1)
    rows = [np.ones((8192, 1024), np.float32)[:1] for _ in range(encoding.MOST_DESCRIBED)]
    head = {"id": "x" * 64, "model": "é" * 100}
    answer = encoding._bytes_response(head, rows, EncodingFields(encoding_format="bytes"))
    assert len(answer.headers["metadata"]) < 60_000
    places = json.loads(answer.headers["metadata"])["data"]
    assert (places[1]["start"], places[1]["end"], places[1]["shape"]) == (4096, 8192, [1, 1024])

from __future__ import annotations

import numpy as np
import pytest

from paceline.services.gateway.api.pooling import similarity
from paceline.services.gateway.api.pooling.similarity import cosine, max_sim

RANDOM = np.random.default_rng(0)


def vectors(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def test_cosine() -> None:
    one, other = vectors(384), vectors(384)
    exact = np.dot(one.astype(float), other) / np.linalg.norm(one.astype(float)) / np.linalg.norm(other.astype(float))
    assert cosine(one, other) == pytest.approx(exact, abs=1e-7)
    assert cosine(one, 5 * one) == pytest.approx(1.0)
    assert cosine(one, -one) >= -1.0
    assert cosine(one, 0 * one) == 0.0


def test_max_sim_sums_the_best_product_of_each_vector_of_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    query, document = vectors(7, 16), vectors(100, 16)
    expected = sum(max(float(q @ d) for d in document) for q in query)
    assert max_sim(query, document) == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(similarity, "MOST_PRODUCTS", 70)  # ten vectors of the document at a time
    assert max_sim(query, document) == pytest.approx(expected, rel=1e-5)
    assert max_sim(query, document[:0]) == 0.0

from __future__ import annotations

import pytest

from paceline.services.gateway.routing import prefix_index
from paceline.services.gateway.routing.prefix_index import Homes


def test_each_client_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MOST_KEYS", 2)
    found = Homes()
    found.put("me", "k", "h1")
    found.put("me", "", "h1")
    assert (found.get("me", "k"), found.get("you", "k"), found.get("me", "")) == ("h1", "", "")
    found.put("you", "k", "h2")
    found.put("me", "k", "h3")
    found.put("you", "other", "h4")
    assert [found.get(*key) for key in (("me", "k"), ("you", "k"), ("you", "other"))] == ["h3", "", "h4"]

from __future__ import annotations

from paceline.services.common.redis_url import without_password


def test_a_password_is_not_shown() -> None:
    url = "rediss://me:pass@host:6380/0?password=word&ssl_password=key&db=1"
    assert without_password(url) == "rediss://…@host:6380/0?password=…&ssl_password=…&db=1"

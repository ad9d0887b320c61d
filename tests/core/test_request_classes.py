from __future__ import annotations

from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.request_classes import NO_CLASSES, RequestClass, read_classes


def test_a_file_names_classes_and_two_exist_without_one(tmp_path: Path) -> None:
    file = tmp_path / "classes.toml"
    file.write_text("[chat]\nttft-seconds = 1\nitl_seconds = 0.1\nweight = 4\n[agents]\n")
    assert read_classes(str(file)) == {
        **NO_CLASSES,
        "chat": RequestClass(1.0, 0.1, weight=4.0),
        "agents": RequestClass(),
    }
    assert read_classes("") == NO_CLASSES


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[chat", "is not valid TOML"),
        ("chat = 1", r"chat must be the heading of a class, \[chat\]"),
        ("[chat]\nttft = 1", r"\[chat\] ttft: Extra inputs"),
        ("[chat]\nweight = 0", r"\[chat\] weight: Input should be greater"),
        ("[chat]\nitl_seconds = nan", r"\[chat\] itl_seconds: Input should be a finite number"),
        ("[background]\nweight = 2", "the class of batches"),
        ('["a b"]\nweight = 2', "1 to 64 letters"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "classes.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_classes(str(file))


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--classes-file nowhere\.toml cannot be read"):
        read_classes("nowhere.toml")

"""The request that `paceline serve` prints for the user to paste."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from paceline.core.config import ServeConfig
from paceline.services.serve.welcome import first_request


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_API_KEY", raising=False)


def curl_of(config: ServeConfig, model: Path) -> list[str]:
    text = first_request(config, model, "127.0.0.1:1234")
    return shlex.split(text[text.index("curl") : text.index("Ctrl-C")])


def test_a_base_model_completes(model_folder: Path) -> None:
    command = curl_of(ServeConfig(model="tiny"), model_folder)
    assert command[1] == "http://127.0.0.1:1234/v1/completions"
    body = json.loads(command[command.index("-d") + 1])
    assert body["model"] == "tiny"
    assert isinstance(body["prompt"], str)
    assert not any("Authorization" in word for word in command)


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "--chat-template"])
def test_a_model_with_a_chat_template_chats(model_folder: Path, place: str) -> None:
    if place == "--chat-template":
        config = ServeConfig(chat_template="own.jinja")
    else:
        config = ServeConfig()
        (model_folder / place).write_text('{"chat_template": "{{ messages }}"}')
    command = curl_of(config, model_folder)
    assert command[1] == "http://127.0.0.1:1234/v1/chat/completions"
    assert json.loads(command[-1])["messages"][0]["role"] == "user"


def test_a_key_that_was_given_is_not_printed(model_folder: Path) -> None:
    command = curl_of(ServeConfig(api_key="secret, two"), model_folder)
    assert "Authorization: Bearer YOUR_KEY" in command
    assert not [part for part in command if "secret" in part]


def test_keys_of_a_file_are_not_printed(model_folder: Path) -> None:
    assert "Authorization: Bearer YOUR_KEY" in curl_of(ServeConfig(api_keys_file="keys.toml"), model_folder)


def test_a_key_of_the_environment_is_not_printed(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    text = first_request(ServeConfig(), model_folder, "127.0.0.1:1")
    assert "secret" not in text
    assert "Authorization: Bearer ${PACELINE_API_KEY%%,*}" in text


def test_the_numerics_of_the_workers_are_named(model_folder: Path) -> None:
    assert "\nReady. Try it:\n" in first_request(ServeConfig(), model_folder, "127.0.0.1:1")
    text = first_request(ServeConfig(), model_folder, "127.0.0.1:1", ["avx2 bfloat16", "portable bfloat16"])
    assert "\nReady. Workers compute with avx2 bfloat16 and portable bfloat16. Try it:\n" in text


@pytest.mark.parametrize(("host", "url"), [("0.0.0.0", "http://127.0.0.1:1234/"), ("::", "http://[::1]:1234/")])
def test_an_address_for_all_interfaces_is_reached_locally(model_folder: Path, host: str, url: str) -> None:
    assert curl_of(ServeConfig(host=host), model_folder)[1].startswith(url)


def test_https_is_asked_for_with_the_certificate(model_folder: Path) -> None:
    config = ServeConfig(ssl_certfile="c.pem", ssl_keyfile="k.pem")
    command = curl_of(config, model_folder)
    assert command[1] == "https://127.0.0.1:1234/v1/completions"
    assert command[command.index("--cacert") + 1] == "c.pem"
    assert "--cert" not in command
    config = config.model_copy(update={"ssl_ca_certs": "ca.pem", "ssl_cert_reqs": 2})
    assert "--cert" in curl_of(config, model_folder)


def test_a_unix_socket_is_named(model_folder: Path) -> None:
    text = first_request(ServeConfig(uds="a b"), model_folder, "unix:/run/a b")
    assert shlex.split(text[text.index("curl") :])[:4] == [
        "curl",
        "--unix-socket",
        "/run/a b",
        "http://localhost/v1/completions",
    ]

"""Options of the HTTP server: where it listens, HTTPS, and who may call it."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from paceline.core.config.service import check_http
from paceline.core.options import Options, Size, option


class HttpOptions(Options):
    """Options of the HTTP server."""

    uds: str = option(
        "",
        "path of a Unix socket to listen on, instead of --host and --port; only this user may connect to it",
        "network",
    )
    root_path: str = option(
        "",
        "path below which a proxy offers this API, such as /llm; the proxy may leave it in the paths of requests or "
        "take it off",
        "network",
    )
    ssl_certfile: str = option(
        "",
        "PEM file with the certificate for HTTPS, and any intermediate ones below it; it is read again when it "
        "changes. Default: HTTP in the clear",
        "network",
    )
    ssl_keyfile: str = option("", "PEM file with the private key of --ssl-certfile", "network")
    ssl_ca_certs: str = option(
        "", "PEM file with the certificates of the authorities that sign clients' certificates", "network"
    )
    ssl_cert_reqs: int = option(
        0,
        "whether HTTPS clients show a certificate: 0 none, 1 a client may show one, 2 each client must; one that is "
        "shown must be signed by an authority in --ssl-ca-certs",
        "network",
        at_least=0,
        at_most=2,
    )
    api_key: str = option(
        "",
        "API keys of clients, separated by commas; default: $PACELINE_API_KEY. Other users of the machine see a "
        "command line, but neither the environment nor --api-keys-file. Without any key of a client, clients need none",
        "network",
        is_secret=True,
    )
    admin_key: str = option(
        "",
        "keys of admins, separated by commas; default: $PACELINE_ADMIN_KEY. Without any key of an admin, the fleet, "
        "scaling and requests of others are for processes of this machine only, and for nobody if clients need keys "
        "and --host is no loopback address",
        "network",
        is_secret=True,
    )
    api_keys_file: str = option(
        "",
        "TOML file with a table for each key: its sha256 (paceline key makes both), role, priority and limits. Only "
        "its owner may be able to read it. It is read again when it changes",
        "network",
    )
    share_cache: bool = option(
        False,
        "all keys share cached prompts and media, so that a client can find out by cached_tokens and by times what "
        "others have sent. Default: each key has a cache of its own, which it shares with the keys of --api-keys-file "
        "that have the same share_cache",
        "network",
    )
    allowed_origins: str = option(
        "",
        "origins whose web pages may call the API from a browser (CORS), separated by commas, such as "
        "https://chat.example.com; * allows all. Default: none but the gateway's own",
        "network",
    )
    allowed_methods: str = option("*", "methods that these pages may use, separated by commas", "network")
    allowed_headers: str = option("*", "headers that these pages may send, separated by commas", "network")
    allow_credentials: bool = option(
        False, "these pages may use a key that the browser itself keeps; needs named origins", "network"
    )
    max_body_bytes: int = option(32 << 20, "largest request body in bytes; larger ones get 413", "limits", at_least=1)
    max_body_values: int = option(
        500_000,
        "most values in the JSON of a body, such as token ids; more get 413. Each member of a list counts as one, and "
        "each member of an object as five, and each number with a fraction or an exponent as about nine. A batch of "
        "messages may have five times as many",
        "limits",
        at_least=1,
    )
    max_body_objects: int = option(
        50_000,
        "most lists and objects in the JSON of a body; more get 413. A batch of messages may have five times as many",
        "limits",
        at_least=1,
    )
    max_messages: int = option(
        10_000, "most messages of a conversation, or items in the input of a response", "limits", at_least=1
    )
    max_content_parts: int = option(
        10_000, "most parts in the contents of all messages of a request", "limits", at_least=1
    )
    max_tools: int = option(1000, "most tools of a request", "limits", at_least=1)
    body_memory: Size = option(
        "1GiB",
        "memory for the bodies of all requests that run: four times their bytes, 1 KiB for each list and object, and "
        "64 bytes for each value. The requests of one key may use half of it. A request that finds it full gets 429",
        "limits",
    )

    @model_validator(mode="after")
    def _check_http(self) -> Self:
        check_http(self)
        return self

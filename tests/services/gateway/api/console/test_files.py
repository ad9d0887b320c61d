"""The console's files as browsers get them."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from paceline.services.gateway.api.console import files
from tests.services.gateway.conftest import Stack

STATIC = Path(files.__file__).parent / "static"


async def test_the_page_and_all_its_files_are_served(stack: Stack) -> None:
    page = await stack.http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="(console/[^"]+)"', page.text))
    modules = {
        f"console/{name}" for path in STATIC.glob("*.js") for name in re.findall(r'from "\./(.+)"', path.read_text())
    }
    assert {"console/app.js", "console/uplot.iife.min.js", "console/uplot.min.css"} <= named | modules
    for name in named | modules:
        answer = await stack.http.get(f"/{name}")
        assert answer.status_code == 200, name
        assert answer.content, name


async def test_nothing_but_the_server_s_own_scripts_and_styles_is_allowed(stack: Stack) -> None:
    policy = (await stack.http.get("/")).headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


async def test_a_file_that_the_browser_has_is_not_sent_again(stack: Stack) -> None:
    first = await stack.http.get("/console/app.js")
    again = await stack.http.get("/console/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == first.headers["etag"]
    other = await stack.http.get("/console/app.js", headers={"If-None-Match": '"older"'})
    assert other.content == first.content


async def test_files_are_compressed_for_clients_that_accept_it(stack: Stack) -> None:
    async with stack.http.stream("GET", "/console/uplot.iife.min.js", headers={"Accept-Encoding": "gzip"}) as answer:
        packed = b"".join([part async for part in answer.aiter_raw()])
    plain = await stack.http.get("/console/uplot.iife.min.js", headers={"Accept-Encoding": "identity"})
    assert gzip.decompress(packed) == plain.content
    assert len(packed) < len(plain.content) / 2


async def test_other_names_are_unknown(stack: Stack) -> None:
    for name in ("nothing.js", "..%2Ffiles.py", "__init__.py", "%2Fetc%2Fpasswd"):
        answer = await stack.http.get(f"/console/{name}")
        assert (answer.status_code, "error" in answer.json()) == (404, True), name


def test_a_chart_library_that_is_not_uplot_s_own_is_not_served(tmp_path: Path, monkeypatch: object) -> None:
    package = tmp_path / "youplot_forged"
    (package / "vendor").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package must not be imported')")
    (package / "vendor" / "uplot.iife.min.js").write_text("alert(1)")
    monkeypatch.syspath_prepend(tmp_path)  # type: ignore[attr-defined]
    monkeypatch.setattr(files, "_CHART_PACKAGE", "youplot_forged")  # type: ignore[attr-defined]
    known = files.read_files()
    assert "uplot.iife.min.js" not in known
    assert "app.js" in known


def test_all_addresses_in_the_page_are_relative() -> None:
    """Behind a proxy the page has a path of its own, and it may ask nobody but its gateway."""
    for path in STATIC.iterdir():
        text = path.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        if path.suffix in (".js", ".html", ".css", ".svg"):
            assert not re.search(r"""https?://|["'(`]/(?!/|\^)\w""", text), path.name

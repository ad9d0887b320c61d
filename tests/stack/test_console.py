"""The console in a real browser, on real stacks."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.services.gateway.planning.media.samples import image_file
from tests.services.gateway.planning.media.samples import picture as drawing
from tests.services.gateway.toy_model import write_toy_media_model
from tests.services.pool.tiny_bert import WORDS
from tests.stack.browser import Browser, browser, is_installed
from tests.stack.page_checks import CONTRASTS, UNNAMED
from tests.stack.processes import Stack, serve
from tests.stack.stacks import on
from tests.tiny_checkpoints import write_gemma4_with_media

pytestmark = [
    pytest.mark.stack,
    pytest.mark.skipif(
        not is_installed(), reason="THE CONSOLE IS NOT TESTED IN A BROWSER: apt-get install chromium chromium-driver"
    ),
]

SCREENS = os.environ.get("CONSOLE_SCREENS", "")
"""Folder for pictures of the views, for docs/console.md; empty writes none."""

SMALL = ('--mm-processor-kwargs={"max_soft_tokens": 70}', "--tool-call-parser=hermes")
VIEWS = ("fleet", "requests", "chat", "batches", "about")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 9}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        opened.resize(1280)
        yield opened


@pytest.fixture(autouse=True)
def nothing_is_wrong(window: Browser) -> Iterator[None]:
    """After each test, check that the browser has shown no error and asked no other server."""
    window.resize(1280)
    yield
    assert window.errors() == []
    assert {url.split("/")[2] for url in window.requested() if url.startswith("http")} <= {_host(window)}


def _host(window: Browser) -> str:
    return str(window.run("return location.host"))


def show(window: Browser, stack: Stack, view: str = "fleet") -> None:
    """Load the page anew and show a view."""
    window.open("about:blank")
    window.open(f"{stack.url}/#/{view}")
    window.wait("document.getElementById('link')?.dataset.state === 'live'")


def picture(window: Browser, name: str) -> None:
    if SCREENS:
        window.screenshot(Path(SCREENS) / f"{name}.png")


def complete(stack: Stack, words: str, name: str = "") -> None:
    body = {"prompt": words, "max_tokens": 24, "stream": False}
    headers = {"X-Request-Id": name} if name else {}
    httpx.post(f"{stack.url}/v1/completions", json=body, headers=headers, timeout=120).raise_for_status()


@pytest.mark.model
@on("two workers")
def test_the_fleet_lives(window: Browser, stack: Stack) -> None:
    requests = 70 if SCREENS else 6
    complete(stack, "Once upon a time")
    with ThreadPoolExecutor(4) as pool:
        asked = [
            pool.submit(complete, stack, f"Chapter {number % 9}: " + "once upon a time " * 9)
            for number in range(requests)
        ]
        for each in asked[: requests // 2]:
            each.result()
        show(window, stack)
        for role in ("prefill", "decode"):
            window.wait(f"document.querySelectorAll('.role.{role} [data-state=ready]').length === 2")
        window.wait("document.querySelectorAll('.plot canvas').length === 6")
        window.wait("/ms|s/.test(document.querySelector('.figures').innerText)")
        window.wait("document.querySelector('.role.decode').innerText.includes('tok/s')")
        picture(window, "fleet")
        for each in asked:
            each.result()
    shown = window.text("main")
    for words in ("Time to first token", "Prompt tokens cached", "Drafts accepted", "cached, evictable", "free"):
        assert words in shown
    assert "p50" in window.run("return document.querySelector('.plot').getAttribute('aria-label')")


@pytest.mark.model
@on("two workers")
def test_blocks_are_shown_with_their_owners(window: Browser, stack: Stack) -> None:
    show(window, stack)
    # The request runs until the page has shown its blocks.
    body = {"prompt": "Count: 1, 2, 3,", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=body, timeout=300) as answer:
        assert answer.status_code == 200
        window.wait("document.querySelector('.host table')?.innerText.includes('decode-')")
    window.wait("!document.querySelector('.host table')")


@pytest.mark.model
@on("two workers")
def test_the_keyboard_alone_reaches_the_chat_and_its_timeline(window: Browser, stack: Stack) -> None:
    show(window, stack)

    def tab_to(name: str) -> None:
        for _ in range(40):
            window.press("Tab")
            if name in window.focused():
                return
        raise AssertionError(f"Tab does not reach {name!r}")

    tab_to("Skip to the content")
    window.press("Enter")
    assert window.run("return document.activeElement.id") == "main"
    window.open("about:blank")
    window.open(f"{stack.url}/")
    tab_to("Chat")
    window.press("Enter")
    window.wait("document.querySelector('.say textarea')")
    tab_to("Your message")
    window.run("document.querySelector('[name=max_tokens]').value = 48")
    window.press("Why is the sky blue by day and red at dusk? " * 8, "Enter")  # long enough for a prefill worker
    window.wait("document.querySelector('.turn.model[aria-busy] .words:not(:empty)')")  # it streams
    window.wait("document.querySelector('.turn.model .facts-line a')")
    facts = window.text(".facts-line")
    for words in ("first token", "tok/s", "generated", "prefill", "decode"):
        assert words in facts
    picture(window, "chat")
    tab_to("timeline")
    window.press("Enter")
    window.wait("document.querySelector('table.timeline')")
    phases = [line for line in window.text("table.timeline").splitlines() if line]
    for name in ("Queue", "Placement", "Prefill", "Handoff", "Decode"):
        assert any(line.startswith(name) for line in phases), phases
    picture(window, "timeline")
    window.click("a[href='#/chat']")
    window.wait("document.querySelectorAll('.turn').length === 2")  # the conversation is still there


@pytest.mark.model
@on("two workers")
def test_requests_are_listed_and_lead_to_their_timelines(window: Browser, stack: Stack) -> None:
    complete(stack, "Once", name="asked-by-the-test")
    show(window, stack, "requests")
    window.wait("document.querySelector('.requests tbody')?.innerText.includes('asked-by-the-test')")
    window.run("[...document.querySelectorAll('.requests a')].find((a) => a.innerText === 'asked-by-the-test').click()")
    window.wait("document.querySelector('table.timeline') && document.title.startsWith('Request')")
    assert "finished" in window.text(".facts")
    show(window, stack, "requests/no-such-request")
    window.wait("document.querySelector('.life .error')")
    assert "does not know the request" in window.text(".life")
    assert len(window.errors()) == 1  # the browser's own line about status 404


@pytest.mark.model
@on("two workers")
def test_adapters_are_shown_if_there_are_any(window: Browser, stack: Stack) -> None:
    show(window, stack)
    window.wait("document.querySelector('.role.decode')")
    assert "Adapters" not in window.text("main")
    shown = window.run(
        "const adapter = { name: 'sql', digest: 'abc', running: 3, waiting: 1, workers: ['decode-0', 'prefill-1'] };"
        "return import('./console/adapters.js').then(({ adapterSection }) => {"
        "  const view = adapterSection(); document.querySelector('main').append(view.element); view.show([adapter]);"
        "  return view.element.innerText; });"
    )
    assert [line.split() for line in shown.splitlines() if line][-1] == ["sql", "3", "1", "decode-0,", "prefill-1"]
    assert window.run(UNNAMED) == []


@pytest.mark.model
@on("two workers")
def test_reasoning_is_folded(window: Browser, stack: Stack) -> None:
    show(window, stack, "chat")
    shown = window.run(
        "return Promise.all([import('./console/answer.js'), import('./console/answer_stream.js')]).then(([a, b]) => {"
        "  const answer = { ...b.newAnswer(), reasoning: 'Because of it.', content: 'So.' };"
        "  const view = a.answerView(answer, () => {}); "
        "  document.querySelector('.talk').append(view.element); view.update();"
        "  return new Promise((done) => setTimeout(() => done(view.element.innerText), 200)); });"
    )
    assert "So." in shown
    assert "Because of it." not in shown
    window.click(".reasoning summary")
    assert "Because of it." in window.text(".turn.model")


@pytest.mark.model
@on("two workers")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_readable_named_and_fits_a_phone(window: Browser, stack: Stack, scheme: str) -> None:
    window.prefer(scheme)
    show(window, stack)
    for view in VIEWS:
        window.run("location.hash = arguments[0]", f"#/{view}")
        window.wait("document.querySelector('nav [aria-current]').hash === arguments[0]", f"#/{view}")
        window.wait("!document.querySelector('main').innerText.includes('Loading')")
        if view == "fleet":
            window.wait("document.querySelector('.legend')")
        assert window.run(CONTRASTS) == [], view
        assert window.run(UNNAMED) == [], view
        assert window.run("return document.querySelectorAll('h1').length") == 1
        for width in (320, 1280):
            window.resize(width)
            assert window.run("return document.documentElement.scrollWidth") <= width, view
    window.resize(320)
    window.run("location.hash = '#/fleet'")
    window.wait("document.querySelector('.legend') && document.querySelector('.plot canvas')")
    if scheme == "dark":
        picture(window, "phone")
        window.resize(1280)
        picture(window, "fleet-dark")


@pytest.mark.model
@on("two workers")
def test_the_theme_can_be_chosen_and_is_kept(window: Browser, stack: Stack) -> None:
    window.prefer("dark")
    show(window, stack)
    background = "getComputedStyle(document.documentElement).backgroundColor"
    dark = window.run(f"return {background}")
    window.click("#theme")
    light = window.run(f"return {background}")
    assert dark != light
    show(window, stack)
    assert window.run(f"return {background}") == light
    window.run("localStorage.clear()")
    window.prefer("light")


def test_texts_are_compared_and_ranked(window: Browser, encoder_stack: Stack) -> None:
    show(window, encoder_stack)
    window.wait("!document.querySelector('nav a[href=\"#/embed\"]').hidden")
    window.click("nav a[href='#/embed']")
    window.wait("document.getElementById('texts')")
    window.run(
        "document.getElementById('texts').value = arguments[0]", " ".join(WORDS[:3]) + "\n" + "\n".join(WORDS[3:5])
    )
    window.click(".compare button")
    window.wait("document.querySelectorAll('.similarity tbody tr').length === 3")
    cells = "[...row.cells].slice(2).map((cell) => cell.innerText)"
    rows = window.run(f"return [...document.querySelectorAll('.similarity tbody tr')].map((row) => {cells})")
    assert [rows[index][index] for index in range(3)] == ["1.00"] * 3
    assert rows[0][1] == rows[1][0]
    assert window.run(CONTRASTS) == []
    assert window.run(UNNAMED) == []
    picture(window, "embed")
    window.run("document.getElementById('query').value = arguments[0]", WORDS[3])
    window.click(".compare button")
    window.wait("document.querySelectorAll('.ranking tbody tr').length === 3")
    assert window.run("return document.querySelector('.ranking th.name').innerText") == WORDS[3]
    window.resize(320)
    assert window.run("return document.documentElement.scrollWidth") <= 320


@pytest.mark.model
@on("two workers")
def test_a_chat_model_has_no_view_of_embeddings(window: Browser, stack: Stack) -> None:
    show(window, stack)
    assert window.run("return document.querySelector('nav a[href=\"#/embed\"]').hidden")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack of a tiny model with random weights that takes images, with an encode worker. Its grammars are small."""
    folder = write_toy_media_model(tmp_path_factory.mktemp("gemma4") / "model")
    sizes = {"vocab_size": 272, "vocab_size_per_layer_input": 272, "bos_token_id": None, "eos_token_id": 256}
    ids = {name: value for name, value in json.loads((folder / "config.json").read_text()).items() if "token" in name}
    reference = write_gemma4_with_media(folder, "edge", audio_features=128, **sizes)
    for name, value in ids.items():
        setattr(reference.config, name, value)
    reference.save_pretrained(folder)
    log = tmp_path_factory.mktemp("seeing") / "log"
    with serve(log, str(folder), "--dtype=float32", "--encode=1", "--threads=1", "--kv-memory=24MiB", *SMALL) as stack:
        yield stack


def test_a_dropped_image_is_sent_and_its_encoding_is_in_the_timeline(window: Browser, seeing: Stack) -> None:
    show(window, seeing, "chat")
    window.wait("!document.querySelector('.attach').hidden")
    drop = """
    const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
    const file = (name, type, text) => new File([bytes(text)], name, { type });
    const dropped = new DataTransfer();
    dropped.items.add(file("wave.png", "image/png", arguments[0]));
    dropped.items.add(file("notes.txt", "text/plain", ""));
    const options = { dataTransfer: dropped, bubbles: true, cancelable: true };
    document.querySelector(".say").dispatchEvent(new DragEvent("drop", options));
    """
    window.run(drop, base64.b64encode(image_file(image=drawing(64, 64))).decode())
    window.wait("document.querySelector('.attached img')?.naturalWidth === 64")
    assert "notes.txt: this model takes audio, image, video" in window.text(".chat")
    window.run("document.querySelector('[name=max_tokens]').value = 12; document.getElementById('say').focus()")
    window.press("What is this?", "Enter")
    window.wait("document.querySelector('.turn.you img')")
    window.wait("document.querySelector('.facts-line a')")
    window.click(".facts-line a")
    window.wait("document.querySelector('.timeline [data-kind=encode]')")
    assert "Encode image" in window.text(".timeline")
    assert "encode" in window.text(".timeline [data-kind=encode] .what")
    picture(window, "encode")


def test_tools_are_called_and_their_results_sent(window: Browser, seeing: Stack) -> None:
    show(window, seeing, "chat")
    window.run(
        "const set = (name, value) => { document.querySelector(`[name=${name}]`).value = value; };"
        "set('tools', arguments[0]); set('tool_choice', 'required'); set('max_tokens', 200);"
        "document.querySelector('.settings').open = true;",
        "not JSON",
    )
    window.run("document.getElementById('say').focus()")
    window.press("Weather?", "Enter")
    window.wait("document.querySelector('.chat [role=alert]').innerText.includes('not JSON')")
    window.run("document.getElementById('say').value = ''")
    window.run("document.querySelector('[name=tools]').value = arguments[0]", json.dumps(TOOLS))
    window.run("document.getElementById('say').focus()")
    window.press("What is the weather in Rome?", "Enter")
    window.wait("document.querySelector('.results textarea')")
    call = window.text(".call")
    assert call.startswith("weather")
    assert '"city"' in call
    window.run("document.querySelector('[name=tool_choice]').value = 'none'")
    window.click(".results textarea")
    window.press("sunny")
    window.run("document.querySelector('.results button').scrollIntoView({block: 'center'})")
    window.click(".results button")
    window.wait("document.querySelectorAll('.turn.model .facts-line a').length === 2")

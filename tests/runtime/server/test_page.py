"""The built-in page, in a real browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.running_server import InThread, in_thread

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on the PATH")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


class Page:
    """The page of a server, with what it asked for and complained of."""

    def __init__(self, browser: Any, server: InThread) -> None:
        self.server = server
        self.page = browser.new_page()
        self.page.set_default_timeout(20_000)
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", lambda m: m.type == "error" and self.complaints.append(m.text))
        self.page.goto(server.url)

    def say(self, text: str) -> None:
        self.page.fill("#text", text)
        self.page.press("#text", "Enter")

    def answers(self) -> list[str]:
        texts: list[str] = self.page.locator(".turn.assistant").all_text_contents()
        return texts

    def wait_for_answer(self, text: str, number: int = 0) -> None:
        turn = self.page.locator(".turn.assistant").nth(number)
        sync_api.expect(turn).to_have_text(text, timeout=20_000)
        sync_api.expect(self.page.locator("#stop")).to_be_disabled()


@pytest.fixture
def page(browser: Any, echo_server: InThread) -> Iterator[Page]:
    page = Page(browser, echo_server)
    yield page
    page.page.close()


def test_a_conversation(page: Page) -> None:
    sync_api.expect(page.page.locator("#model")).to_have_text("Octavo - toy")
    page.say("Grüße, 世界 🙂")
    page.wait_for_answer("Grüße, 世界 🙂")
    page.say("And again")
    page.wait_for_answer("And again", 1)
    page.page.click("#again")
    page.wait_for_answer("And again", 1)
    assert page.answers() == ["Grüße, 世界 🙂", "And again"]
    page.page.click("#clear")
    assert page.answers() == []
    assert page.complaints == []
    assert {url.removeprefix(page.server.url).split("?")[0] for url in page.asked} <= {
        *("/", "/v1/models", "/v1/chat/completions", "/metrics", "/favicon.ico")
    }


def test_what_a_model_says_is_text(page: Page) -> None:
    text = "<img src=x onerror=\"document.title='owned'\"><script>1</script>"
    page.say(text)
    page.wait_for_answer(text)
    assert page.page.locator("#log img, #log script").count() == 0
    assert page.page.title() == "Octavo"


def test_settings_are_sent(page: Page) -> None:
    page.page.fill("#max_tokens", "3")
    page.say("abcdef")
    page.wait_for_answer("abc")
    page.page.fill("#temperature", "-1")
    page.say("x")
    error = page.page.locator(".turn.error")
    sync_api.expect(error).to_contain_text("temperature must be at least 0")


def test_stop_ends_the_request_and_keeps_what_was_said(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = page.server.engine._engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step())[1])
    page.say("x" * 100)
    answer = page.page.locator(".turn.assistant")
    sync_api.expect(answer).to_contain_text("xxx")
    page.page.click("#stop")
    page.server.wait_until_idle()
    sync_api.expect(page.page.locator("#stop")).to_be_disabled()
    [said] = page.answers()
    assert 3 <= len(said) < 100
    assert page.page.locator(".turn.error").count() == 0


def test_the_live_figures(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = page.server.engine._engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: (time.sleep(0.05), step())[1])
    page.say("x" * 100)
    sync_api.expect(page.page.locator("#running")).to_have_text("1 of 64", timeout=20_000)
    sync_api.expect(page.page.locator("#kv")).not_to_have_text("0.0 %")
    sync_api.expect(page.page.locator("#rate")).to_contain_text("1", timeout=20_000)
    page.page.click("#stop")
    sync_api.expect(page.page.locator("#running")).to_have_text("0 of 64", timeout=20_000)


def test_a_server_with_keys(browser: Any, echo_artifact: Path) -> None:
    with in_thread(echo_artifact, api_keys=("secret",)) as server:
        page = Page(browser, server)
        page.say("hello")
        sync_api.expect(page.page.locator(".turn.error")).to_contain_text("API key is needed")
        page.page.fill("#key", "secret")
        page.page.press("#key", "Tab")
        sync_api.expect(page.page.locator("#model")).to_have_text("Octavo - toy")
        page.say("hello")
        page.wait_for_answer("hello")
        page.page.close()

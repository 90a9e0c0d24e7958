"""Chromium before a playground before a server; `make test-web` brings what is needed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import ENVIRONMENT, Server

TIMEOUT = 60_000.0
"""Milliseconds that a condition of the page may take on a busy machine."""

ARGUMENTS = (
    "--no-sandbox",  # Chromium has none as root
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Playwright's own Chromium, else the one of the system."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: make test-web")
    sync_api.expect.set_options(timeout=TIMEOUT)
    with sync_api.sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        found = own if Path(own).is_file() else shutil.which("chromium")
        if found is None:
            pytest.skip("needs Chromium: `playwright install chromium` or `apt install chromium`")
        launched = playwright.chromium.launch(executable_path=found, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def tiny(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of legato-tiny."""
    with Server(tmp_path_factory.mktemp("tiny")) as running:
        yield running


@pytest.fixture(scope="session")
def slow(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server without a model that takes 20 ms a token."""
    options = ("--model", "null", "--null-step-ms", "20")
    with Server(tmp_path_factory.mktemp("slow"), *options) as running:
        yield running


@pytest.fixture(scope="session")
def site(tiny: Server) -> Iterator[str]:
    """The playground of legato-tiny."""
    with playground(tiny.address) as url:
        yield url


@pytest.fixture(scope="session")
def slow_site(slow: Server) -> Iterator[str]:
    """The playground of the slow server."""
    with playground(slow.address) as url:
        yield url


@contextmanager
def playground(server: str) -> Iterator[str]:
    """`legato playground` as a user starts it; its URL."""
    program = [sys.executable, "-m", "legato_client.cli", "playground", "--json"]
    command = [*program, "--server", server, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()
        assert process.wait(60) == 0


class Watched:
    """A page, and what it must not do: complain, or ask another host."""

    def __init__(self, context: Any, url: str) -> None:
        self.page = context.new_page()
        self.complaints: list[str] = []
        self.strangers: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", lambda request: self._check(request.url, url.partition("#")[0]))
        self.page.goto(url)
        self.page.wait_for_selector('#server[data-state="up"]', timeout=TIMEOUT)

    def _note(self, message: Any) -> None:
        refused = ("status of 40", "status of 503")  # the latter of a server that is gone
        if message.type == "error" and not any(each in message.text for each in refused):
            self.complaints.append(message.text)

    def _check(self, requested: str, url: str) -> None:
        if not requested.startswith((url, "blob:", "data:")):
            self.strangers.append(requested)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens pages of a URL; none of them may complain."""
    contexts: list[Any] = []
    opened: list[Watched] = []

    def open_it(url: str, **settings: Any) -> Any:
        contexts.append(browser.new_context(**settings))
        contexts[-1].set_default_timeout(TIMEOUT)
        opened.append(Watched(contexts[-1], url))
        return opened[-1].page

    yield open_it
    for context in contexts:
        context.close()
    assert [each.complaints for each in opened] == [[] for _ in opened]
    assert [each.strangers for each in opened] == [[] for _ in opened]

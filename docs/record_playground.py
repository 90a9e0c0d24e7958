"""Record the playground in Chromium, before a server of legato-tiny: `make recording`.

Each frame is what the browser showed first after a step had come true, of the browser's own record
of its screen: nothing is arranged, repeated or slowed down. The frames become
`docs/images/playground-recording.webp`.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib.resources
import io
import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from legato_client import Client
from legato_client.cli.demo import LocalServer
from PIL import Image

TARGET = Path(__file__).parent / "images" / "playground-recording.webp"
SIZE = {"width": 1200, "height": 820}
SHOWN = (840, 574)  # pixels of the recording
FRAME_MS, LAST_MS = 1300, 3500
QUALITY = 60
SESSION_FRAMES, SESSION_MS = 4, 900
TIMELINE_MS = 4000  # for which the timeline runs before it is shown
SAMPLE = Path(str(importlib.resources.files("legato_tiny") / "samples" / "fruit.jpg"))
PAINT = 0.03  # seconds from a change of the page to its picture; nothing fades in
TIMEOUT = 120_000  # milliseconds that a step may take on a busy machine

# The page notes when it drew each box, in milliseconds since the epoch.
NOTES = """
window.drawn = [];
new MutationObserver(() => {
  const boxes = document.querySelectorAll(".overlay rect.box").length;
  while (window.drawn.length < boxes) window.drawn.push(performance.timeOrigin + performance.now());
}).observe(document, {subtree: true, childList: true});
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Shot:
    """Image that the screen showed from `time` on, in seconds since the epoch."""

    time: float
    picture: bytes


class Screen:
    """Chromium's record of a page's screen."""

    def __init__(self, page: Any) -> None:
        self._shots: list[Shot] = []
        self._session = page.context.new_cdp_session(page)
        self._session.on("Page.screencastFrame", self._take)
        self._session.send("Page.startScreencast", {"format": "png", "everyNthFrame": 1})

    def first_after(self, moment: float) -> Image.Image:
        shot = next((each for each in self._shots if each.time >= moment), self._shots[-1])
        return Image.open(io.BytesIO(shot.picture)).convert("RGB")

    def close(self) -> None:
        self._session.send("Page.stopScreencast")
        self._session.detach()

    def _take(self, message: dict[str, Any]) -> None:
        moment = message["metadata"]["timestamp"]
        self._shots.append(Shot(moment, base64.b64decode(message["data"])))
        self._session.send("Page.screencastFrameAck", {"sessionId": message["sessionId"]})


def main() -> int:
    """Start a server, a playground and a browser, and write the recording."""
    from playwright.sync_api import sync_playwright

    with (
        serving(sys.argv[1:]) as server,
        playground(server) as url,
        sync_playwright() as playwright,
    ):
        own = playwright.chromium.executable_path
        program = own if Path(own).is_file() else shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page = browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        page.set_default_timeout(TIMEOUT)
        page.add_init_script(NOTES)
        frames = list(perform(page, url, server))
        browser.close()
    small = [frame.resize(SHOWN, Image.Resampling.LANCZOS) for frame in frames]
    times = [FRAME_MS] * (len(small) - 1) + [LAST_MS]
    first, *rest = small
    first.save(
        TARGET, save_all=True, append_images=rest, duration=times, loop=0, quality=QUALITY, method=6
    )
    sys.stdout.write(f"{len(small)} frames, {TARGET.stat().st_size / 1000:.0f} kB: {TARGET}\n")
    return 0


def perform(page: Any, url: str, server: str) -> Iterator[Image.Image]:
    """Show the first screen, three streamed tasks, a session, and the engine's timeline."""
    page.goto(url)
    page.locator('.answer[aria-busy="false"]').nth(1).wait_for()
    screen = Screen(page)
    settle(page)
    yield screen.first_after(0)
    page.get_by_label("Sample: fruit").click()
    page.locator("#picture-state", has_text="uploaded").wait_for()
    page.evaluate("window.drawn = []")
    while page.locator(".task").count():
        page.locator(".task .icon").first.click()
    for skill, text in (("detect", "strawberry"), ("segment", "pineapple"), ("caption", "long")):
        page.click("#add")
        row = page.locator(".task").last
        row.get_by_label("Skill").select_option(skill)
        if skill == "caption":
            row.get_by_label("Length").select_option(text)
        else:
            row.locator(".inputs > input").first.fill(text)
    settle(page)
    asked = time.time()
    yield screen.first_after(asked - 0.2)
    page.click("#questions button[type=submit]")
    page.locator('.answer[aria-busy="false"]').nth(2).wait_for()
    settle(page)
    for moment in page.evaluate("window.drawn"):
        yield screen.first_after(moment / 1000 + PAINT)
    yield screen.first_after(time.time())
    page.get_by_role("tab", name="Session").click()
    page.locator("#panel-session button[type=submit]").click()
    page.wait_for_selector("#panel-session rect.now", state="attached")
    for _ in range(SESSION_FRAMES):
        page.wait_for_timeout(SESSION_MS)
        yield screen.first_after(time.time() - 0.1)
    page.locator("#panel-session").get_by_role("button", name="Stop").click()
    page.locator("#panel-session [role=status]", has_text="Stopped.").wait_for()
    page.get_by_role("tab", name="Timeline").click()
    page.get_by_role("button", name="Run a sample request").click()
    page.get_by_label("Window").select_option(label="1 s")
    with working(server):
        page.wait_for_timeout(TIMELINE_MS)
        yield screen.first_after(time.time() - 0.2)
    screen.close()


@contextmanager
def working(server: str) -> Iterator[None]:
    """Keep the engine busy, for the timeline to show it."""
    picture, ended = SAMPLE.read_bytes(), threading.Event()

    def ask() -> None:
        with Client(server) as client:
            while not ended.is_set():
                client.caption(picture, "long")

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def settle(page: Any) -> None:
    """Let the browser draw what it has."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_timeout(600)


@contextmanager
def serving(named: list[str]) -> Iterator[str]:
    """Yield the given server, or one that runs meanwhile."""
    if named:
        yield named[0]
        return
    with LocalServer() as server:
        server.wait_until_serving(300, lambda text: None)
        yield server.target


@contextmanager
def playground(server: str) -> Iterator[str]:
    """`legato playground` as a user starts it; its URL."""
    program = [sys.executable, "-m", "legato_client.cli", "playground", "--json"]
    command = [*program, "--server", server, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()


if __name__ == "__main__":
    sys.exit(main())

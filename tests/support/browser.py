"""A real browser for tests of pages: Debian's or Google's Chromium, driven by playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, PROGRAMS)), None)
MISSING = ""
if CHROMIUM is None:
    MISSING = "there is no browser: apt-get install chromium"
elif find_spec("playwright") is None:
    MISSING = 'playwright is missing: pip install "flashgen[dev]"'


@contextmanager
def browser() -> Iterator[Any]:
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield found
        finally:
            found.close()


class Opened:
    """A page of a file, and everything that went wrong in it.

    Attributes:
        wrong: messages of errors and warnings on the console, and exceptions.
        requests: addresses that the page loads, besides its own file and data in itself.
    """

    def __init__(self, found: Any, file: Path, width: int = 1280, scheme: str = "light") -> None:
        self.page = found.new_page(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page.set_default_timeout(20_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", self._request)
        self.page.goto(file.resolve().as_uri())
        self.page.wait_for_selector("html[data-ready]")

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:", "blob:", "about:")):
            self.requests.append(request.url)

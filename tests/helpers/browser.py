"""A real browser over Prefect's pages: Debian's Chromium, driven by Playwright.

Playwright's own browsers are downloads of their own and are not used. `make test` installs
Chromium where it is missing (tests/programs.py).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from PIL import Image
from playwright.sync_api import Locator, Page, expect, sync_playwright
from programs import PROGRAMS, require

__all__ = ["browser_page", "expect", "form_field", "picture"]

SIZE = {"width": 1400, "height": 900}
WAIT = 60.0  # seconds for anything to appear: a page of a busy machine is slow, not wrong
expect.set_options(timeout=WAIT * 1000)
SHOTS = "RAYBATCH_SCREENSHOTS"  # a folder for the pictures, such as docs/images


@contextmanager
def browser_page() -> Iterator[Page]:
    """An empty page of a headless Chromium; fails the test where there is none."""
    require("browser")
    program = next(filter(None, map(shutil.which, PROGRAMS["browser"].names)))
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work for root, and neither server nor pages are foreign here.
        flags = ["--no-sandbox", "--disable-dev-shm-usage"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        try:
            page = browser.new_page(viewport=SIZE)
            page.set_default_timeout(WAIT * 1000)
            yield page
        finally:
            browser.close()


def form_field(form: Locator, *titles: str) -> Locator:
    """A field of Prefect's parameter form by the titles of its groups and its own."""
    for title in titles:
        label = f'.schema-form-property__label:text-matches("^{title}( \\\\(Optional\\\\))?$")'
        form = form.locator(f".schema-form-property:has(> .p-label__header {label})")
    return form


def picture(page: Page, name: str, folder: Path, height: int = SIZE["height"]) -> None:
    """Keeps what the page shows as NAME.png, in few colours: in the folder of the environment
    variable, else in this one."""
    folder = Path(os.environ.get(SHOTS) or folder)
    folder.mkdir(parents=True, exist_ok=True)
    page.set_viewport_size({**SIZE, "height": height})
    page.wait_for_timeout(1000)  # for what moves to come to rest
    image = Image.open(BytesIO(page.screenshot())).convert("RGB")
    few = image.quantize(128, dither=Image.Dither.NONE)
    few.save(folder / f"{name}.png", optimize=True)
    page.set_viewport_size(SIZE)

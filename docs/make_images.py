"""Take screenshots of the demo for the README: a race of the embedded family, light and dark. Usage: python docs/make_images.py
[url]

Starts `outrider demo` unless the address of a running one is given. Needs playwright and Chromium.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).parent / "images"
PATIENCE = 600_000  # milliseconds
MOST_BYTES = 300_000


def photograph(browser: Browser, url: str, scheme: str) -> Path:
    """Run one race, select a corrected token and take a screenshot. Returns the image's path."""
    page = browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900}, reduced_motion="reduce")  # type: ignore[arg-type]
    page.set_default_timeout(PATIENCE)
    page.goto(url)
    page.locator("#method option").first.wait_for(state="attached")
    page.select_option("#length", "64")
    page.click("#start")
    page.locator("#verdict small", has_text=".").wait_for()
    page.evaluate("document.querySelector('#lane-speculative .tok.corrected').click()")
    page.evaluate("document.querySelectorAll('.text').forEach((text) => text.scrollTo(0, 0)); window.scrollTo(0, 0)")
    page.wait_for_timeout(500)
    path = IMAGES / f"demo-{scheme}.png"
    path.write_bytes(page.screenshot(full_page=True))
    page.close()
    return path


def main(url: str | None) -> None:
    """Take screenshots in both colour schemes. Fails if an image is too large for the README."""
    server = None
    if url is None:
        command = [sys.executable, "-m", "outrider", "demo", "--port", "0"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert server.stderr is not None
        url = next(line.split()[0] for line in server.stderr if line.startswith("http"))
    try:
        with sync_playwright() as started:
            own = Path(started.chromium.executable_path)
            found = str(own) if own.exists() else shutil.which("chromium") or shutil.which("google-chrome")
            browser = started.chromium.launch(executable_path=found, args=["--no-sandbox"])
            IMAGES.mkdir(exist_ok=True)
            for scheme in ("light", "dark"):
                path = photograph(browser, url, scheme)
                size = path.stat().st_size
                print(path, size)
                assert size < MOST_BYTES, "too large for the README"
            browser.close()
    finally:
        if server is not None:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)

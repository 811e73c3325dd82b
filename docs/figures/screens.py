"""Screenshots of what a run leaves to look at, light and dark: report, load test, the gateway's page.

    python examples/digits/demo.py build/demo
    python docs/figures/screens.py build/demo

Nothing is drawn: the report and the load page are the demo's files. For the gateway's page the demo's repository is
served, its evaluation images are sent for a minute, and the pruned model is released for the original meanwhile.
Chromium, playwright and Pillow are needed. The files are docs/figures/screen-*.webp.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
for folder in (ROOT, ROOT / "examples/digits"):
    sys.path.insert(0, str(folder))

from demo import evaluation, free_ports, server  # noqa: E402  # the example's own script

Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")
WIDTH, HEIGHT, MARGIN = 1100, 860, 16
LARGEST = 150_000
ROLLOUT = ("--steps", "10", "--steps", "50", "--step-s", "12", "--shadow", "50")
RATE, SECONDS = 100, 75


def main() -> None:
    made = Path(sys.argv[1] if len(sys.argv) > 1 else "build/demo").absolute()
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name, path, last in (("report", "artifact/report.html", "table"), ("load", "load.html", "figure")):
            for scheme in SCHEMES:
                page = visit(browser, scheme, (made / path).as_uri())
                box = page.locator(last).first.bounding_box() or sys.exit(f"{path} has no {last}")
                page.set_viewport_size({"width": WIDTH, "height": round(box["y"] + box["height"]) + MARGIN})
                keep(page, f"{name}-{scheme}")
        os.chdir(folder)  # where a gateway keeps its rollouts
        gateway(browser, made, Path(folder))
        browser.close()


def gateway(browser: Browser, made: Path, folder: Path) -> None:
    """Its page at the end of a minute of traffic, in which a release went on."""
    shutil.copytree(made / "model_repository", folder / "model_repository")
    (folder / "images").mkdir()
    for place, image in enumerate(evaluation(made / "eval.npz")[0]):
        (folder / "images" / f"{place:04}.png").write_bytes(image)
    command = [sys.executable, "-m", "serve"]
    with server(folder / "model_repository", free_ports(4)) as url:
        pages = [visit(browser, scheme, url) for scheme in SCHEMES]
        words = ["--model", "digits_original", "--rate", str(RATE), "--duration", str(SECONDS)]
        load = subprocess.Popen([*command, "load", url, *words, "--data", str(folder / "images")])
        start = [*command, "rollout", "start", "digits_original", "--candidate", "digits", *ROLLOUT]
        subprocess.run(start, check=True)
        if load.wait():
            sys.exit("the load test failed")
        for scheme, page in zip(SCHEMES, pages, strict=True):
            page.locator("#models button", has_text="digits_original").click()
            page.set_input_files("#file", ROOT / "examples/digits/seven.png")
            page.click("#send")
            page.locator("#answer pre").wait_for()
            page.set_viewport_size({"width": WIDTH, "height": page.evaluate("document.documentElement.scrollHeight")})
            keep(page, f"gateway-{scheme}")


def visit(browser: Browser, scheme: Scheme, url: str) -> Page:
    page = browser.new_page(color_scheme=scheme, viewport={"width": WIDTH, "height": HEIGHT})
    page.goto(url)
    return page


def keep(page: Page, name: str) -> None:
    """What the window shows, as a file of docs/figures."""
    path = HERE / f"screen-{name}.webp"
    Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(path, quality=88, method=6)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    if size > LARGEST:
        sys.exit(f"{path} is too large for a page")


if __name__ == "__main__":
    main()

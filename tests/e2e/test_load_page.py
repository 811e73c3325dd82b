"""The report of a load test in a real browser, in light and dark."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, sync_playwright

from serve.load.measure import Plan, measure
from serve.load.report.page import page as page_of
from tests.load_servers import at_once, options, served


@pytest.fixture(scope="module")
def browser(file: Path) -> Iterator[Browser]:
    assert file.is_file()  # made before: a browser has an event loop running
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "load.html"
    with served(at_once) as server:
        report = measure(options(server, duration=1.2), Plan(concurrency=("1,2,4",), objective="p99<50ms"))
    path.write_text(page_of(report))
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1000, 360])
def test_every_plot_can_be_read(browser: Browser, file: Path, scheme: Literal["light", "dark"], width: int) -> None:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 800})
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(file.as_uri())
    assert said == []
    assert asked == [file.as_uri()]
    plots = page.locator("figure svg")
    assert plots.count() >= 4
    page.locator("summary").click()  # the other runs
    ink = page.evaluate("getComputedStyle(document.body).color")
    paper = page.evaluate("getComputedStyle(document.documentElement).colorScheme")
    assert paper == "light dark"
    assert ink == ("rgb(255, 255, 255)" if scheme == "dark" else "rgb(0, 0, 0)")
    for number in range(plots.count()):
        box = plots.nth(number).bounding_box()
        assert box is not None
        assert box["width"] > 300
        assert box["height"] > 50
        inked = plots.nth(number).evaluate("svg => getComputedStyle(svg.querySelector('text')).fill")
        assert inked == ink
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    page.close()

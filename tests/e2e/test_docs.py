"""The documentation as a site: builds without a warning, leads nowhere else, and its reference leaves nothing out."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from cyclopts import App
from playwright.sync_api import Browser, sync_playwright

import compress
import compress.cli
import serve.cli.main
from compress.options import ExportOptions, OptimizeOptions
from serve.gateway.settings import ModelSettings, Settings
from tests.e2e.conftest import ROOT

pytest.importorskip("mkdocs", reason="the extra [docs] is not installed")
PATIENCE_MS = 60_000


class Html(HTMLParser):
    """What of a page is an address, or can be one's end; and its text, by the heading above it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self.sections: dict[str, str] = {"": ""}
        self._at = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if "id" in values:
            self.ids.add(values["id"])
            if tag in ("h1", "h2", "h3", "h4"):
                self._at = values["id"]
                self.sections[self._at] = ""
        if tag == "a" and "href" in values:
            self.links.append(values["href"])
        elif tag == "link" and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(values.get("href", ""))
        elif "src" in values:
            self.loaded.append(values["src"])

    def handle_data(self, data: str) -> None:
        self.sections[self._at] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Html]:
    return {path.relative_to(site).as_posix(): Html(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


def words(section: str) -> set[str]:
    return set(re.findall(r"[\w-]+", section))


def commands(app: App, name: str) -> Iterator[tuple[str, App]]:
    for word in app:
        if not word.startswith("-"):
            yield f"{name} {word}", app[word]
            yield from commands(app[word], f"{name} {word}")


def test_each_link_leads_to_a_page_and_a_place_in_it(site: Path, pages: dict[str, Html]) -> None:
    broken = []
    for name, page in pages.items():
        for link in page.links + page.loaded:
            parts = urlsplit(link)
            if parts.scheme or name == "404.html":
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            end = target.resolve().relative_to(site.resolve()).as_posix()
            if not target.is_file() or (
                parts.fragment and end in pages and parts.fragment not in pages[end].ids | {"__skip"}
            ):
                broken.append(f"{name}: {link}")
    assert broken == []


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[str, Html]) -> None:
    assert {link for page in pages.values() for link in page.loaded if urlsplit(link).netloc} == set()
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert len(styles) > 1
    assert not [text for text in styles if re.search(r"url\(['\"]?(https?:)?//", text)]


@pytest.mark.parametrize(("name", "app"), [("compress", compress.cli.app), ("serve", serve.cli.main.app)])
def test_each_flag_of_each_command_is_in_the_reference(pages: dict[str, Html], name: str, app: App) -> None:
    sections = pages[f"reference/{name}.html"].sections
    found = dict(commands(app, name))
    assert len(found) > 8
    for command, of in found.items():
        assert command.replace(" ", "-") in sections, command
        if of.default_command is not None:
            flags = {argument.names[0] for argument in of.assemble_argument_collection() if argument.show}
            missing = {flag for flag in flags if flag.startswith("--")} - words(sections[command.replace(" ", "-")])
            assert missing == set(), command


def test_each_field_of_settings_and_recipes_is_in_the_reference(pages: dict[str, Html]) -> None:
    settings, recipes = pages["reference/settings.html"].sections, pages["reference/recipes.html"].sections
    for kind, section in (
        (Settings, settings["settings-of-the-gateway"]),
        (ModelSettings, settings["of-single-models"]),
        (ExportOptions, recipes["export"]),
        (OptimizeOptions, recipes["optimize"]),
    ):
        assert {field.name for field in dataclasses.fields(kind)} <= words(section)


def test_each_metric_and_error_is_in_the_reference(pages: dict[str, Html]) -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "serve/gateway").rglob("*.py"))
    shown = {name.removesuffix("_total") for name in words(pages["reference/metrics.html"].sections["metrics"])}
    metrics = set(re.findall(r"\"(gateway_\w+)\"", code))
    assert len(metrics) > 20
    assert metrics <= shown
    errors = re.findall(
        r"^class ([A-Z]\w+)\((?!ValueError)\w*Error\):", code + (ROOT / "compress/errors.py").read_text(), re.MULTILINE
    )
    assert len(errors) > 25
    assert set(errors) <= words("".join(pages["reference/errors.html"].sections.values()))


def test_the_python_api_is_in_the_reference(pages: dict[str, Html]) -> None:
    sections = pages["reference/api.html"].sections
    for name in compress.__all__:
        assert [key for key in sections if key.startswith("compress.") and key.endswith(f".{name}")], name


@pytest.mark.parametrize("width", [1300, 400])
def test_no_page_is_wider_than_its_window(browser: Browser, site: Path, width: int) -> None:
    """What is wide (tables, commands) scrolls by itself."""
    wide = []
    page = browser.new_page(viewport={"width": width, "height": 900})
    for path in sorted({*site.glob("*.html"), *site.glob("reference/*.html")}):
        page.goto(path.as_uri())
        if page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
            wide.append(path.name)
    page.close()
    assert wide == []


def test_the_search_works_from_a_folder(browser: Browser, site: Path) -> None:
    asked: list[str] = []
    page = browser.new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.click("input[name=query]")
    page.get_by_text("Type to start searching").wait_for(timeout=PATIENCE_MS)  # the index has been read
    page.locator("input[name=query]").press_sequentially("health_interval_s")
    found = page.locator(".md-search-result__link").first
    found.wait_for(timeout=PATIENCE_MS)
    assert "reference/s" in (found.get_attribute("href") or "")
    page.close()
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []

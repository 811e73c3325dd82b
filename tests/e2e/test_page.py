"""The page at / in a real browser, in front of a real Triton: by mouse, by keyboard, and in a narrow window."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from serve.gateway.access.keys import add_key
from serve.gateway.settings import Settings
from serve.rollout.agree import Agree
from serve.rollout.plan import Plan, Target
from serve.rollout.store import Store
from tests.integration.test_up import FREE, up
from tests.serve_http import gateway_thread

SEVEN = Path(__file__).parents[2] / "examples" / "digits" / "seven.png"
PATIENCE_MS = 20_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: apt-get install chromium")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def visit(browser: Browser, url: str, width: int = 1200, path: str = "/") -> Iterator[Page]:
    """The page, which must neither complain nor ask anybody else for anything."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    complaints: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("request", lambda request: asked.add(request.url))
    try:
        answer = page.goto(f"{url}{path}")
        policy = answer.headers["content-security-policy"] if answer is not None else ""
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        yield page
        assert all(each.startswith((url, f"blob:{url}")) for each in asked), asked
        unexpected = [each for each in complaints if "401" not in each and "422" not in each]
        assert not unexpected
    finally:
        page.close()


def test_the_docs_run_no_script_that_stands_in_a_page_and_send_a_request(browser: Browser, shipped: str) -> None:
    with visit(browser, shipped, path="/docs") as page:
        expect(page.locator(".opblock-summary-path[data-path='/v2/models/{model}/infer']")).to_be_visible()
        expect(page.locator(".opblock-summary-path[data-path='/v2/models/digits/infer']")).to_be_visible()
        page.locator(".opblock-summary-path[data-path='/v2']").click()
        page.get_by_role("button", name="Execute").click()
        expect(page.locator(".live-responses-table .response-col_status").last).to_contain_text("200")
        page.locator(".opblock-summary-path[data-path='/predict/digits']").click()
        expect(page.locator("#operations-models-predict_digits")).to_contain_text("Request body")


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_what_is_put_into_a_page_does_not_run(browser: Browser, shipped: str, path: str) -> None:
    page = browser.new_page()
    page.goto(f"{shipped}{path}")
    script = "const made = document.createElement('script'); made.textContent = 'window.ran = 1';"
    page.evaluate(f"() => {{ {script} document.body.append(made); }}")
    assert page.evaluate("() => window.ran") is None
    page.evaluate("() => document.body.insertAdjacentHTML('beforeend', '<p id=odd style=\"color: red\">x</p>')")
    assert page.evaluate("() => getComputedStyle(document.getElementById('odd')).color") != "rgb(255, 0, 0)"
    page.close()


def test_an_image_is_tried_with_the_mouse(browser: Browser, shipped: str) -> None:
    with visit(browser, shipped) as page:
        expect(page.locator("#models button")).to_have_count(1)
        expect(page.locator("#models")).to_contain_text("label: BYTES[-1, 1]")
        expect(page.locator("#health")).to_have_text("● ready")
        page.set_input_files("#file", SEVEN)
        expect(page.locator("#preview")).to_be_visible()
        page.click("#send")
        expect(page.locator("#answer")).to_contain_text('"label": "7"')
        expect(page.locator("#answer")).to_contain_text("answered in")
        expect(page.locator("#plots svg")).to_have_count(2)
        expect(page.get_by_role("img", name="digits: latency")).to_be_visible()


def test_everything_is_reached_by_keyboard(browser: Browser, shipped: str) -> None:
    with visit(browser, shipped) as page:
        expect(page.locator("#models button")).to_have_count(1)
        reached = []
        for _ in range(7):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
        assert reached[:2] == ["To the form", "API"]
        assert reached[2].startswith("ready")
        assert reached[3:6] == ["file", "values", "send"]
        page.focus("#values")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer")).to_contain_text('"label": "7"')


def test_a_mistake_is_told(browser: Browser, shipped: str) -> None:
    with visit(browser, shipped) as page:
        expect(page.locator("#models button")).to_have_count(1)
        page.fill("#values", '{"picture": 1}')
        page.click("#send")
        expect(page.locator("#answer .failed")).to_contain_text("refused (422)")
        expect(page.locator("#answer")).to_contain_text("picture")


def test_a_narrow_window_needs_no_scrolling_sideways(browser: Browser, shipped: str) -> None:
    with visit(browser, shipped, width=340) as page:
        expect(page.locator("#models button")).to_have_count(1)
        page.click("#send")
        expect(page.locator("#answer pre")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 340


def test_a_key_is_asked_for_and_decides_what_is_seen(
    browser: Browser, shipped: str, shipped_triton: str, tmp_path: Path
) -> None:
    assert shipped, "its Triton is the one that is asked"
    keys = tmp_path / "keys.json"
    able, _ = add_key(keys, "able", models=("digits",))
    other, _ = add_key(keys, "other", models=("something",))
    settings = Settings(upstream=(shipped_triton,), port=0, keys=keys, state=tmp_path / "rollouts.db")
    with gateway_thread(settings) as url, visit(browser, url) as page:
        expect(page.locator("#key")).to_be_visible()
        expect(page.locator("main")).to_be_hidden()
        page.fill("#secret", "wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#key-told")).to_contain_text("not known")
        page.fill("#secret", other)
        page.keyboard.press("Enter")
        expect(page.locator("#models")).to_contain_text("No model is loaded, or none that this key may ask")
        page.evaluate("sessionStorage.clear()")
        page.reload()
        page.fill("#secret", able)
        page.keyboard.press("Enter")
        expect(page.locator("#models button")).to_have_count(1)
        page.click("#send")
        expect(page.locator("#answer")).to_contain_text('"label": "7"')
        assert able not in page.url


def test_a_release_shows_its_way_and_its_evidence(
    browser: Browser, shipped: str, shipped_triton: str, tmp_path: Path
) -> None:
    assert shipped, "its Triton is the one that is asked"
    store = Store(tmp_path / "rollouts.db")
    with gateway_thread(Settings(upstream=(shipped_triton,), port=0, state=store.path)) as url:
        store.start("net", Target("digits_network"), Plan(shadow=100.0), Target("digits_network", "1"))
        with visit(browser, url) as page:
            expect(page.locator("#rollouts")).to_contain_text("net: digits_network/1 → digits_network")
            expect(page.locator("#rollouts [aria-current]")).to_have_text("copies")
            example = json.loads(urllib.request.urlopen(f"{url}/v2/models/digits_network/example").read())
            for _ in range(5):
                urllib.request.urlopen(f"{url}/v2/models/net/infer", json.dumps(example).encode()).close()
            row = page.locator("#rollouts tr", has_text="does it answer otherwise?")
            expect(row.locator("td").nth(1)).to_have_text("5")
            expect(row.locator("td").nth(2)).to_have_text("0%")
            store.wish("net", "promote")
            expect(page.locator("#rollouts [aria-current]")).to_have_text("all")


def test_a_release_shows_what_it_goes_by(browser: Browser, shipped: str, shipped_triton: str, tmp_path: Path) -> None:
    assert shipped, "its Triton is the one that is asked"
    store = Store(tmp_path / "rollouts.db")
    with gateway_thread(Settings(upstream=(shipped_triton,), port=0, state=store.path)) as url:
        plan = Plan(steps=(50.0,), shadow=100.0, agree=(Agree.parse("logits:argmax"),), expect_change=True)
        store.start("net", Target("digits_network"), plan, Target("digits_network", "1"))
        with visit(browser, url) as page:
            expect(page.locator("#rollouts")).to_contain_text("answers agree by logits:argmax; a change is expected")
            store.wish("net", "step")
            expect(page.locator("#rollouts [aria-current]")).to_have_text("50%")
            example = urllib.request.urlopen(f"{url}/v2/models/digits_network/example").read()
            for number in range(6):
                with urllib.request.urlopen(f"{url}/v2/models/net/infer", example) as answer:
                    word = {"id": answer.headers["answer-id"], "correct": number > 0}
                urllib.request.urlopen(f"{url}/feedback", json.dumps(word).encode()).close()
            row = page.locator("#rollouts tr", has_text="is it reported wrong more often?")
            expect(row).to_contain_text("not asked for")
            expect(row).to_contain_text("2% more")
            expect(page.locator("#rollouts tr", has_text="does it answer otherwise?")).to_contain_text("not judged")


def test_models_on_demand_are_tried_as_others_and_show_their_memory(browser: Browser, tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parents[2] / "model_repository", tmp_path / "models")
    words = (str(tmp_path / "models"), *FREE, "--memory", "1GiB", "--drain-timeout", "1")
    with up(tmp_path, *words) as running, visit(browser, running.url()) as page:
        expect(page.locator("#models button")).to_contain_text("on demand")
        expect(page.locator("#memory")).to_contain_text("of 1,024 MiB")
        page.click("#models button")
        expect(page.locator("#signature")).to_contain_text("it is loaded when it is asked")
        page.set_input_files("#file", SEVEN)
        page.click("#send")
        expect(page.locator("#answer")).to_contain_text('"label": "7"')
        row = page.locator("#memory tr", has_text="digits")
        expect(row.locator("td").nth(2)).to_have_text("1")
        expect(row.locator("td").nth(1)).to_contain_text("MiB")
        expect(page.locator("#models button")).to_contain_text("ready")

"""training.html in a real browser: plots that are drawn, nothing asked from outside, no complaint."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from tests.e2e.conftest import compress_here
from tests.unit.compress.training.networks import data, model


def test_the_page_shows_how_the_training_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no browser: apt-get install chromium")
    model(tmp_path, "student", 8)
    model(tmp_path, "teacher", 12)
    data(tmp_path, count=600, noise=2.0)
    data(tmp_path, "eval", 200, noise=2.0, seed=9)
    asked = (
        "finetune student.pt --teacher teacher.pt --data train.npz --eval eval.npz --epochs 4 --hold-out 0.1 --profile"
    )
    compress_here([*asked.split(), "--batch-size", "auto", "-o", "out"], tmp_path)
    assert "a step took" in capsys.readouterr().out
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1100, "height": 900})
        complaints: list[str] = []
        asked_for: set[str] = set()
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked_for.add(request.url))
        page.goto((tmp_path / "out/training.html").as_uri())
        assert page.locator("figure svg").count() == 4
        assert all(
            box["height"] > 50
            for box in [each.bounding_box() or {"height": 0} for each in page.locator("figure svg").all()]
        )
        assert "after" in page.locator("tr.best").inner_text()
        assert "Where the time goes" in page.locator("body").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        browser.close()
    assert complaints == []
    assert all(url.startswith("file:") for url in asked_for)

"""What the documentation shows of commands is what the command lines take: parsed by them, nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from cyclopts import App

import compress.cli
import serve.cli.main
from tests.e2e.conftest import ROOT

APPS = {"compress": compress.cli.app, "serve": serve.cli.main.app}
# CHANGELOG tells of what was, too.
PAGES = sorted(
    {*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("docs/reference/*.md"), *ROOT.glob("deploy/*.md")}
    - {ROOT / "CHANGELOG.md"}
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
OTHERS = {"--http-restricted-api", "--model-control-mode"}  # Triton's own
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands(text: str) -> Iterator[list[str]]:
    """Those in blocks of a page, in words, without what a shell takes: its comments and redirections."""
    blocks = [block for kind, block in FENCE.findall(text) if kind in ("", "sh")]
    for block in blocks:
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            command = line.partition(" -m ")[2] if line.startswith("torchrun ") else line
            if command.startswith(tuple(f"{name} " for name in APPS)):
                words = shlex.split(command, comments=True)
                yield words[: words.index(">")] if ">" in words else words


def apps(app: App) -> Iterator[App]:
    yield app
    for word in app:
        if not word.startswith("-"):
            yield from apps(app[word])


def flags(app: App) -> set[str]:
    """Those of one command."""
    if app.default_command is None:
        return set()
    return {name for argument in app.assemble_argument_collection() for name in argument.names} | {"--help"}


def of_words(words: list[str]) -> App:
    """The command that words begin with."""
    app = APPS[words[0]]
    for word in words[1:]:
        if word.startswith("-") or word not in set(app):
            break
        app = app[word]
    return app


def names(page: str) -> list[list[str]]:
    """Commands in a page's sentences: `serve load --slo`, with or without what they would need to run."""
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return [code.split() for code in CODE.findall(text) if re.match(r"(compress|serve) [a-z]", code)]


ALL = [(page.relative_to(ROOT).as_posix(), words) for page in PAGES for words in commands(page.read_text("utf-8"))]


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)}" for page, words in ALL])
def test_a_command_in_a_block_is_taken(page: str, words: list[str]) -> None:
    called, _, _ = APPS[words[0]].parse_args(words[1:], exit_on_error=False, print_error=False)
    assert called is of_words(words).default_command


def test_there_are_such_commands() -> None:
    """Or the search for them is broken."""
    assert len(ALL) > 50
    assert {page for page, _ in ALL} >= {
        "README.md",
        "docs/tutorial.md",
        "docs/load.md",
        "docs/gpu.md",
        "deploy/README.md",
    }


@pytest.mark.parametrize("page", [page.relative_to(ROOT).as_posix() for page in PAGES])
def test_a_command_that_a_sentence_names_is_there_with_its_flags(page: str) -> None:
    known = {name for app in APPS.values() for each in apps(app) for name in flags(each)}
    for words in names(page):
        app = of_words(words)
        assert app is not APPS[words[0]], words
        found = set(FLAG.findall(" ".join(words)))
        assert found <= flags(app), (words, found - flags(app))
    text = FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))
    alone = {code for code in CODE.findall(text) if FLAG.match(code)}
    told = {flag for code in alone for flag in FLAG.findall(code)}
    assert told <= known | OTHERS, told - known

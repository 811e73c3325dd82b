"""Flags that messages and help name are such as there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

import compress
from compress.cli.commands import ELSEWHERE, app

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*(?![a-z0-9…-])")
OF_OTHERS = re.compile(r"`compress [^`]*`")
OTHERS = {
    "--address", "--head", "--num-cpus", "--num-gpus",  # ray start
    "--cpus", "--gpus", "--rm",  # docker run, serve up
    "--nnodes", "--nproc-per-node", "--max-restarts",  # torchrun
    "--force-reinstall",  # pip
    "--local-dir",  # hf download
    "--image", "--name", "--repository",  # serve pack
    "--help", "--version",
    "--trust-pickle",  # which is told of by its new name
}  # fmt: skip
SCRIPTS = ("tensorrt/run_script.py",)  # copied to where TensorRT is: its flags are trtexec's
ROOT = Path(compress.__file__).parent


def commands() -> dict[str, App]:
    found = {name: app[name] for name in app if not name.startswith("-")}
    return {name: each for name, each in found.items() if each.default_command is not None}


def flags_of(command: App) -> set[str]:
    return {name for each in command.assemble_argument_collection() if each.parse for name in each.names}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    for each in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(each, ast.Constant) and isinstance(each.value, str):
            yield each.lineno, each.value


def test_flags_that_are_named_anywhere_are_of_some_command() -> None:
    known = {flag for command in commands().values() for flag in flags_of(command)} | OTHERS
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {flag}"
        for path in sorted(ROOT.rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in SCRIPTS
        for line, text in texts(path)
        for flag in FLAG.findall(text)
        if flag not in known
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(commands()))
def test_the_help_of_a_command_names_its_own_flags(name: str) -> None:
    command = commands()[name]
    arguments = command.assemble_argument_collection(parse_docstring=True)
    helps = [command.help or "", *(each.parameter.help or "" for each in arguments)]
    assert len(list(filter(None, helps))) > len(flags_of(command)) / 2
    named = {flag for text in helps for flag in FLAG.findall(OF_OTHERS.sub("", text))}
    assert named - flags_of(command) - OTHERS == set()


def test_a_flag_of_other_commands_is_told_by_a_name_that_there_is() -> None:
    for (name, flag), here in ELSEWHERE.items():
        own = flags_of(commands()[name])
        assert flag not in own
        assert set(FLAG.findall(here)) <= own

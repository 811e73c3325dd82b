"""Files that attack whoever opens them are refused in three lines: nothing runs, no memory is taken.

The files are written by functions, tests/hostile/build.py; the commands run on all of them in two processes whose
memory is bounded, and on a few in processes of their own, as a user runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import compress
from tests.hostile import data_files, exported_programs, onnx_files, pickles  # noqa: F401  each adds its attacks
from tests.hostile.build import ATTACKS, Attack, build
from tests.models import mlp

LIMIT = 12 << 30
"""Of address space: torch and ONNX Runtime reserve gigabytes that they never touch."""
GROWTH = 400 << 20
"""Bytes that one file may take."""
pytestmark = pytest.mark.timeout(900)  # the first test waits for all commands
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}

COMMANDS = {
    "model": ("inspect", "export", "measure", "lint", "pack"),
    "onnx": ("inspect", "export", "measure", "lint", "pack", "serve lint"),
    "artifact": ("inspect", "measure", "lint", "pack"),
    "data": ("export", "measure"),
}


def arguments(attack: Attack, path: Path, command: str, folder: Path) -> list[str]:
    """A command line over an attack."""
    out = str(folder / "out" / f"{attack.name}-{command}")
    file = str(path)
    given = ["--input", "x:float32[batch,4]"] if path.suffix == ".pt" else []
    if attack.kind == "data":
        model = str(folder / "good.pt")
        return {
            "export": ["export", model, "--int8", "static", "--calibration", file, "--output", out],
            "measure": ["measure", model, "--data", file, "--batches", "1", "--rounds", "1"],
        }[command]
    tensors = ["--input", "x:float32[batch,4]", "--output", "y:float32[batch,4]"] if path.suffix == ".pt" else []
    return {
        "inspect": ["inspect", file, *given, *(["--roofline"] if attack.kind == "artifact" else [])],
        "export": ["export", file, *given, "--output", out],
        "measure": ["measure", file, *given, "--batches", "1", "--rounds", "1"],
        "lint": ["lint", file],
        "pack": ["pack", file, "--repository", out, "--name", "m", *tensors],
        "serve lint": ["lint", "--repository", str(folder / "repositories" / attack.name)],
    }[command]


def planned(attack: Attack) -> tuple[str, ...]:
    if attack.harmless:
        return ("inspect",) if attack.kind == "model" else ("measure", "lint")
    if attack.kind == "model":  # `lint` and `pack` don't look into these: a few of each kind are enough
        few = attack.name in ("a_pickle", "program_with_legacy_weights", "native_argument_whose_repr_is_code")
        return COMMANDS["model"] if few else ("inspect", "export")
    if attack.kind == "onnx":
        if attack.name == "onnx_of_two_million_nodes":  # takes seconds
            return ("lint", "pack")
        few = attack.name in ("onnx_that_is_text", "onnx_with_weights_above")
        return COMMANDS["onnx"] if few else ("measure", "lint", "pack", "serve lint")
    return COMMANDS[attack.kind]


CASES = [(attack, command) for attack in ATTACKS for command in planned(attack)]
FOUND: dict[tuple[str, str], dict[str, Any]] = {}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hostile")
    paths = build(folder)
    compress.save(mlp(), folder / "good.pt", inputs=["x:float32[batch,4]"])
    for attack in ATTACKS:
        if attack.kind == "onnx":
            repository(folder / "repositories" / attack.name, paths[attack.name])
    for which in ("compress", "serve"):
        mine = [case for case in CASES if (case[1] in ("pack", "serve lint")) == (which == "serve")]
        lines = [json.dumps([a.name, arguments(a, paths[a.name], c, folder)]) for a, c in mine]
        done = subprocess.run(
            [sys.executable, "-m", "tests.hostile.run", which, str(LIMIT), str(folder / "canaries")],
            input="\n".join(lines), capture_output=True, text=True, check=False, timeout=800, env=ENVIRONMENT,
        )  # fmt: skip
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for (attack, command), answer in zip(mine, answers, strict=False):
            FOUND[attack.name, command] = answer
        if len(answers) < len(mine):
            attack, command = mine[len(answers)]
            FOUND[attack.name, command] = {"died": done.returncode, "told": done.stderr[-2000:]}
    return FOUND


def repository(folder: Path, file: Path) -> None:
    """A model repository as Triton has it, around an ONNX file."""
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    os.link(file, version / "model.onnx")
    for beside in ("small.bin", "linked"):
        if (file.parent / beside).exists():
            (version / beside).symlink_to(
                (file.parent / beside).readlink() if beside == "linked" else file.parent / beside
            )
    (folder / "m" / "config.pbtxt").write_text(
        'name: "m"\nbackend: "onnxruntime"\nmax_batch_size: 8\n'
        'input [{ name: "x" data_type: TYPE_FP32 dims: [4] }]\noutput [{ name: "y" data_type: TYPE_FP32 dims: [4] }]\n'
    )


@pytest.mark.parametrize(("attack", "command"), CASES, ids=[f"{a.name}-{c}" for a, c in CASES])
def test_nothing_runs_and_three_lines_say_why(
    corpus: dict[tuple[str, str], dict[str, Any]], attack: Attack, command: str
) -> None:
    if (attack.name, command) not in corpus:
        pytest.fail("an earlier file took the process down")
    found = corpus[attack.name, command]
    assert "died" not in found, found
    assert not found["canary"], "its code ran"
    assert "Traceback" not in found["told"], found["told"]
    assert found["grown"] < GROWTH
    if attack.harmless:
        assert found["code"] in (0, 1, 2)
    elif command == "serve lint":
        assert found["code"] == 1, found["told"]
        assert "m" in found["told"]
    elif command == "lint" and attack.kind in ("onnx", "artifact"):  # it only reads: operators of libraries are told
        assert found["code"] in (0, 1, 2), found["told"]
    else:
        assert found["code"] == 2, found["told"]
        lines = [line for line in found["told"].splitlines() if line.strip()]
        assert lines[-3].startswith("error: ")
        assert [line.strip().split(":")[0] for line in lines[-2:]] == ["why", "mend"]


def test_a_few_as_their_user_runs_them(tmp_path: Path) -> None:
    program, above, nested = names = ("program_with_legacy_weights", "onnx_with_weights_above", "onnx_nested")
    paths = build(tmp_path, *names)
    for module, arguments_ in (
        ("compress", ["inspect", paths[program]]),
        ("compress", ["measure", paths[above]]),
        ("serve", ["pack", paths[nested], "--repository", tmp_path / "repository", "--name", "m"]),
    ):
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, arguments_)],
            capture_output=True, text=True, check=False, timeout=120, env=ENVIRONMENT,
        )  # fmt: skip
        assert done.returncode == 2
        assert [line.strip().split(":")[0] for line in done.stderr.splitlines()] == ["error", "why", "mend"]
    assert not list((tmp_path / "canaries").iterdir())
    assert not (tmp_path / "repository" / "m").exists()

"""What CONTRIBUTING.md and the templates say holds: the map, the recipes' files, the templates' code, `make check`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compress.errors import ToolkitError
from compress.model import TorchModel, infer_signature
from compress.pipeline import check
from compress.signature import TensorSpec
from serve.lint.model import read
from tests.affected import affected, changed

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
TEMPLATES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "templates.md").read_text(encoding="utf-8"), re.DOTALL)


def purpose(init: Path) -> str:
    """The first sentence of a folder's docstring."""
    told = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    assert told is not None, f"{init} does not say what its folder is for"
    return re.split(r"\.(?:\s|$)", " ".join(told.split()))[0]


def test_the_map_has_the_rooms_that_are_there_and_says_what_they_say() -> None:
    rooms = sorted(
        init for package in ("compress", "serve") for init in ROOT.glob(f"{package}/*/__init__.py") if init.is_file()
    )
    wanted = [f"| `{init.parent.relative_to(ROOT).as_posix()}` | {purpose(init)} |" for init in rooms]
    assert [line for line in CONTRIBUTING.splitlines() if re.match(r"\| `(compress|serve)/", line)] == wanted


def test_files_that_are_named_are_there() -> None:
    named = re.findall(r"`((?:compress|serve|tests|docs)/[\w/.]+\.(?:py|md))(?:::?(\w+))?`", CONTRIBUTING)
    assert len(named) > 10
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert re.search(rf"\b{name}\b", (ROOT / path).read_text(encoding="utf-8")), (path, name)


def load(code: str, name: str) -> Any:
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(code, name, "exec"), vars(module))  # noqa: S102 - the template as a user would copy it
    return module


def test_the_template_of_a_stage_is_a_stage() -> None:
    stage = load(TEMPLATES[0], "template_stage").ZeroSmall(0.5)
    layer = nn.Linear(2, 1).eval()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.1, 2.0]]))
        layer.bias.copy_(torch.tensor([-0.4]))
    model = TorchModel(layer, infer_signature(layer, (TensorSpec.parse("x:float32[batch,2]"),)))
    check([stage], model)
    given = stage.run(model, Path(), lambda done, total, note: None)
    assert given.model.module.weight.tolist() == [[0.0, 2.0]]
    assert given.details == {"zeros": 2}
    assert layer.weight.tolist()[0][0] == pytest.approx(0.1), "the input was changed"
    with pytest.raises(ToolkitError, match="small weights"):
        check([type(stage)(0.0)], model)


@pytest.mark.parametrize(("versions", "found"), [(3, 0), (4, 1)])
def test_the_template_of_a_rule_is_a_rule(tmp_path: Path, versions: int, found: int) -> None:
    folder = tmp_path / "digits"
    for version in range(1, versions + 1):
        (folder / str(version)).mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "onnxruntime" version_policy { all { } }')
    rule = load(TEMPLATES[1], "template_rule").many_version_rules
    assert [finding.severity for finding in rule(read(folder))] == ["warning"] * found


@pytest.mark.parametrize(
    ("files", "tests"),
    [
        (["compress/quantize/place_qdq.py"], ["tests/unit/compress/quantize/test_place_qdq.py"]),
        (["compress/quantize/place_qdq.py", "compress/quantize/weights_onnx.py"], ["tests/unit/compress/quantize"]),
        (["serve/gateway/edge/direct.py"], ["tests/unit/serve/gateway"]),
        (["tests/unit/serve/lint/test_lint.py"], ["tests/unit/serve/lint/test_lint.py"]),
        (["tests/unit/serve/lint/test_lint.py", "serve/lint/advice.py"], ["tests/unit/serve/lint"]),
        (["tests/unit/serve/lint/gone.py"], ["tests/unit/serve/lint"]),
        (["tests/affected.py", "docs/templates.md"], ["tests/unit/test_contributing.py"]),
        (["README.md", "serve/nowhere/new.py", "benchmarks/x.py"], []),
    ],
)
def test_affected(files: list[str], tests: list[str]) -> None:
    assert affected(files) == tests


def test_a_file_at_the_top_of_a_package_has_the_tests_at_the_top() -> None:
    found = affected(["compress/artifact.py"])
    assert "tests/unit/compress/test_artifact.py" in found
    assert all((ROOT / each).is_file() for each in found)


def test_what_has_changed_is_what_git_says_and_what_it_does_not_know(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)  # noqa: S607

    for name in ("same", "edited", "staged", "gone"):
        (tmp_path / name).write_text("before")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    for name in ("edited", "staged", "new", "ignored"):
        (tmp_path / name).write_text("after")
    (tmp_path / "gone").unlink()
    git("add", "staged")
    assert changed("HEAD", tmp_path) == ["edited", "gone", "new", "staged"]

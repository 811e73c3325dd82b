"""Plans in a repository: damaged ones, and those that the server's TensorRT can't load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compress.artifact import Signature, TensorSpec
from compress.errors import RecipeError
from serve.cli.main import main
from serve.lint.plan_rules import version_of
from serve.lint.run import lint
from serve.pack.write import pack
from tests.serve_models import plan_of

ONE = Signature((TensorSpec.parse("x:float32[batch,3]"),), (TensorSpec.parse("y:float32[batch,5]"),))
PLAN = plan_of(10, 5, 0, 18)


@pytest.mark.parametrize(
    ("content", "what", "mend"),
    [
        (b"\x0e\x00\x00\x00" + b'{"imgsz": 640}' + PLAN, "14 bytes of JSON before the plan", "tail -c +19"),
        (b"\x80\x02checkpoint", "is no TensorRT plan", "trtexec"),
        (PLAN[:20], "is cut short: 20 bytes", "again"),
    ],
)
def test_lint_knows_a_plan_by_its_mark(tmp_path: Path, content: bytes, what: str, mend: str) -> None:
    (tmp_path / "model.plan").write_bytes(content)
    pack(tmp_path / "model.plan", repository=tmp_path / "models", name="net", signature=ONE)
    (found,) = [each for each in lint(tmp_path / "models", container=True) if each.severity == "error"]
    assert what in found.what
    assert mend in found.mend


@pytest.mark.parametrize(
    ("server", "severity", "what"),
    [
        ("10.5", "", ""),
        ("10.5.0", "", ""),
        ("10", "", ""),
        ("10.7", "warning", "built by TensorRT 10.5.0.18, the server has 10.7: it loads only if"),
        ("10.4", "error", "built by TensorRT 10.5.0.18, the server has 10.4"),
        ("11.0", "error", "built by TensorRT 10.5.0.18, the server has 11.0"),
        ("8.6.1", "error", "built by TensorRT 10.5.0.18, the server has 8.6.1"),
    ],
)
def test_lint_tells_a_plan_of_another_tensorrt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], server: str, severity: str, what: str
) -> None:
    (tmp_path / "model.plan").write_bytes(PLAN)
    pack(tmp_path / "model.plan", repository=tmp_path / "models", name="net", signature=ONE)
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(tmp_path / "models"), "--tensorrt", server, "--json"])
    found = [each for each in json.loads(capsys.readouterr().out) if "TensorRT" in each["what"]]
    assert [each["severity"] for each in found] == ([severity] if severity else [])
    assert all(what in each["what"] for each in found)
    assert (ended.value.code == 1) == (severity == "error")


@pytest.mark.parametrize(
    ("other", "severity"), [((10, 5, 0, 18), ""), ((10, 7, 0, 23), "warning"), ((8, 6, 1, 6), "error")]
)
def test_lint_tells_plans_that_no_one_server_loads(tmp_path: Path, other: tuple[int, ...], severity: str) -> None:
    for name, version in (("a", (10, 5, 0, 18)), ("b", other)):
        (tmp_path / "model.plan").write_bytes(plan_of(*version))
        pack(tmp_path / "model.plan", repository=tmp_path / "models", name=name, signature=ONE)
    found = [each for each in lint(tmp_path / "models", container=True) if "TensorRT" in each.what]
    assert [each.severity for each in found] == ([severity] if severity else [])


@pytest.mark.parametrize("text", ["ten", "10.", "10.5.0.1.2", "10.-5", ""])
def test_a_version_of_tensorrt_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"can't take the version of TensorRT"):
        version_of(text)

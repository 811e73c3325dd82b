"""Hooks that would fail on every request are refused when they are packed: their own example goes through all steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from compress.artifact import Artifact
from compress.errors import HookError, RepositoryError
from serve.cli.main import main
from serve.hooks import check
from serve.hooks.new import new_hooks
from serve.pack.source import load_source
from serve.pack.write import pack
from tests.serve_models import HOOKS, artifact_of, hook_file, tiny_artifact
from tests.starting_models import positions

MISSING = "import sys; sys.exit(\"ModuleNotFoundError: No module named 'onnxruntime'\")"


def test_hooks_whose_texts_are_too_long_for_the_network_are_refused_in_three_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the bare file nothing says how many tokens it takes; `hooks new` pads all texts to 128 then."""
    artifact = positions(tmp_path / "artifact", 64, ("a", "b"))
    source = load_source(artifact / "model.onnx")
    new_hooks("text", source, tmp_path / "hooks.py", artifact / "processor" / "tokenizer.json")
    arguments = ["--repository", str(tmp_path / "models"), "--name", "m", "--hooks", str(tmp_path / "hooks.py")]
    with pytest.raises(SystemExit) as ended:
        main(["pack", str(source.model_path), *arguments])
    told = capsys.readouterr().err.strip().splitlines()
    assert (ended.value.code, len(told)) == (2, 3)
    assert "64 by 128" in told[1]
    assert "input_ids int64[1, 128], attention_mask int64[1, 128]" in told[2]
    assert not list((tmp_path / "models").glob("*"))


def test_a_postprocess_that_fails_on_what_the_network_answers_is_refused(tmp_path: Path) -> None:
    hooks = hook_file(tmp_path, HOOKS.replace('"abc"[best]', '"abc"[best + 3]'))
    with pytest.raises(HookError, match=r"my_hooks\.py:20") as caught:
        pack(tiny_artifact(tmp_path / "artifact"), repository=tmp_path / "models", name="m", hooks=hooks)
    assert "postprocess: it failed: IndexError" in caught.value.why


def test_a_network_that_gives_no_number_is_warned_of(tmp_path: Path) -> None:
    node = helper.make_node("Div", ["x", "x"], ["logits"])
    artifact = artifact_of(tmp_path / "artifact", [node], ["x:float32[batch,4]"], ["logits:float32[batch,4]"])
    packed = pack(artifact, repository=tmp_path / "models", name="m", hooks=hook_file(tmp_path))
    assert "logits is NaN" in packed.warnings[0]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (MISSING, "the Python package 'onnxruntime' is not installed"),
        (
            "import sys; print('Fatal error: fast.Attention is no operator', file=sys.stderr); sys.exit(3)",
            "no operator",
        ),
    ],
)
def test_where_this_machine_can_t_run_the_network_it_is_packed_with_a_warning(
    program: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "_NETWORK", program)
    artifact = tiny_artifact(tmp_path / "artifact")
    packed = pack(artifact, repository=tmp_path / "models", name="m", hooks=hook_file(tmp_path))
    assert "the hooks were not tried on the network" in packed.warnings[0]
    assert why in packed.warnings[0]


def test_of_a_long_message_the_end_is_told(tmp_path: Path) -> None:
    name = "long" * 99
    source = Artifact.load(artifact_of(
        tmp_path / "artifact", [helper.make_node("Add", ["x", "two"], ["y"], name=name)], ["x:float32[batch,n]"],
        ["y:float32[batch,n]"], {"two": np.zeros(2, np.float32)},
    ))  # fmt: skip
    with pytest.raises(RepositoryError, match=r"^can't run") as caught:
        check.run_network(source, {"x": np.zeros(5, np.float32)})
    assert caught.value.why.startswith("… ")
    assert "2 by 5" in caught.value.why
    assert len(caught.value.why) <= 302

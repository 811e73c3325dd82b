"""What lint says of repositories that Triton would serve, and how it says it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from compress.errors import RepositoryError
from serve.cli.main import main
from serve.lint import run as run_module
from serve.lint.run import lint
from serve.pack.onnx_reader import read_onnx
from serve.pack.write import PackOptions, pack
from tests.lint_corpus import BATCHING, CASES, GROUP, LOGITS, OPENVINO, WARMUP, Case, X, parameter
from tests.serve_models import artifact_of, four_bit_artifact, hook_file, tiny_artifact

SHIPPED = Path(__file__).parents[4] / "model_repository"
WARMED = "model_warmup {"
FREE_BATCH = (
    ("max_batch_size: 8", "max_batch_size: 0"),
    (BATCHING, ""),
    (X, X.replace("dims: 4", "dims: -1 dims: 4")),
    (LOGITS, LOGITS.replace("dims: 3", "dims: -1 dims: 3")),
    (WARMUP, WARMUP.replace("dims: 4", "dims: 1 dims: 4")),
)


def writable(folder: Path) -> None:
    (folder / "1" / "model.onnx").chmod(0o666)


def linked(folder: Path) -> None:
    path = folder / "1" / "model.onnx"
    elsewhere = path.rename(folder.parent.parent / "elsewhere.onnx")
    path.symlink_to(elsewhere)


ADVICE: tuple[tuple[Case, str], ...] = (
    (Case("no_group", swaps=((GROUP, ""),)), "two for each CPU model"),
    (Case("no_batching", swaps=((BATCHING, ""),)), "nothing makes batches"),
    (Case("idle_batching", swaps=(*FREE_BATCH[:1], *FREE_BATCH[2:])), "dynamic_batching does nothing"),
    (Case("free_batch", swaps=FREE_BATCH), "the first dimension of every tensor is free"),
    (Case("bounded", swaps=((BATCHING, "dynamic_batching { default_queue_policy { max_queue_size: 9 } }"),)), "queue"),
    (Case("preferred", swaps=((BATCHING, "dynamic_batching { preferred_batch_size: 4 }"),)), "preferred_batch_size"),
    (Case("many", swaps=((GROUP, "instance_group { count: 400 kind: KIND_CPU }"),)), "400 instances with 1 threads"),
    (Case("own_threads", swaps=(('string_value: "1"', 'string_value: "0"'), (GROUP, GROUP.replace("1", "3")))), "cores"),
    (Case("cold", "network", swaps=((f'{WARMED} name: "one" batch_size: 1 inputs {{ key: "x" {WARMUP} }} }}', ""),)),
     "first requests pay"),
    (Case("unpadded", swaps=(OPENVINO,)), "answers batches of 8 alone"),
    (Case("crowded", swaps=(OPENVINO,), more=parameter("INFERENCE_NUM_THREADS", "4000")), "this machine has"),
    (Case("anyone", files=writable), "anyone on this machine may write 1/model.onnx"),
    (Case("elsewhere", files=linked), "link out of the model's folder"),
    (Case("stats"), "no client can ask for a model named 'stats'"),
    (Case("a,b"), "no client can ask for a model named 'a,b'"),
)  # fmt: skip


def written(tmp_path: Path, *cases: Case) -> Path:
    for case in cases:
        case.write(tmp_path / "models")
    return tmp_path / "models"


@pytest.mark.parametrize(("case", "what"), ADVICE, ids=lambda item: getattr(item, "name", ""))
def test_what_triton_does_badly_is_a_warning(case: Case, what: str, tmp_path: Path) -> None:
    found = lint(written(tmp_path, case))
    assert [finding.severity for finding in found] == ["warning"] * len(found)
    assert any(what in finding.what for finding in found), found


def test_what_pack_writes_has_nothing_to_mend(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "artifact")
    options = PackOptions(instances=1)
    pack(artifact, repository=tmp_path / "models", name="plain", options=options)
    pack(artifact, repository=tmp_path / "models", name="hooked", hooks=hook_file(tmp_path), options=options)
    assert lint(tmp_path / "models") == []


def test_a_triton_elsewhere_may_be_too_old_for_4_bit_weights(tmp_path: Path) -> None:
    artifact = four_bit_artifact(tmp_path / "artifact")
    pack(artifact, repository=tmp_path / "models", name="few", options=PackOptions(instances=1))
    assert lint(tmp_path / "models") == []
    (found,) = lint(tmp_path / "models", container=True)
    assert found.severity == "warning"
    assert "tables with weights of few bits, which ONNX Runtime reads since 1.23" in found.what
    assert "Triton 25.09 or newer" in found.mend


def test_a_format_that_is_newer_than_the_operators_decides(tmp_path: Path) -> None:
    for ir, triton in ((9, "24.03"), (10, "24.05")):
        weights: dict[str, np.ndarray[Any, Any]] = {
            "codes": np.zeros((8, 2, 16), np.uint8),
            "scale": np.ones((8, 2), np.float32),
        }
        few = helper.make_node(
            "MatMulNBits", ["x", "codes", "scale"], ["y"], domain="com.microsoft", K=64, N=8, bits=4, block_size=32
        )
        artifact = artifact_of(
            tmp_path / str(ir), [few], ["x:float32[batch,64]"], ["y:float32[batch,8]"], weights, ir_version=ir
        )
        pack(artifact, repository=tmp_path / f"models{ir}", name="few", options=PackOptions(instances=1))
        (found,) = lint(tmp_path / f"models{ir}", container=True)
        assert f"Triton {triton} or newer" in found.mend


def test_the_shipped_repository_has_no_error(tmp_path: Path) -> None:
    shutil.copytree(SHIPPED, tmp_path / "models")
    assert [finding for finding in lint(tmp_path / "models") if finding.severity == "error"] == []


def test_hooks_whose_requirements_are_gone_are_an_error(tmp_path: Path) -> None:
    artifact = tiny_artifact(tmp_path / "artifact")
    pack(artifact, repository=tmp_path / "models", name="m", hooks=hook_file(tmp_path))
    path = tmp_path / "models" / "m_preprocess" / "config.pbtxt"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("numpy", "no-such-package"), encoding="utf-8")
    whats = [finding.what for finding in lint(tmp_path / "models") if finding.severity == "error"]
    assert any("no-such-package" in what for what in whats)
    assert any("its step 'm_preprocess' can't be loaded" in what for what in whats)


def test_for_a_container_this_machine_says_nothing(tmp_path: Path) -> None:
    names = ("gpu_without_one", "unknown_backend", "python_missing_import")
    models = written(tmp_path, *(case for case in CASES if case.name in names))
    assert {finding.model for finding in lint(models) if finding.severity == "error"} == set(names)
    assert [finding for finding in lint(models, container=True) if finding.severity == "error"] == []


def test_a_file_that_takes_onnx_runtime_down_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, sys\nif 'bad' in sys.argv[1]: os.abort()\nimport json\n"
    program += "print(json.dumps({'path': sys.argv[1], 'tensors': [[], []]}))"
    monkeypatch.setattr("serve.pack.onnx_reader._PROGRAM", program)
    found = read_onnx([tmp_path / "bad.onnx", tmp_path / "good.onnx"])
    assert found is not None
    assert "crashes" in found[tmp_path / "bad.onnx"].error
    assert found[tmp_path / "good.onnx"].error == ""


def test_a_file_that_takes_onnx_runtime_minutes_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "import json, sys, time\nfor path in sys.argv[1:]:\n    if 'slow' in path: time.sleep(3600)\n"
    program += "    print(json.dumps({'path': path, 'tensors': [[], []]}), flush=True)"
    monkeypatch.setattr("serve.pack.onnx_reader._PROGRAM", program)
    whole, cut = subprocess.run, []

    def run(command: list[str], **how: Any) -> subprocess.CompletedProcess[str]:
        paths = command[command.index(program) + 1 :]
        if not any("slow" in path for path in paths):
            return whole(command, **how)
        try:
            return whole(command, **how | {"timeout": 0.01})
        except subprocess.TimeoutExpired as err:
            cut.append(paths)
            if "first" in paths[0]:  # what it has said by then, and half a line
                err.stdout = json.dumps({"path": paths[0], "tensors": [[], []]}).encode() + b'\n{"path'
            raise

    monkeypatch.setattr(subprocess, "run", run)
    first, slow, last = (tmp_path / f"{name}.onnx" for name in ("first", "slow", "last"))
    found = read_onnx([first, slow, last])
    assert found is not None
    assert "takes more than 300 s" in found[slow].error
    assert found[first].error == found[last].error == ""
    assert [list(map(Path, paths)) for paths in cut] == [[first, slow, last], [slow, last]], "it had all the time alone"


def test_without_onnx_runtime_the_files_are_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "read_onnx", lambda _paths, _runtime: None)
    found = lint(written(tmp_path, Case("network")))
    assert [finding.what for finding in found] == ["no ONNX file for ONNX Runtime was looked into"]


@pytest.mark.parametrize(("name", "code"), [("good_network", 0), ("no_file", 1), ("negative_count", 0)])
def test_the_exit_code_tells_errors_from_warnings(name: str, code: int, tmp_path: Path) -> None:
    models = written(tmp_path, *(case for case in CASES if case.name == name))
    with pytest.raises(SystemExit) as stopped:
        main(["lint", str(models)])
    assert stopped.value.code == code


def test_json_holds_every_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = written(tmp_path, *(case for case in CASES if case.name == "no_file"))
    with pytest.raises(SystemExit):
        main(["lint", str(models), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["model"] == "no_file"
    assert found["severity"] == "error"
    assert "model.onnx" in found["what"]
    assert found["mend"]


def test_a_container_is_told_that_threads_left_open_are_the_machines(tmp_path: Path) -> None:
    named = Case("open", swaps=(('string_value: "1"', 'string_value: "0"'),))
    (told,) = lint(written(tmp_path, named), container=True)
    assert (told.severity, told.what.split(":")[0]) == ("warning", "intra_op_thread_count is left open")


@pytest.mark.parametrize("made", [False, True])
def test_what_is_no_repository_is_refused(made: bool, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    if made:
        folder.mkdir()
    with pytest.raises(RepositoryError):
        lint(folder)


def test_a_container_is_told_that_its_openvino_fills_batches_up(tmp_path: Path) -> None:
    more = parameter("ENABLE_BATCH_PADDING", "YES") + parameter("INFERENCE_NUM_THREADS", "1")
    models = written(tmp_path, Case("padded", swaps=(OPENVINO,), more=more))
    assert lint(models) == []
    (told,) = lint(models, container=True)
    assert (told.severity, "fills every batch up to max_batch_size, 8" in told.what) == ("warning", True)


LABELLED = """\
from typing import NamedTuple
import numpy as np
LABELS = ["a", "b", "c"]
class Answer(NamedTuple):
    label: str
def postprocess(logits: np.ndarray) -> Answer:
    return Answer(LABELS[int(logits.argmax())])
"""


def test_labels_that_are_fewer_than_the_classes_are_an_error(tmp_path: Path) -> None:
    """Each request of a later class failed with IndexError."""
    hooks = hook_file(tmp_path / "hooks", LABELLED)
    pack(tiny_artifact(tmp_path / "tiny"), repository=tmp_path / "models", name="tiny", hooks=hooks)
    (packed,) = (tmp_path / "models").rglob("hooks.py")
    assert not [each for each in lint(tmp_path / "models") if "labels" in each.what]
    packed.write_text(packed.read_text().replace(', "c"', ""))
    (found,) = [each for each in lint(tmp_path / "models") if "classes" in each.what]
    assert found.severity == "error"
    assert found.what == "1/hooks.py, line 7: LABELS has 2 labels, and the network's logits has 3 classes"

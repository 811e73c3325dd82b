"""Packing an artifact into a model repository, and reading one."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from compress.artifact import Artifact, Measured, StageReport
from compress.errors import ArtifactError, HookError, RepositoryError
from serve.config.model_config import ModelConfig, ModelTensorReshape
from serve.config.pbtxt import from_pbtxt, to_pbtxt
from serve.deploy.cluster.workload import workload_of
from serve.lint.run import lint
from serve.pack.options import SIZES, ZERO
from serve.pack.write import PackOptions, pack
from serve.repository.read import read_models
from serve.repository.served import serving
from serve.up.container import container_command
from serve.up.options import UpOptions
from tests.serve_models import hook_file, sum_artifact, tiny_artifact, unbatched_artifact

GOLDEN = Path(__file__).parents[3] / "golden"
POST_ONLY = "def postprocess(logits) -> int: return int(logits.argmax())\n"
PRE_ONLY = "import numpy as np\ndef preprocess(text: bytes): return np.zeros(4, np.float32)\n"


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return tiny_artifact(tmp_path / "artifact")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "site" / "models"


def config_of(repository: Path, name: str) -> ModelConfig:
    return from_pbtxt((repository / name / "config.pbtxt").read_text())


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("hooked", [False, True])
def test_the_configuration_is_the_one_we_agreed_on(
    tmp_path: Path, artifact: Path, repository: Path, hooked: bool
) -> None:
    packed = pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path) if hooked else None)
    texts = [(repository / name / "config.pbtxt").read_text() for name in packed.models]
    sha256 = Artifact.load(artifact).sha256
    golden = GOLDEN / ("tiny_with_hooks.pbtxt" if hooked else "tiny.pbtxt")
    assert "# ---\n".join(texts).replace(sha256, "SHA256") == golden.read_text()


def test_without_hooks_one_model_is_written(artifact: Path, repository: Path) -> None:
    packed = pack(artifact, repository=repository, name="tiny")
    assert packed.models == ("tiny",)
    assert [(tensor.name, tensor.data_type, tensor.dims) for tensor in packed.inputs] == [("x", "TYPE_FP32", (4,))]
    assert [tensor.name for tensor in packed.outputs] == ["logits"]
    assert (repository / "tiny/1/model.onnx").read_bytes() == (artifact / "model.onnx").read_bytes()
    assert sorted(tree(repository)) == [
        "tiny/.packed.pbtxt",
        "tiny/1/model.onnx",
        "tiny/1/provenance.json",
        "tiny/config.pbtxt",
    ]


@pytest.mark.parametrize(
    ("text", "models", "inputs", "outputs"),
    [
        (None, ["tiny_preprocess", "tiny_network", "tiny_postprocess"], ["text"], ["label", "score"]),
        (PRE_ONLY, ["tiny_preprocess", "tiny_network"], ["text"], ["logits"]),
        (POST_ONLY, ["tiny_network", "tiny_postprocess"], ["x"], ["result"]),
    ],
)
def test_hooks_make_an_ensemble_of_the_steps_that_there_are(
    tmp_path: Path,
    artifact: Path,
    repository: Path,
    text: str | None,
    models: list[str],
    inputs: list[str],
    outputs: list[str],
) -> None:
    hooks = hook_file(tmp_path) if text is None else hook_file(tmp_path, text)
    packed = pack(artifact, repository=repository, name="tiny", hooks=hooks)
    assert packed.models == ("tiny", *models)
    assert [tensor.name for tensor in packed.inputs] == inputs
    assert [tensor.name for tensor in packed.outputs] == outputs
    ensemble = config_of(repository, "tiny")
    assert ensemble.platform == "ensemble"
    assert not ensemble.instance_group
    assert not ensemble.model_warmup
    assert ensemble.ensemble_scheduling is not None
    assert [step.model_name for step in ensemble.ensemble_scheduling.step] == models
    for name in models:
        python = {"1/hook_values.py", "1/hooks.py", "1/model.py"}
        expected = {".packed.pbtxt", "1/provenance.json"} | ({"1/model.onnx"} if name == "tiny_network" else python)
        assert set(tree(repository / name)) == {"config.pbtxt", *expected}


def test_options_become_tritons_own_fields(artifact: Path, repository: Path) -> None:
    options = PackOptions(
        instances=3,
        threads=2,
        max_batch_size=8,
        max_queue_delay_microseconds=50,
        max_queue_size=9,
        queue_timeout_microseconds=700,
    )
    pack(artifact, repository=repository, name="tiny", options=options)
    config = config_of(repository, "tiny")
    assert config.instance_group[0].count == 3
    assert config.parameters["intra_op_thread_count"] == "2"
    assert config.max_batch_size == 8
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.max_queue_delay_microseconds == 50
    queue = config.dynamic_batching.default_queue_policy
    assert queue is not None
    assert (queue.max_queue_size, queue.default_timeout_microseconds, queue.allow_timeout_override) == (9, 700, True)
    assert [warmup.batch_size for warmup in config.model_warmup] == [1, 8]


@pytest.mark.parametrize(
    ("options", "flag", "why"),
    [
        *(({name: -1}, name, "or more") for name in (*SIZES, *ZERO)),
        ({"preferred_batch_size": (64,)}, "preferred-batch-size 64", "1 to 32"),
        ({"priority_levels": 2}, "priority-levels 2", "go together"),
        ({"priority_levels": 2, "default_priority_level": 3}, "default-priority-level 3", "2 levels"),
        ({"priority_levels": 2, "default_priority_level": 1, "preserve_ordering": True}, "preserve-ordering", "order"),
        ({"dynamic_batching": False, "max_queue_size": 3}, "max-queue-size 3", "which is off"),
        ({"gpus": (0,)}, "gpus 0", "--device gpu"),
        ({"accelerator": "cuda"}, "accelerator cuda", "--device gpu"),
        ({"device": "gpu", "precision": "fp16"}, "precision fp16", "--accelerator tensorrt"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], flag: str, why: str) -> None:
    with pytest.raises(RepositoryError, match=flag.replace("_", "-")) as caught:
        PackOptions(**options)
    assert why in caught.value.why


def test_a_varying_dimension_is_not_warmed_up_and_a_number_for_each_sample_is_reshaped(
    tmp_path: Path, repository: Path
) -> None:
    pack(sum_artifact(tmp_path / "sum"), repository=repository, name="sum")
    config = config_of(repository, "sum")
    assert not config.model_warmup
    assert [tensor.dims for tensor in config.input] == [(-1,), (-1,)]
    assert [(tensor.dims, tensor.reshape) for tensor in config.output] == [((1,), ModelTensorReshape())]


def test_a_network_without_a_batch_is_served_whole(tmp_path: Path, repository: Path) -> None:
    packed = pack(unbatched_artifact(tmp_path / "whole"), repository=repository, name="whole")
    config = config_of(repository, "whole")
    assert packed.max_batch_size == config.max_batch_size == 0
    assert config.dynamic_batching is None
    assert config.input[0].dims == (2, 2)


def test_packing_again_replaces_the_whole_set_and_leaves_others_alone(
    tmp_path: Path, artifact: Path, repository: Path
) -> None:
    pack(artifact, repository=repository, name="other")
    other = tree(repository / "other")
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    packed = pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path, PRE_ONLY))
    assert packed.removed == ("tiny_postprocess",)
    assert {path.name for path in repository.iterdir()} == {"other", "tiny", "tiny_network", "tiny_preprocess"}
    packed = pack(artifact, repository=repository, name="tiny")
    assert packed.removed == ("tiny_preprocess", "tiny_network")
    assert {path.name for path in repository.iterdir()} == {"other", "tiny"}
    assert tree(repository / "other") == other
    assert [path.name for path in repository.parent.iterdir()] == ["models"]


@pytest.mark.parametrize(
    ("share", "batch", "warned"), [(0.15, 32, True), (0.15, 1, False), (1e-6, 32, False), (None, 32, False)]
)
def test_answers_that_depend_on_their_batch_are_told(
    artifact: Path, repository: Path, share: float | None, batch: int, warned: bool
) -> None:
    row = StageReport("quantize_onnx", "", Measured(batch_difference=share), 0.0)
    dataclasses.replace(Artifact.load(artifact), stages=(row,)).save()
    packed = pack(artifact, repository=repository, name="tiny", options=PackOptions(max_batch_size=batch))
    assert ["15.0%" in text for text in packed.warnings] == [True] * warned


def test_what_pack_did_not_write_is_not_overwritten(tmp_path: Path, artifact: Path, repository: Path) -> None:
    theirs = repository / "tiny_network"
    theirs.mkdir(parents=True)
    (theirs / "config.pbtxt").write_text(to_pbtxt(ModelConfig("tiny_network", backend="python")))
    before = tree(repository)
    with pytest.raises(RepositoryError, match="tiny_network") as caught:
        pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    assert "was not written by" in caught.value.why
    assert tree(repository) == before
    pack(artifact, repository=repository, name="tiny")  # needs no tiny_network
    assert (theirs / "config.pbtxt").is_file()


def test_a_part_of_another_ensemble_is_not_overwritten(tmp_path: Path, artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    with pytest.raises(RepositoryError, match="can't replace") as caught:
        pack(artifact, repository=repository, name="tiny_network")
    assert "part of the model 'tiny'" in caught.value.why


def test_a_pack_that_fails_leaves_the_repository_as_it_was(tmp_path: Path, artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    before = tree(repository)
    with pytest.raises(HookError):
        pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path, "1 / 0"))
    (artifact / "model.onnx").write_bytes(b"changed")
    with pytest.raises(ArtifactError):
        pack(artifact, repository=repository, name="tiny")
    assert tree(repository) == before
    assert [path.name for path in repository.parent.iterdir()] == ["models"]


def test_a_rename_that_fails_midway_is_rolled_back(
    tmp_path: Path, artifact: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    before = tree(repository)
    rename = Path.rename

    def full(self: Path, target: Path) -> Path:
        if self.name == "tiny_network" and self.parent.name == "new":
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(RepositoryError, match="can't write into") as caught:
        pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path, PRE_ONLY))
    assert "No space left" in caught.value.why
    assert tree(repository) == before
    assert [path.name for path in repository.parent.iterdir()] == ["models"]


@pytest.mark.parametrize("name", ["", "stats", "a b", "../up", "a/b", "-x", "é", "a.b", "x" * 101])
def test_a_name_that_triton_or_a_path_can_trip_over_is_refused(artifact: Path, repository: Path, name: str) -> None:
    with pytest.raises(RepositoryError, match="can't name a model"):
        pack(artifact, repository=repository, name=name)
    assert not repository.exists()


def test_a_repository_that_is_a_file_is_refused(artifact: Path, repository: Path) -> None:
    repository.parent.mkdir()
    repository.write_text("")
    with pytest.raises(RepositoryError, match="can't write into"):
        pack(artifact, repository=repository, name="tiny")


def test_another_format_is_refused(artifact: Path, repository: Path) -> None:
    dataclasses.replace(Artifact.load(artifact), format="saved_model").save()
    with pytest.raises(ArtifactError) as caught:
        pack(artifact, repository=repository, name="tiny")
    assert "'saved_model'" in caught.value.why
    assert not list(repository.glob("*"))


def test_a_repository_is_read(tmp_path: Path, artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny", hooks=hook_file(tmp_path))
    shutil.copytree(repository / "tiny_network/1", repository / "tiny_network/12")
    (repository / ".git").mkdir()
    (repository / "README.md").touch()
    models = read_models(repository)
    assert [(model.name, model.versions) for model in models] == [
        ("tiny", (1,)),
        ("tiny_network", (1, 12)),
        ("tiny_postprocess", (1,)),
        ("tiny_preprocess", (1,)),
    ]
    assert models[1].config.backend == "onnxruntime"


@pytest.mark.parametrize(
    ("remove", "why"),
    [
        (".", "there is no such folder"),
        ("tiny", "has no model folder"),
        ("tiny/config.pbtxt", "there is no config.pbtxt"),
        ("tiny/1", "no folder such as 1/"),
    ],
)
def test_a_repository_that_triton_could_not_serve_is_refused(
    artifact: Path, repository: Path, remove: str, why: str
) -> None:
    pack(artifact, repository=repository, name="tiny")
    path = repository / remove
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(RepositoryError) as caught:
        read_models(repository)
    assert why in caught.value.why
    assert "serve pack" in caught.value.mend


@pytest.mark.parametrize("text", ['name: "other"', "nonsense: 3"])
def test_a_configuration_that_triton_would_refuse_is_refused(artifact: Path, repository: Path, text: str) -> None:
    pack(artifact, repository=repository, name="tiny")
    (repository / "tiny/config.pbtxt").write_text(text)
    with pytest.raises(RepositoryError, match="tiny"):
        read_models(repository)


def test_the_packed_network_is_the_artifacts(artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="tiny")
    assert config_of(repository, "tiny").parameters["model_sha256"] == Artifact.load(artifact).sha256


def test_the_shipped_repository_is_what_pack_would_write_today(tmp_path: Path) -> None:
    root = Path(__file__).parents[4]
    shipped, hooks = root / "model_repository", root / "examples" / "digits" / "hooks.py"
    pack(shipped / "digits_network/1/model.onnx", repository=tmp_path / "models", name="digits", hooks=hooks)
    # What compression did is told by its artifact, which is not shipped.
    told = "digits_network/1/provenance.json"
    anew = tree(tmp_path / "models")
    there = {name: content for name, content in tree(shipped).items() if "__pycache__" not in name}
    assert json.loads(anew.pop(told))["files"] == json.loads(there.pop(told))["files"]
    assert anew == there


@pytest.mark.parametrize(
    "name", ["a b", "a$(x)", "a`x`", "a;b", "a&b", "größe", "-x", "a'b", 'a"b', "a\nb", "~a", "a*"]
)
def test_a_model_whose_name_a_shell_would_read_is_refused(artifact: Path, repository: Path, name: str) -> None:
    pack(artifact, repository=repository, name="net")
    (repository / "net").rename(repository / name)
    config = repository / name / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "net"\n', "", 1))
    with pytest.raises(RepositoryError, match="a line for a shell"):
        read_models(repository)
    assert any("a line for a shell" in finding.what for finding in lint(repository))


@pytest.mark.parametrize(
    "text",
    [
        'default_model_filename: "model.onnx;touch x"',
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/a b/env.tar.gz" } }',
        'parameters { key: "EXECUTION_ENV_PATH" value { string_value: "$$TRITON_MODEL_DIRECTORY/$(touch x)" } }',
        'instance_group { name: "$(touch x)" count: 1 kind: KIND_CPU }',
    ],
)
def test_a_configuration_with_words_for_a_shell_is_refused(artifact: Path, repository: Path, text: str) -> None:
    pack(artifact, repository=repository, name="net")
    config = repository / "net" / "config.pbtxt"
    config.write_text(config.read_text() + text)
    with pytest.raises(RepositoryError, match="a line for a shell"):
        read_models(repository)


def test_words_for_a_shell_that_come_after_the_start_are_not_loaded(artifact: Path, repository: Path) -> None:
    for name in ("net", "other"):
        pack(artifact, repository=repository, name=name)
    with serving(repository, None) as served:
        config = repository / "net" / "config.pbtxt"
        config.write_text(config.read_text() + 'instance_group { name: "$(touch x)" count: 1 kind: KIND_CPU }')
        for models in (("net",), None):
            with pytest.raises(RepositoryError, match="a line for a shell"):
                served.renew(models)
        served.renew(("other",))


def test_a_folder_with_a_dot_in_front_goes_into_no_container(artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="net")
    (repository / ".git").mkdir()
    here, there = (
        [finding.severity for finding in lint(repository, container=container) if finding.model == ".git"]
        for container in (False, True)
    )
    assert (here, there) == (["warning"], ["error"])
    with pytest.raises(RepositoryError, match=r"\.git"):
        container_command(repository, read_models(repository), UpOptions())
    with pytest.raises(RepositoryError, match=r"\.git"):
        workload_of(repository)


def test_an_environment_in_the_models_own_folder_is_served(artifact: Path, repository: Path) -> None:
    pack(artifact, repository=repository, name="net")
    config = repository / "net" / "config.pbtxt"
    path = "$$TRITON_MODEL_DIRECTORY/env.tar.gz"
    config.write_text(
        config.read_text() + f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
    )
    assert [model.name for model in read_models(repository)] == ["net"]

"""A plan with engine.json beside it, packed: bounds, profiles, warm-ups and pinned memory as its engine has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compress.artifact import Artifact, Signature, TensorSpec, sha256_of
from compress.errors import RepositoryError
from serve.config.model_config import ModelConfig
from serve.config.pbtxt import from_pbtxt
from serve.lint.run import lint
from serve.pack.network_config import network_config
from serve.pack.options import PackOptions
from serve.pack.write import pack
from tests.serve_models import plan_of, tiny_artifact

IMAGE = Signature((TensorSpec("x", "float32", ("batch", 3, 8, 8)),), (TensorSpec("y", "float32", ("batch", 5)),))
TEXT = Signature((TensorSpec("t", "int64", ("batch", "seq")),), (TensorSpec("y", "float32", ("batch", "seq", 5)),))
FIXED = Signature((TensorSpec("x", "float32", (1, 4)),), (TensorSpec("y", "float32", (1, 2)),))


def artifact(folder: Path, signature: Signature, profiles: Any) -> Path:
    folder.mkdir()
    (folder / "model.plan").write_bytes(plan_of(10, 5, 0, 18))
    Artifact(folder, "model.plan", "plan", sha256_of(folder / "model.plan"), signature).save()
    (folder / "engine.json").write_text(json.dumps({"tensorrt": "10.5", "profiles": profiles}))
    return folder


def image(*best: int, largest: int = 16) -> list[dict[str, list[list[int]]]]:
    return [{"x": [[1, 3, 8, 8], [size, 3, 8, 8], [largest, 3, 8, 8]]} for size in best]


def packed(source: Path, tmp_path: Path, **options: Any) -> ModelConfig:
    pack(source, repository=tmp_path / "models", name="net", options=PackOptions(**options))
    return from_pbtxt((tmp_path / "models/net/config.pbtxt").read_text())


def test_an_engine_is_served_no_larger_batch_than_it_takes_and_on_gpus(tmp_path: Path) -> None:
    config = packed(artifact(tmp_path / "a", IMAGE, image(8, largest=16)), tmp_path)
    assert config.max_batch_size == 16
    group = config.instance_group[0]
    assert (group.kind, group.profile) == ("KIND_GPU", ()), "with one profile there is nothing to name"
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_size == ()
    assert [(w.name, w.batch_size) for w in config.model_warmup] == [
        ("profile_0_smallest", 1), ("profile_0_best", 8), ("profile_0_largest", 16),
    ]  # fmt: skip
    assert config.optimization is not None
    assert config.optimization.input_pinned_memory is not None
    assert config.optimization.input_pinned_memory.enable
    assert not [found for found in lint(tmp_path / "models", container=True) if found.severity == "error"]


def test_each_instance_gets_all_profiles_and_batches_are_made_as_large_as_they_are_tuned_for(tmp_path: Path) -> None:
    config = packed(artifact(tmp_path / "a", IMAGE, image(1, 8, 16)), tmp_path, instances=1)
    assert config.instance_group[0].profile == ("0", "1", "2")
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_size == (8, 16)
    assert sorted(warmup.batch_size for warmup in config.model_warmup) == [1, 8, 16]


def test_profiles_can_be_chosen(tmp_path: Path) -> None:
    source = artifact(tmp_path / "a", IMAGE, image(1, 8, 16))
    config = packed(source, tmp_path, profiles=(0, 1), max_batch_size=4, dynamic_batching=False)
    assert config.instance_group[0].profile == ("0", "1")
    assert config.max_batch_size == 4, "a smaller one than the engine's is kept"
    assert [warmup.batch_size for warmup in config.model_warmup] == [1]


def test_a_dimension_that_varies_is_warmed_at_the_profiles_sizes(tmp_path: Path) -> None:
    profiles = [{"t": [[1, 1], [4, 16], [8, 64]]}]
    config = packed(artifact(tmp_path / "a", TEXT, profiles), tmp_path, pinned_memory=False)
    assert [(w.batch_size, w.inputs["t"].dims) for w in config.model_warmup] == [(1, (1,)), (4, (16,)), (8, (64,))]
    assert config.optimization is not None
    assert config.optimization.output_pinned_memory is not None
    assert not config.optimization.output_pinned_memory.enable


def test_an_engine_of_fixed_shapes_is_warmed_once(tmp_path: Path) -> None:
    config = packed(artifact(tmp_path / "a", FIXED, []), tmp_path)
    assert config.max_batch_size == 0
    assert [warmup.batch_size for warmup in config.model_warmup] == [1]


def test_profiles_that_are_not_there_are_told(tmp_path: Path) -> None:
    source = artifact(tmp_path / "a", IMAGE, image(1, 8))
    with pytest.raises(RepositoryError, match="can't use profile 2"):
        packed(source, tmp_path, profiles=(2,))
    with pytest.raises(RepositoryError, match="can't use profiles 0"):
        packed(tiny_artifact(tmp_path / "tiny"), tmp_path, profiles=(0,))
    (source / "engine.json").write_text('{"profiles": [{"x": [1, 2]}]}')
    with pytest.raises(RepositoryError, match="damaged"):
        packed(source, tmp_path)
    assert not (tmp_path / "models/net").exists()


@pytest.mark.parametrize(
    ("options", "name", "parameters"),
    [
        ({"accelerator": "cuda", "gpus": (0, 1)}, "cuda", {}),
        ({"accelerator": "tensorrt", "precision": "fp16", "engine_cache": "/cache"}, "tensorrt",
         {"precision_mode": "FP16", "trt_engine_cache_enable": "1", "trt_engine_cache_path": "/cache"}),
    ],
)  # fmt: skip
def test_an_onnx_file_on_gpus_names_its_accelerator(
    options: dict[str, Any], name: str, parameters: dict[str, str], tmp_path: Path
) -> None:
    config = packed(tiny_artifact(tmp_path / "tiny"), tmp_path, device="gpu", cuda_graphs=True, **options)
    assert config.optimization is not None
    assert config.optimization.execution_accelerators is not None
    (used,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert (used.name, dict(used.parameters)) == (name, parameters)
    assert config.optimization.cuda is not None
    assert config.optimization.input_pinned_memory is not None
    assert config.instance_group[0].gpus == options.get("gpus", ())


@pytest.mark.parametrize(("sizes", "warmed"), [({}, []), ({"seq": 48}, [("batch_1", 1, (48,)), ("batch_8", 8, (48,))])])
def test_a_network_is_warmed_at_the_size_that_its_artifact_says_and_at_no_size_that_nobody_said(
    sizes: dict[str, int], warmed: list[Any]
) -> None:
    signature = Signature(TEXT.inputs, TEXT.outputs, sizes)
    config = network_config("net", signature, options=PackOptions(max_batch_size=8), parameters={})
    assert [(w.name, w.batch_size, w.inputs["t"].dims) for w in config.model_warmup] == warmed

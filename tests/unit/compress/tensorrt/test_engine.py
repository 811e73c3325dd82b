"""Engines, built and run against a double made strictly of TensorRT's published names; no real TensorRT is at hand."""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

import compress
from compress.artifact import Artifact, Signature, TensorSpec, sha256_of
from compress.errors import ArtifactError, MissingExtraError, RecipeError, StageError, ToolkitError
from compress.model import EngineModel, OnnxModel, sample_inputs
from compress.options import EngineOptions, ExportOptions
from compress.runtime.backends import OnnxBackend, open_model
from compress.tensorrt.build import BuildError, BuildOptions, build
from compress.tensorrt.engine_from_onnx import EngineFromOnnx
from compress.tensorrt.layers import precision_of, precisions_of
from compress.tensorrt.profiles import profiles_for
from compress.tensorrt.script import write_script
from tests.families import family
from tests.tensorrt_double import Double, listing
from tests.unit.compress.prune.test_prune_channels import quiet

ROOT = Path(__file__).parents[4]
SIGNATURE = Signature((TensorSpec("x", "float32", ("batch", 4)),), (TensorSpec("y", "float32", ("batch", 2)),))


@pytest.fixture
def trt(monkeypatch: pytest.MonkeyPatch) -> Double:
    """The double as the module `tensorrt`; tensors stay in main memory, where it computes."""
    double = Double()
    monkeypatch.setitem(sys.modules, "tensorrt", double)
    for module in ("compress.runtime.backends.trt", "compress.tensorrt.engine_from_onnx"):
        monkeypatch.setattr(f"{module}.accelerator", lambda: torch.device("cpu"))
    return double


@pytest.fixture
def source(tmp_path: Path) -> OnnxModel:
    """y = x @ w, any batch."""
    weight = np.random.default_rng(0).standard_normal((4, 2)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="product")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return OnnxModel(path, SIGNATURE)


def profiles(largest: int = 8, *best: int) -> Any:
    return profiles_for(SIGNATURE, largest, best, ())


def test_every_name_of_tensorrt_in_the_code_is_a_published_one() -> None:
    """Attributes of the module, read off the source; the double sees to methods and their arguments."""
    enums, methods, values = listing()
    known = {name: set(members) for name, members in enums.items()}
    classes = set(methods) | set(known) | {"__version__"}
    found = set()
    for path in (
        "tensorrt/build.py",
        "tensorrt/run_script.py",
        "runtime/backends/trt.py",
        "tensorrt/engine_from_onnx.py",
    ):
        for node in ast.walk(ast.parse((ROOT / "compress" / path).read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value)
            if owner in ("trt", "self._trt", "tensorrt_module()"):
                assert node.attr in classes, f"{path}: tensorrt.{node.attr}"
                found.add(node.attr)
            elif "(" not in owner and owner.rpartition(".")[0] in ("trt", "self._trt"):
                kind = owner.rpartition(".")[2]
                assert node.attr in known.get(kind, set()) | set(methods.get(kind, ())) | values.get(kind, set())
    assert {"Builder", "OnnxParser", "Runtime", "NetworkDefinitionCreationFlag", "SerializationFlag"} <= found


def test_the_double_knows_no_name_and_no_argument_that_is_not_published() -> None:
    double: Any = Double()
    config = double.Builder(double.Logger(double.Logger.WARNING)).create_builder_config()
    for use in (
        lambda: config.set_flag(double.BuilderFlag.FP16),
        lambda: config.max_workspace_size,
        lambda: setattr(config, "int8_calibrator", None),
        lambda: double.IInt8Calibrator,
    ):
        with pytest.raises(AttributeError):
            use()
    with pytest.raises(TypeError):
        config.set_flag()


@pytest.mark.parametrize(("version", "renumbered"), [("11.4.0.106", False), ("10.16.0.1", True)])
def test_an_engine_is_built_of_types_in_the_graph_whatever_the_flags_number(
    source: OnnxModel, tmp_path: Path, version: str, renumbered: bool
) -> None:
    double = Double(version, renumbered=renumbered)
    told = build(double, source.path, tmp_path / "model.plan", BuildOptions(profiles=profiles()))
    assert told["tensorrt"] == version
    assert told["profiles"] == [{"x": [[1, 4], [8, 4], [8, 4]]}]
    assert told["inputs"] == {"x": {"dtype": "FLOAT", "shape": [-1, 4]}}
    assert told["outputs"] == {"y": {"dtype": "FLOAT", "shape": [-1, 2]}}
    assert [layer["Name"] for layer in told["layers"]] == ["product"]
    assert double.state["profiling_verbosity"].name == "DETAILED", "or the inspector tells no types"
    assert (tmp_path / "model.plan").exists()
    assert not list(tmp_path.glob("*.part"))


def test_options_reach_the_builder(source: OnnxModel, tmp_path: Path) -> None:
    double = Double()
    options = BuildOptions(
        profiles(), optimization_level=5, workspace_bytes=123, version_compatible=True,
        hardware_compatibility="ampere-plus", refit=True, strip_weights=True,
    )  # fmt: skip
    build(double, source.path, tmp_path / "model.plan", options)
    assert double.state["flags"] == ["VERSION_COMPATIBLE", "REFIT"]
    assert double.state["WORKSPACE"] == 123
    assert double.state["builder_optimization_level"] == 5
    assert double.state["hardware_compatibility_level"].name == "AMPERE_PLUS"
    assert (tmp_path / "model.plan.stripped").read_bytes() == b"stripped"
    again = Double()
    build(again, source.path, tmp_path / "model.plan", BuildOptions(profiles(), strip_weights=True))
    assert again.state["flags"] == ["REFIT_IDENTICAL"]


def test_the_timing_cache_is_kept_and_one_of_another_gpu_is_a_warning_and_a_rebuild(
    source: OnnxModel, tmp_path: Path
) -> None:
    cache = tmp_path / "timing.cache"
    options = BuildOptions(profiles(), timing_cache=cache)
    first = build(Double(), source.path, tmp_path / "model.plan", options)
    kept = cache.read_bytes()
    second = build(Double(), source.path, tmp_path / "model.plan", options)
    assert first["warnings"] == second["warnings"] == []
    other = Double()
    other.gpu = "b"
    third = build(other, source.path, tmp_path / "model.plan", options)
    assert "another TensorRT or GPU" in third["warnings"][0]
    assert cache.read_bytes() != kept


def test_progress_is_of_the_outermost_phase_and_ctrl_c_ends_the_build(source: OnnxModel, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    build(Double(), source.path, tmp_path / "model.plan", BuildOptions(profiles()), lambda *step: seen.append(step))
    assert [step for step in seen if step[0] == "Building Engine"][-1] == ("Building Engine", 2, 2)
    assert {name for name, _, _ in seen} == {"Building Engine"}

    (tmp_path / "model.plan").write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        build(Double(), source.path, tmp_path / "model.plan", BuildOptions(profiles()), lambda *_: _raise())
    assert (tmp_path / "model.plan").read_bytes() == b"old"


def _raise() -> None:
    raise KeyboardInterrupt


def test_what_the_parser_refuses_is_told_by_node(tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="the_det")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    with pytest.raises(BuildError) as caught:
        build(Double(), tmp_path / "m.onnx", tmp_path / "model.plan", BuildOptions())
    assert "Det the_det: operator is not supported" in caught.value.why
    assert "compress lint" in caught.value.mend


def test_no_engine_or_a_profile_that_makes_no_sense_is_an_error(source: OnnxModel, tmp_path: Path) -> None:
    double = Double()
    double.fail.add("build")
    with pytest.raises(BuildError, match="can't build an engine"):
        build(double, source.path, tmp_path / "p", BuildOptions(profiles()))
    upside: Any = ({"x": ((8, 4), (4, 4), (1, 4))},)
    with pytest.raises(BuildError, match="refuses profile 0"):
        build(Double(), source.path, tmp_path / "p", BuildOptions(upside))
    with pytest.raises(BuildError, match="can't build an engine"):
        build(Double(), source.path, tmp_path / "p", BuildOptions())
    assert not (tmp_path / "p").exists()


TWO = Signature((TensorSpec("t", "int64", ("batch", "seq")),), (TensorSpec("y", "float32", ("batch", 2)),))
FIXED = Signature((TensorSpec("x", "float32", (1, 4)),), (TensorSpec("y", "float32", (1, 2)),))


def test_profiles_go_from_one_to_the_largest_batch_and_over_each_named_dimension() -> None:
    assert profiles(8) == ({"x": ((1, 4), (8, 4), (8, 4))},)
    assert [found["x"][1] for found in profiles(8, 1, 4)] == [(1, 4), (4, 4)]
    assert profiles_for(TWO, 4, (), ["seq=1:16:64"]) == ({"t": ((1, 1), (4, 16), (4, 64))},)
    assert profiles_for(FIXED, 8, (), ()) == ()


@pytest.mark.parametrize(
    ("signature", "largest", "best", "dims", "says"),
    [
        (TWO, 4, (), [], "seq varies"),
        (TWO, 4, (), ["seq=9:4:1"], "can't read the range"),
        (TWO, 4, (), ["seq=x"], "can't read the range"),
        (TWO, 4, (), ["seq=1:2:3", "width=1:2:3"], "can't give width a range"),
        (SIGNATURE, 4, (5,), [], "from 1 to --max-batch-size 4"),
        (SIGNATURE, 0, (), [], "from 1 to --max-batch-size 0"),
    ],
)
def test_profiles_that_can_t_be(
    signature: Signature, largest: int, best: tuple[int, ...], dims: list[str], says: str
) -> None:
    with pytest.raises(RecipeError) as caught:
        profiles_for(signature, largest, best, dims)
    assert says in str(caught.value)


def engine(source: OnnxModel, folder: Path, **options: Any) -> tuple[EngineModel, Any]:
    folder.mkdir()
    given = EngineFromOnnx(EngineOptions(**options)).run(source, folder, quiet)
    assert isinstance(given.model, EngineModel)
    return given.model, given


def test_an_engine_answers_as_its_file_does_at_every_batch(trt: Double, source: OnnxModel, tmp_path: Path) -> None:
    model, given = engine(source, tmp_path / "engine", max_batch_size=8)
    backend = open_model(model, threads=1)
    for batch in (1, 3, 8, 21):
        inputs = sample_inputs(SIGNATURE, batch, seed=batch)
        expected = OnnxBackend(source, 1).infer(inputs)["y"]
        np.testing.assert_allclose(backend.infer(inputs)["y"], expected, rtol=1e-5)
    assert backend.runtime == "TensorRT 11.4.0.106"
    assert given.details["device_p50_ms"] > 0
    assert given.details["precisions"] == {"FP32": 1}
    assert model.onnx.path.read_bytes() == source.path.read_bytes()
    assert json.loads((model.path.parent / "engine.json").read_text())["profiles"]
    assert "IExecutionContext.execute_async_v3" in trt.calls


def test_an_engine_for_later_releases_may_run_its_own_code_and_no_other_may(
    trt: Double, source: OnnxModel, tmp_path: Path
) -> None:
    model, _ = engine(source, tmp_path / "engine", max_batch_size=4, version_compatible=True)
    open_model(model, threads=1).infer(sample_inputs(SIGNATURE, 2))
    assert trt.state["engine_host_code_allowed"] is True
    told = json.loads(model.path.with_name("engine.json").read_text())
    others: list[Any] = [told | {"version_compatible": False}, told | {"version_compatible": "yes"}, [], None]
    for other in others:
        model.path.with_name("engine.json").write_text(json.dumps(other))
        with pytest.raises(StageError, match="can't load"):
            open_model(model, threads=1)
        assert trt.state["engine_host_code_allowed"] is False


def test_the_profile_tuned_nearest_is_taken(trt: Double, source: OnnxModel, tmp_path: Path) -> None:
    model, _ = engine(source, tmp_path / "engine", max_batch_size=32, opt_batch_size=(1, 16))
    backend = open_model(model, threads=1)
    backend.infer(sample_inputs(SIGNATURE, 12))
    assert trt.state["profile"] == 1
    backend.infer(sample_inputs(SIGNATURE, 2))
    assert trt.state["profile"] == 0


def test_what_an_engine_can_t_do_is_told(trt: Double, source: OnnxModel, tmp_path: Path) -> None:
    model, _ = engine(source, tmp_path / "engine", max_batch_size=4)
    backend = open_model(model, threads=1)
    with pytest.raises(StageError, match="takes no inputs"):
        backend.infer({"x": np.zeros((2, 5), np.float32)})
    trt.fail.add("execute")
    with pytest.raises(StageError, match="does not run"):
        backend.infer(sample_inputs(SIGNATURE, 2))
    trt.gpu = "b"
    with pytest.raises(StageError, match="can't load"):
        open_model(model, threads=1)


def test_without_tensorrt_the_error_names_the_script_that_builds_elsewhere(tmp_path: Path) -> None:
    module, inputs = family("residual")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    options = ExportOptions(output=tmp_path / "out", to="tensorrt", target="tensorrt")
    with pytest.raises(RecipeError) as caught:
        compress.export(tmp_path / "model.pt", options)
    assert "tensorrt" in caught.value.why
    assert "engine-script" in caught.value.mend
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="can't build a TensorRT engine"):
        compress.export(tmp_path / "model.pt", ExportOptions(output=tmp_path / "out", to="tensorrt"))
    with pytest.raises(MissingExtraError):
        open_model(EngineModel(tmp_path / "model.plan", SIGNATURE), threads=1)


def test_a_model_goes_all_the_way_to_an_engine_that_is_judged_itself(trt: Double, tmp_path: Path) -> None:
    module, inputs = family("residual")
    compress.save(module, tmp_path / "model.pt", inputs=inputs)
    images = np.random.default_rng(0).standard_normal((24, 3, 16, 16)).astype(np.float32)
    np.savez(tmp_path / "data.npz", **{inputs[0].partition(":")[0]: images})  # type: ignore[arg-type]
    options = ExportOptions(
        output=tmp_path / "out", to="tensorrt", target="tensorrt", int8="static", calibration="data.npz",
        eval="data.npz", max_batch_size=16,
    )  # fmt: skip
    artifact, report = compress.export(tmp_path / "model.pt", options)
    row = report.stages[-1]
    assert row.stage == "engine_from_onnx"
    assert row.measured.runtime == "TensorRT 11.4.0.106"
    assert row.measured.cosine_similarity is not None
    assert row.measured.cosine_similarity > 0.97
    assert row.measured.macs == report.stages[1].measured.macs
    assert artifact.format == "plan"
    assert sha256_of(artifact.folder / "model.plan") == Artifact.load(artifact.folder).sha256
    assert {"model.plan", "model.onnx", "engine.json"} <= {path.name for path in artifact.folder.iterdir()}
    page = (artifact.folder / "report.html").read_text(encoding="utf-8")
    assert "TensorRT 11.4.0.106" in page
    again, _ = compress.export(tmp_path / "model.pt", options)
    assert trt.calls.count("Builder.build_serialized_network") == 1, "it was kept from before"
    assert again.sha256 == artifact.sha256


def test_a_file_that_tensorrt_would_refuse_is_not_given_to_it(trt: Double, tmp_path: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Det", ["x"], ["y"], name="det")], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch"])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]), tmp_path / "m.onnx")
    with pytest.raises(StageError, match="TensorRT would refuse"):
        EngineFromOnnx(EngineOptions()).run(OnnxModel(tmp_path / "m.onnx", SIGNATURE), tmp_path, quiet)
    assert not trt.calls


@pytest.mark.parametrize(
    ("layer", "precision"),
    [
        ({"Name": "a", "Outputs": [{"Format/Datatype": "Row major linear FP16 format"}]}, "FP16"),
        ({"Name": "a", "Inputs": [{"Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}],
          "Outputs": [{"Format/Datatype": "Row major linear FP32"}]}, "INT8"),
        ({"Name": "a", "Outputs": [{"Format/Datatype": "BFloat16"}]}, "BF16"),
        ({"Name": "a", "Outputs": [{"Format/Datatype": "Int32"}]}, "INT32"),
        ({"Name": "a"}, "?"),
        ("a", "?"),
    ],
)  # fmt: skip
def test_a_layers_precision_is_read_off_the_inspectors_formats(layer: Any, precision: str) -> None:
    assert precision_of(layer)["precision"] == precision
    assert precisions_of([layer]) == {precision: 1}


@pytest.fixture
def artifact(source: OnnxModel, tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(source.path.read_bytes())
    Artifact(folder, "model.onnx", "onnx", sha256_of(source.path), SIGNATURE).save()
    return folder


DOUBLE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from tests.tensorrt_double import Double
sys.modules[__name__] = Double()
"""


def run_script(script: Path, *arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(script.parent), "PATH": f"{path}:{os.environ['PATH']}"}
    call = [sys.executable, script.name, *arguments]
    return subprocess.run(call, cwd=script.parent, capture_output=True, text=True, env=environment, check=False)


def test_the_script_builds_where_tensorrt_is_and_what_it_writes_is_an_artifact(artifact: Path, tmp_path: Path) -> None:
    script = tmp_path / "build_engine.py"
    write_script(artifact, EngineOptions(max_batch_size=4, timing_cache=Path("timing.cache")), script)
    assert "compress" not in {line.split()[1].split(".")[0] for line in script.read_text().splitlines()
                              if line.startswith(("import ", "from "))}, "standard library alone"  # fmt: skip
    (tmp_path / "tensorrt.py").write_text(DOUBLE)
    done = run_script(script, "artifact", "engine")
    assert done.returncode == 0, done.stderr
    assert "TensorRT 11.4.0.106: 1 layers" in done.stdout
    found = Artifact.load(tmp_path / "engine")
    assert (found.format, found.signature) == ("plan", SIGNATURE)
    assert json.loads((tmp_path / "engine/engine.json").read_text())["profiles"] == [{"x": [[1, 4], [4, 4], [4, 4]]}]
    assert (tmp_path / "timing.cache").exists()
    again = run_script(script, "artifact", "engine")
    assert again.returncode == 2
    assert "won't replace engine" in again.stderr


TRTEXEC = """#!/bin/sh
printf '%s\\n' "$@" > "$(dirname "$0")/arguments.txt"
for word in "$@"; do case $word in
  --saveEngine=*) echo plan > "${word#*=}";;
  --exportLayerInfo=*) echo '{"Layers": [{"Name": "a"}]}' > "${word#*=}";;
esac; done
echo "[I] TensorRT version: 10.9.0"
"""


def test_without_its_python_package_the_script_asks_trtexec_for_the_same(artifact: Path, tmp_path: Path) -> None:
    script = tmp_path / "build_engine.py"
    options = EngineOptions(
        max_batch_size=4, opt_batch_size=(1, 4), optimization_level=2, workspace_mb=1, version_compatible=True,
        hardware_compatibility="ampere-plus",
    )  # fmt: skip
    write_script(artifact, options, script)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/trtexec"
    program.write_text(TRTEXEC)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    done = run_script(script, "artifact", "engine", path=str(program.parent))
    assert done.returncode == 0, done.stderr
    words = (tmp_path / "bin/arguments.txt").read_text().splitlines()
    for wanted in (
        "--stronglyTyped", "--profile=1", "--minShapes=x:1x4", "--optShapes=x:4x4", "--maxShapes=x:4x4",
        "--builderOptimizationLevel=2", "--memPoolSize=workspace:1000000B", "--versionCompatible",
        "--hardwareCompatibilityLevel=ampere+",
    ):  # fmt: skip
        assert wanted in words
    told = json.loads((tmp_path / "engine/engine.json").read_text())
    assert (told["tensorrt"], len(told["layers"]), len(told["profiles"])) == ("10.9.0", 1, 2)
    assert Artifact.load(tmp_path / "engine").format == "plan"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace("{", '{"format": "onnx", ', 1), "has the key 'format' twice"),
        (lambda text: text.replace('"inputs"', '"outputs": [], "inputs"', 1), "has the key 'outputs' twice"),
        (lambda text: text[:-9], "is damaged"),
        (lambda text: f"[{text}]", "no table"),
        (None, "can't be read: No such file"),
    ],
    ids=["a key twice", "inside", "cut", "a list", "none"],
)
def test_the_script_builds_from_no_artifact_json_that_can_be_read_in_two_ways(
    artifact: Path, tmp_path: Path, change: Any, why: str
) -> None:
    script = tmp_path / "build_engine.py"
    write_script(artifact, EngineOptions(), script)
    (tmp_path / "tensorrt.py").write_text(DOUBLE)
    said = artifact / "artifact.json"
    if change is None:
        said.unlink()
    else:
        said.write_text(change(said.read_text()))
    done = run_script(script, "artifact", "engine")
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 3
    assert not (tmp_path / "engine").exists()


def test_the_script_says_what_is_missing_and_leaves_nothing(artifact: Path, tmp_path: Path) -> None:
    script = tmp_path / "build_engine.py"
    write_script(artifact, EngineOptions(), script)
    missing = run_script(script, "artifact", "engine")
    assert missing.returncode == 2
    assert "neither TensorRT's Python package nor trtexec" in missing.stderr
    (tmp_path / "artifact/model.onnx").write_bytes(b"other")
    other = run_script(script, "artifact", "engine")
    assert "another file than this script was written for" in other.stderr
    assert "usage" in run_script(script).stderr
    assert not list(tmp_path.glob("engine*"))
    assert "Traceback" not in missing.stderr + other.stderr


def test_a_script_is_for_an_onnx_artifact_with_bounds(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        write_script(tmp_path, EngineOptions(), tmp_path / "s.py")
    with pytest.raises(RecipeError, match="timing cache"):
        write_script(artifact, EngineOptions(timing_cache=Path("/x")), tmp_path / "s.py")
    plan = tmp_path / "plan"
    plan.mkdir()
    (plan / "model.plan").write_bytes(b"x")
    Artifact(plan, "model.plan", "plan", sha256_of(plan / "model.plan"), SIGNATURE).save()
    with pytest.raises(ToolkitError, match="can't build an engine"):
        write_script(plan, EngineOptions(), tmp_path / "s.py")
    assert not (tmp_path / "s.py").exists()


def test_the_command_writes_it(artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from compress.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["engine-script", str(artifact), "-o", str(tmp_path / "s.py"), "--max-batch-size", "2"])
    assert not ended.value.code
    assert "run it as" in capsys.readouterr().out
    assert "(2, 4)" in (tmp_path / "s.py").read_text()


def test_a_stages_options_hold_the_release_so_that_another_builds_anew(trt: Double) -> None:
    before = dict(EngineFromOnnx(EngineOptions()).options)
    trt.__version__ = "12.0"
    assert dict(EngineFromOnnx(EngineOptions()).options) != before

"""`compress measure`: on the CPU for real; on a GPU, what can be told without one (the rest is in tests/gpu)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch

import compress
from compress.artifact import Artifact, sha256_of
from compress.cli import main
from compress.errors import RecipeError, StageError, ToolkitError
from compress.formats.onnx.read import signature_of_onnx
from compress.jobs.branch import Silent
from compress.jobs.measure import measure_files
from compress.jobs.measure_report import measure_table
from compress.jobs.measured_models import backends_of, opened
from compress.model import OnnxModel, sample_inputs
from compress.options import ExportOptions, MeasureOptions
from compress.runtime.backends import OnnxBackend, open_model
from compress.runtime.backends import onnxrt_device as device_module
from compress.runtime.backends.onnxrt_device import OnnxDeviceBackend, ProviderOptions, not_recorded
from compress.stage import Progress
from tests.families import family


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pt and its artifact, in one folder."""
    folder = tmp_path_factory.mktemp("made")
    module, inputs = family("residual")
    compress.save(module, folder / "model.pt", inputs=inputs)
    compress.export(folder / "model.pt", ExportOptions(output=folder / "artifact"))
    return folder


def fast(**more: Any) -> MeasureOptions:
    return MeasureOptions(rounds=2, **more)


def test_models_of_every_kind_are_timed_side_by_side_and_compared_with_the_first(made: Path) -> None:
    paths = [made / "model.pt", made / "artifact", made / "artifact/model.onnx"]
    found = measure_files(paths, fast(batches=(1, 4)))
    assert [(row.batch, row.runtime) for row in found.figures] == [
        (batch, runtime) for batch in (1, 4) for runtime in ("torch eager", "ONNX Runtime", "ONNX Runtime")
    ]
    for row in found.figures:
        assert 0 < row.p50_ms <= row.p99_ms
        assert row.throughput == pytest.approx(1000 * row.batch / row.p50_ms)
        assert row.cosine_similarity > 0.9999
        assert row.max_abs_error < 1e-3
    assert found.figures[0].over_first == 1.0


def test_data_is_run_in_place_of_random_inputs(made: Path, tmp_path: Path) -> None:
    name = family("residual")[1][0].partition(":")[0]
    np.savez(tmp_path / "three.npz", **{name: np.zeros((3, 3, 16, 16), np.float32)})  # type: ignore[arg-type]
    found = measure_files([made / "artifact"], fast(batches=(5,), data=str(tmp_path / "three.npz")))
    assert found.figures[0].batch == 5


def graph_of(kind: str, path: Path) -> Path:
    """One operator over samples of three numbers."""
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, ["batch", 3]) for n in ("x", "y")]
    graph = onnx.helper.make_graph([onnx.helper.make_node(kind, ["x"], ["y"])], "g", *([v] for v in values))
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.save(made, path)
    return path


def test_answers_are_compared_on_all_of_the_data_not_on_what_is_timed(tmp_path: Path) -> None:
    """Only one sample, in the middle, tells the two apart."""
    paths = [graph_of("Identity", tmp_path / "a.onnx"), graph_of("Relu", tmp_path / "b.onnx")]
    samples = np.ones((40, 3), np.float32)
    samples[17] = -1
    np.savez(tmp_path / "data.npz", x=samples)
    found = measure_files(paths, fast(data=str(tmp_path / "data.npz")))
    _, other = found.figures
    assert (other.cosine_similarity, other.max_abs_error, other.compared) == (0.0, 1.0, 40)
    told = measure_table(found).title
    assert "cosine: the least of 40 samples of the data" in str(told)
    drawn = measure_files(paths, fast())
    assert [row.compared for row in drawn.figures] == [0, 0]
    assert "cosine: of one batch of random inputs" in str(measure_table(drawn).title)


def test_what_compares_answers_on_the_data_tells_how_it_goes_on(tmp_path: Path) -> None:
    """Large data was looked at for a minute without a word."""

    class Seen(Silent):
        def __init__(self) -> None:
            self.told: list[tuple[str, int, int, str]] = []

        def started(self, stage: str) -> Progress:
            return lambda done, total, note: self.told.append((stage, done, total, note))

    watcher = Seen()
    np.savez(tmp_path / "data.npz", x=np.ones((20, 3), np.float32))
    measure_files(
        [graph_of("Relu", tmp_path / "a.onnx")], fast(batches=(1, 8), data=str(tmp_path / "data.npz")), watcher
    )
    compared = [(done, total) for stage, done, total, note in watcher.told if (stage, note) == ("compare", "samples")]
    assert compared == [*((at, 20) for at in range(1, 21)), (8, 16), (16, 16)]
    assert [(stage, note) for stage, *_, note in watcher.told[22:]] == [("measure", "rounds")] * len(watcher.told[22:])
    assert watcher.told[-1][1] == watcher.told[-1][2]


def test_data_of_fewer_samples_than_a_batch_says_that_it_compared_none(tmp_path: Path) -> None:
    paths = [graph_of("Identity", tmp_path / "a.onnx")]
    np.savez(tmp_path / "data.npz", x=np.ones((3, 3), np.float32))
    found = measure_files(paths, fast(batches=(5,), data=str(tmp_path / "data.npz")))
    assert found.figures[0].compared == 0
    assert "random" not in str(measure_table(found).title)
    several = measure_files(paths, fast(batches=(1, 5), data=str(tmp_path / "data.npz")))
    assert [row.compared for row in several.figures] == [3, 0]
    told = str(measure_table(several).title)
    assert "the least of 3 samples of the data; at batch 5 of the data's samples, taken again to fill a batch" in told


def products(path: Path, outputs: str, rows: int | str = "batch", given: str = "x") -> Path:
    """From x [rows, 3]: a = x·W, and b = -a, in the order that is asked for."""
    weights = np.arange(6, dtype=np.float32).reshape(3, 2) - 2
    nodes = [onnx.helper.make_node("MatMul", [given, "W"], ["a"]), onnx.helper.make_node("Neg", ["a"], ["b"])]
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes[: 1 + ("b" in outputs)], "g", [onnx.helper.make_tensor_value_info(given, kind, [rows, 3])],
        [onnx.helper.make_tensor_value_info(name, kind, [rows, 2]) for name in outputs],
        [onnx.numpy_helper.from_array(weights, "W")],
    )  # fmt: skip
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_outputs_are_compared_by_name_whatever_their_order(tmp_path: Path) -> None:
    found = measure_files([products(tmp_path / f"{names}.onnx", names) for names in ("ab", "ba")], fast())
    for row in found.figures:
        assert row.cosine_similarity == pytest.approx(1)
        assert row.max_abs_error == 0


def test_models_of_unlike_outputs_or_names_of_inputs_are_told(tmp_path: Path) -> None:
    two, one = products(tmp_path / "two.onnx", "ab"), products(tmp_path / "one.onnx", "a")
    for paths in ([two, one], [one, two]):
        with pytest.raises(ToolkitError, match="beside") as caught:
            measure_files(paths, fast())
        assert "it gives a:float32" in caught.value.why
    with pytest.raises(ToolkitError, match="beside") as caught:
        measure_files([one, products(tmp_path / "z.onnx", "a", given="z")], fast())
    assert "it takes z:float32" in caught.value.why


def test_a_batch_that_is_fixed_is_the_one_that_is_told(tmp_path: Path) -> None:
    """Else a call of 4 samples would be told as one of 1, or of 8."""
    fixed = products(tmp_path / "fixed.onnx", "a", rows=4)
    (row,) = measure_files([fixed], fast()).figures
    assert row.batch == 4
    assert row.throughput == pytest.approx(4000 / row.p50_ms)
    np.savez(tmp_path / "data.npz", x=np.eye(4, 3, dtype=np.float32))
    (row,) = measure_files([fixed], fast(data=str(tmp_path / "data.npz"))).figures
    assert (row.batch, row.compared) == (4, 4)
    with pytest.raises(ToolkitError, match="can't measure at batch 8"):
        measure_files([fixed], fast(batches=(1, 8)))


def test_on_the_cpu_models_are_timed_by_what_times_them_in_a_report(made: Path) -> None:
    options = fast()
    for path in (made / "model.pt", made / "artifact"):
        model = opened(path, options)
        ((_, backend),) = backends_of("it", model, torch.device("cpu"), options, model.signature, {})
        assert type(backend) is type(open_model(model, threads=1))


def test_the_command_writes_a_table_and_json(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["measure", str(made / "artifact"), "--rounds", "2", "--json", str(tmp_path / "m.json")]
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    assert "ONNX Runtime" in capsys.readouterr().out
    told = json.loads((tmp_path / "m.json").read_text())
    assert told["figures"][0]["runtime"] == "ONNX Runtime"
    assert told["environment"]["cpu"]


def test_an_engine_of_somebody_else_is_not_loaded_unless_it_is_trusted(made: Path, tmp_path: Path) -> None:
    """Its own engine.json may say that code of it runs on the host."""
    artifact = Artifact.load(made / "artifact")
    (tmp_path / "model.plan").write_bytes(b"compiled elsewhere")
    (tmp_path / "engine.json").write_text('{"version_compatible": true}')
    plan = tmp_path / "model.plan"
    dataclasses.replace(artifact, folder=tmp_path, model_file=plan.name, format="plan", sha256=sha256_of(plan)).save()
    with pytest.raises(StageError, match="it may run code"):
        measure_files([tmp_path], fast())
    with pytest.raises(ToolkitError, match=r"on the CPU|on a GPU|TensorRT"):  # as far as this machine goes
        measure_files([tmp_path], fast(trust=True))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_run_on_the_cpu_instead(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["measure", str(made / "artifact"), "--device", "cuda"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "can't run on a GPU" in err
    assert "mend:" in err


@pytest.mark.skipif("CUDAExecutionProvider" in ort.get_available_providers(), reason="this onnxruntime has CUDA")
@pytest.mark.parametrize("provider", ["cuda", "tensorrt"])
def test_a_provider_that_is_not_there_is_an_error(made: Path, provider: Any) -> None:
    model = OnnxModel(made / "artifact/model.onnx", signature_of_onnx(made / "artifact/model.onnx"))
    with pytest.raises(StageError) as caught:
        OnnxDeviceBackend(model, ProviderOptions(provider))
    assert "has only" in caught.value.why
    assert "gpu" in caught.value.mend


def test_a_silent_fall_back_to_the_cpu_is_an_error_with_onnx_runtimes_own_reason(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime makes a CPU session when CUDA does not start, and says why on stderr alone."""
    path = made / "artifact/model.onnx"
    real = ort.InferenceSession

    def falls_back(file: str, options: Any, **_: Any) -> Any:
        import os

        os.write(2, b"[E:onnxruntime] Failed to create CUDAExecutionProvider. Require cuDNN 9.* and CUDA 13.*\n")
        return real(file, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr(ort, "InferenceSession", falls_back)
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr(ort, "preload_dlls", lambda: None, raising=False)
    monkeypatch.setattr(device_module, "accelerator", lambda: torch.device("cpu"))
    with pytest.raises(StageError, match="fell back to the CPU") as caught:
        OnnxDeviceBackend(OnnxModel(path, signature_of_onnx(path)), ProviderOptions("cuda"))
    assert "Require cuDNN 9" in caught.value.why


def test_bound_tensors_give_what_plain_calls_give(made: Path) -> None:
    """The binding that a GPU needs, on the CPU."""
    path = made / "artifact/model.onnx"
    model = OnnxModel(path, signature_of_onnx(path))
    bound = OnnxDeviceBackend(model, ProviderOptions("cpu"))
    for batch in (1, 3):
        inputs = sample_inputs(model.signature, batch, seed=batch)
        expected = OnnxBackend(model, 1).infer(inputs)
        got = bound.infer(inputs)
        assert list(got) == list(expected)
        for name, values in expected.items():
            np.testing.assert_array_equal(got[name], values)
        bound.prepared(inputs)()


def test_what_runs_on_what_and_how_is_told() -> None:
    chain = ProviderOptions("tensorrt", cuda_graphs=True, tf32=False, engine_cache=Path("cache")).chain(7)
    assert [name for name, _ in chain] == ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    trt, cuda, _ = (options for _, options in chain)
    assert trt["trt_engine_cache_path"] == "cache"
    assert trt["trt_cuda_graph_enable"] == "1"
    assert (cuda["use_tf32"], cuda["enable_cuda_graph"], cuda["user_compute_stream"]) == ("0", "0", "7")
    assert ProviderOptions("cuda", cuda_graphs=True).chain(7)[0][1]["enable_cuda_graph"] == "1"
    assert "prefer_nhwc" not in cuda
    laid_out = ProviderOptions("cuda", channels_last=True).chain(7)[0][1]
    assert (laid_out["prefer_nhwc"], laid_out["fuse_conv_bias"]) == ("1", "1")
    with pytest.raises(RecipeError, match="CUDA graphs"):
        ProviderOptions("cpu", cuda_graphs=True)


def test_a_graph_that_cant_be_recorded_names_the_nodes_that_stand_in_the_way() -> None:
    refused = not_recorded("model.onnx", {"Concat": 3, "Squeeze": 1})
    assert "4 of its nodes run on the CPU (3 Concat, 1 Squeeze)" in refused.why
    assert "--cuda-graphs" in refused.mend


def test_an_onnx_files_own_names_and_sizes_are_its_signature(tmp_path: Path) -> None:
    helper = onnx.helper
    graph = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["n", None, 3])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.INT64, ["n", None, 3])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph), tmp_path / "m.onnx")
    assert str(signature_of_onnx(tmp_path / "m.onnx").inputs[0]) == "x:int64[n,x_1,3]"
    (tmp_path / "bad.onnx").write_bytes(b"no")
    with pytest.raises(StageError, match="can't read"):
        signature_of_onnx(tmp_path / "bad.onnx")


def test_models_that_don_t_go_together_are_told(made: Path, tmp_path: Path) -> None:
    module, inputs = family("mlp")
    compress.save(module, tmp_path / "other.pt", inputs=inputs)
    for paths, says in (
        ([made / "artifact", tmp_path / "other.pt"], "beside"),
        ([made / "artifact", made / "artifact"], "apart"),
    ):
        with pytest.raises(ToolkitError, match=says):
            measure_files(paths, fast())

"""ONNX files of anybody's: taken in with the answers that they give, or refused by name before any work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from compress.errors import SignatureError, StageError, ToolkitError
from compress.formats.files import size_of
from compress.formats.onnx.load import beside, is_onnx, load_onnx
from compress.model import OnnxModel, sample_inputs
from compress.onnx_export.fold import FoldOnnx
from compress.onnx_export.from_file import LEAST_OPSET, OnnxFromFile, refuse_random
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from compress.runtime.backends import OnnxBackend
from tests.unit.compress.onnx_graphs import branching, normal
from tests.unit.compress.prune.test_prune_channels import quiet

node = helper.make_node
Shape = tuple[int | str | None, ...]


def value(name: str, *shape: int | str | None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def model_of(
    nodes: list[Any],
    weights: dict[str, Any],
    *,
    inputs: tuple[onnx.ValueInfoProto, ...] = (value("x", "batch", 16),),
    outputs: tuple[onnx.ValueInfoProto, ...] = (value("y", "batch", 4),),
    opset: int = 17,
    ir: int = 8,
    **more: Any,
) -> ModelProto:
    stored = [numpy_helper.from_array(np.asarray(values), name) for name, values in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir, **more)


def gemm(**more: Any) -> ModelProto:
    return model_of([node("Gemm", ["x", "w", "b"], ["y"])], {"w": normal(16, 4), "b": normal(4)}, **more)


def images(batch: int | str | None, opset: int, *, declared: int | str | None = "batch") -> ModelProto:
    """As an exporter of opset 7 wrote a small network: with what has changed since."""
    nodes = [
        node("Conv", ["x", "w"], ["c"], kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"]),
        node("Relu", ["n"], ["r"]),
        node("Dropout", ["r"], ["d"]),
        node("GlobalAveragePool", ["d"], ["p"]),
        node("Squeeze", ["p"], ["s"], axes=[2, 3]),
        node("Softmax", ["s"], ["y"], axis=1),
    ]
    ones = {name: np.ones(8, np.float32) for name in ("scale", "var")}
    zeros = {name: np.zeros(8, np.float32) for name in ("shift", "mean")}
    return model_of(
        nodes, {"w": normal(8, 3, 3, 3)} | ones | zeros, opset=opset, ir=3 if opset < 9 else 4,
        inputs=(value("x", batch, 3, 8, 8),), outputs=(value("y", declared, 8),),
    )  # fmt: skip


def old(folder: Path) -> Path:
    model = images("batch", 7)
    model.graph.input.extend(value(each.name, *each.dims) for each in model.graph.initializer)
    return stored(model, folder)


def stored(model: ModelProto, folder: Path) -> Path:
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def half(folder: Path) -> Path:
    weights = {"w": normal(16, 4).astype(np.float16), "b": normal(4).astype(np.float16)}
    nodes = [
        node("Gemm", ["x", "w", "b"], ["g"]),
        node("Cast", ["g"], ["f"], to=TensorProto.FLOAT),
        node("Relu", ["f"], ["r"]),
        node("Cast", ["r"], ["y"], to=TensorProto.FLOAT16),
    ]
    half = TensorProto.FLOAT16
    ends: dict[str, Any] = {
        "inputs": (value("x", "batch", 16, kind=half),),
        "outputs": (value("y", "batch", 4, kind=half),),
    }
    return stored(model_of(nodes, weights, **ends), folder)


def outside(folder: Path) -> Path:
    path = folder / "m.onnx"
    onnx.save(gemm(), path, save_as_external_data=True, location="m.weights", size_threshold=0)
    return path


def odd_names(folder: Path) -> Path:
    weights = {"w[0]/kernel:0": normal(16, 4), "bü s": normal(4)}
    nodes = [node("Gemm", ["serve/x y:0", "w[0]/kernel:0", "bü s"], ["out(1):0"], name="a:b/c [1]")]
    ends: dict[str, Any] = {"inputs": (value("serve/x y:0", "batch", 16),), "outputs": (value("out(1):0", "?", 4),)}
    return stored(model_of(nodes, weights, **ends), folder)


def many_names(folder: Path) -> Path:
    """As a converter writes two inputs: each has names of its own for what must be alike."""
    nodes = [node("Add", ["x", "z"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    inputs = (value("x", "unk__1", "unk__2", 16), value("z", "unk__3", "unk__4", 16))
    made = model_of(nodes, {"w": normal(16, 4)}, inputs=inputs, outputs=(value("y", "unk__5", "unk__6", 4),))
    return stored(made, folder)


def scalar(folder: Path) -> Path:
    nodes = [node("Mul", ["x", "factor"], ["a"]), node("MatMul", ["a", "w"], ["y"])]
    made = model_of(nodes, {"w": normal(16, 4)}, inputs=(value("x", "batch", 16), value("factor")))
    return stored(made, folder)


def functions(folder: Path) -> Path:
    twice = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 17)]
    )
    nodes = [node("Gemm", ["x", "w", "b"], ["g"]), node("Twice", ["g"], ["y"], domain="mine")]
    made = model_of(nodes, {"w": normal(16, 4), "b": normal(4)}, functions=[twice])
    made.opset_import.append(helper.make_opsetid("mine", 1))
    return stored(made, folder)


def defaults(folder: Path) -> Path:
    """A function says what its calls leave out."""
    leaks = node("LeakyRelu", ["a"], ["b"])
    leaks.attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    function = helper.make_function("mine", "Leaks", ["a"], ["b"], [leaks], [helper.make_opsetid("", 17)])
    function.attribute_proto.append(helper.make_attribute("slope", 0.5))
    nodes = [
        node("Gemm", ["x", "w", "b"], ["g"]), node("Leaks", ["g"], ["h"], domain="mine"),
        node("Leaks", ["h"], ["y"], domain="mine", slope=0.25),
    ]  # fmt: skip
    made = model_of(nodes, {"w": normal(16, 4), "b": normal(4)}, functions=[function], ir=9)
    made.opset_import.append(helper.make_opsetid("mine", 1))
    return stored(made, folder)


def other_name(folder: Path, opset: int = 17) -> Path:
    """Of ONNX's own domain, which has two: onnx takes them for two domains, and ONNX Runtime for one."""
    nodes = [
        node("Gemm", ["x", "w", "b"], ["g"], domain="ai.onnx"), node("Softmax", ["g"], ["y"], domain="ai.onnx", axis=1)
    ]  # fmt: skip
    made = model_of(nodes, {"w": normal(16, 4), "b": normal(4)}, opset=opset)
    made.opset_import[0].domain = "ai.onnx"
    return stored(made, folder)


def paddle(folder: Path) -> Path:
    made = images("batch", 11)
    dim = made.graph.input[0].type.tensor_type.shape.dim[0]
    dim.ClearField("dim_param")
    dim.dim_value = -1
    return stored(made, folder)


def larger(op: str, mode: str, factor: float, opset: int) -> Callable[[Path], Path]:
    """Images made larger, or smaller, as before opset 11: it was not said where a pixel lies."""
    made = model_of(
        [node(op, ["x", "s"], ["y"], mode=mode)], {"s": np.array([1, 1, factor, factor], np.float32)}, opset=opset,
        inputs=(value("x", "batch", 3, 10, 10),),
        outputs=(value("y", "batch", 3, int(10 * factor), int(10 * factor)),),
    )  # fmt: skip
    return lambda folder: stored(made, folder)


def sparse(folder: Path, *, constant: bool = False, by_dimension: bool = False) -> Path:
    """A weight of which few elements are told; the others are 0."""
    dense = np.where(np.abs(normal(16, 4)) > 1, normal(16, 4), 0).astype(np.float32)
    places = np.argwhere(dense) if by_dimension else np.flatnonzero(dense)
    parts = numpy_helper.from_array(dense[dense != 0], "w"), numpy_helper.from_array(places.astype(np.int64), "places")
    tensor = helper.make_sparse_tensor(*parts, [16, 4])
    nodes = [node("Gemm", ["x", "w", "b"], ["y"])]
    if constant:
        nodes.insert(0, node("Constant", [], ["w"], sparse_value=tensor))
    made = model_of(nodes, {"b": normal(4)})
    made.graph.sparse_initializer.extend([] if constant else [tensor])
    return stored(made, folder)


TAKEN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "opset 7, whose weights are inputs": (old, "x:float32[batch,3,8,8]", "y:float32[batch,8]"),
    "opset 11, fixed at one sample": (
        lambda folder: stored(images(1, 11, declared=1), folder), "x:float32[1,3,8,8]", "y:float32[1,8]",
    ),
    "no name for the batch": (
        lambda folder: stored(images(None, 11, declared=None), folder), "x:float32[batch,3,8,8]", "y:float32[batch,8]",
    ),
    "a dimension of -1": (paddle, "x:float32[batch,3,8,8]", "y:float32[batch,8]"),
    "FP16": (half, "x:float16[batch,16]", "y:float16[batch,4]"),
    "weights beside it": (outside, "x:float32[batch,16]", "y:float32[batch,4]"),
    "names with odd characters": (odd_names, "serve/x y:0:float32[batch,16]", "out(1):0:float32[batch,4]"),
    "two names for one size": (many_names, "x:float32[unk__1,unk__2,16]", "y:float32[unk__1,unk__2,4]"),
    "a scalar": (scalar, "x:float32[batch,16]", "y:float32[batch,4]"),
    "functions": (functions, "x:float32[batch,16]", "y:float32[batch,4]"),
    "functions with defaults": (defaults, "x:float32[batch,16]", "y:float32[batch,4]"),
    "the other name of ONNX's domain": (other_name, "x:float32[batch,16]", "y:float32[batch,4]"),
    "the other name, in an old opset": (
        lambda folder: other_name(folder, 12), "x:float32[batch,16]", "y:float32[batch,4]",
    ),
    "a sparse weight": (sparse, "x:float32[batch,16]", "y:float32[batch,4]"),
    "a sparse weight by rows and columns": (
        lambda folder: sparse(folder, by_dimension=True), "x:float32[batch,16]", "y:float32[batch,4]",
    ),
    "a sparse constant": (lambda folder: sparse(folder, constant=True), "x:float32[batch,16]", "y:float32[batch,4]"),
    "linear Upsample": (larger("Upsample", "linear", 2.0, 9), "x:float32[batch,3,10,10]", ""),
    "nearest Upsample": (larger("Upsample", "nearest", 1.7, 9), "x:float32[batch,3,10,10]", ""),
    "linear Resize": (larger("Resize", "linear", 0.6, 10), "x:float32[batch,3,10,10]", ""),
    "If": (lambda folder: branching(folder).path, "x:float32[batch,32]", ""),
}  # fmt: skip


@pytest.mark.parametrize("case", TAKEN)
def test_a_file_is_taken_in_with_the_answers_that_it_gives(case: str, tmp_path: Path) -> None:
    write, first, last = TAKEN[case]
    model = load_onnx(write(tmp_path))
    assert str(model.signature.inputs[0]) == first
    assert not last or str(model.signature.outputs[0]) == last
    (tmp_path / "made").mkdir()
    given = taken_in(model.path, tmp_path / "made")
    assert given.signature == model.signature
    made = onnx.load(given.path, load_external_data=False)
    assert all(each.type.tensor_type.HasField("shape") for each in made.graph.input)
    onnx.checker.check_model(made)
    assert made.opset_import[0].version >= LEAST_OPSET
    assert not made.functions
    assert not made.graph.sparse_initializer
    FoldOnnx().run(given, tmp_path / "made", quiet)
    assert {each.name for each in made.graph.input} == {spec.name for spec in model.signature.inputs}
    assert all(each.data_type != TensorProto.FLOAT16 and not each.external_data for each in made.graph.initializer)
    inputs = sample_inputs(model.signature, 3)
    before, after = (OnnxBackend(each, 1).infer(inputs) for each in (model, given))
    for name, expected in before.items():
        assert after[name].dtype == expected.dtype
        np.testing.assert_allclose(after[name], expected, atol=1e-2 if case == "FP16" else 1e-5)


def taken_in(path: Path, folder: Path) -> OnnxModel:
    model = load_onnx(path)
    OnnxFromFile().check(model)
    given = OnnxFromFile().run(model, folder, quiet).model
    assert isinstance(given, OnnxModel)
    return given


def typed(kind: onnx.TypeProto) -> ModelProto:
    odd = helper.make_value_info("s", kind)
    if kind.WhichOneof("value") == "sequence_type":
        nodes = [node("ConcatFromSequence", ["s"], ["x"], axis=0)]
    else:
        nodes = [node("OptionalGetElement", ["s"], ["x"])]
    nodes += [node("Gemm", ["x", "w", "b"], ["y"])]
    return model_of(nodes, {"w": normal(16, 4), "b": normal(4)}, inputs=(odd,))


def quantized() -> ModelProto:
    scale = {"s": np.float32(0.1), "z": np.int8(0)}
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("Gemm", ["d", "w", "b"], ["y"]),
    ]
    return model_of(nodes, {"w": normal(16, 4), "b": normal(4)} | scale)


def in_bfloat16() -> ModelProto:
    nodes = [node("Cast", ["h"], ["w"], to=TensorProto.FLOAT), node("MatMul", ["x", "w"], ["y"])]
    made = model_of(nodes, {})
    made.graph.initializer.append(helper.make_tensor("h", TensorProto.BFLOAT16, [16, 4], normal(16, 4).ravel()))
    return made


def custom() -> ModelProto:
    made = model_of([node("Special", ["x"], ["y"], domain="my.ops")], {})
    made.opset_import.append(helper.make_opsetid("my.ops", 1))
    return made


def text() -> ModelProto:
    nodes = [node("LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", keys_strings=["a"], values_floats=[1.0])]
    made = model_of(
        nodes, {}, inputs=(value("x", "batch", 4, kind=TensorProto.STRING),), outputs=(value("y", "batch", 4),)
    )
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))
    return made


def old_branches() -> ModelProto:
    made = onnx.shape_inference.infer_shapes(gemm(opset=11, ir=6))
    branch = helper.make_graph([node("Neg", ["g"], ["n"])], "b", [], [value("n", None, 4)])
    made.graph.node[0].output[0] = "g"
    made.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    made.graph.node.append(node("If", ["yes"], ["y"], then_branch=branch, else_branch=branch))
    return made


def elsewhere() -> ModelProto:
    made = gemm()
    tensor = made.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../secret")
    return made


def random(kind: str, **more: Any) -> ModelProto:
    """Numbers of a kind, added to what a layer gives."""
    nodes = [node("Gemm", ["x", "w", "b"], ["g"]), node(kind, ["g"], ["n"], **more), node("Add", ["g", "n"], ["y"])]
    return model_of(nodes, {"w": normal(16, 4), "b": normal(4)})


def dropping() -> ModelProto:
    """As torch exports a model in training."""
    nodes = [node("Gemm", ["x", "w", "b"], ["g"]), node("Dropout", ["g", "r", "t"], ["y"])]
    weights = {"w": normal(16, 4), "b": normal(4), "r": np.float32(0.5), "t": np.array(True)}
    return model_of(nodes, weights)


FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 16])
REFUSED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "quantized": (quantized, "it has 1 QuantizeLinear, 1 DequantizeLinear"),
    "BF16": (in_bfloat16, "of its weights it has 1 in BFLOAT16"),
    "an operator of a library": (custom, "'Special' of 'my.ops', which a library would have to bring"),
    "text": (text, "'x' holds text"),
    "a sequence": (lambda: typed(helper.make_sequence_type_proto(FLOATS)), "'s' is a sequence"),
    "optional": (lambda: typed(helper.make_optional_type_proto(FLOATS)), "'s' is optional"),
    "opset 6": (lambda: images("batch", 6), "it is in opset 6"),
    "weights elsewhere": (elsewhere, "'../secret', outside of the file's folder"),
    "random numbers": (
        lambda: random("RandomNormalLike"),
        "it has 1 RandomNormalLike: its answers are others each time",
    ),
    "with a seed": (
        lambda: random("RandomUniformLike", seed=3.0),
        "it has 1 RandomUniformLike: its answers are others",
    ),
    "dropout": (dropping, "it has 1 Dropout with a training mode: its answers are others each time"),
    "old bodies": (old_branches, "leaves bodies of If and Loop as they are, and these hold Neg"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_made_smaller_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, why = REFUSED[case]
    path = stored(make(), tmp_path)
    (tmp_path / "made").mkdir()
    with pytest.raises(ToolkitError) as refused:
        taken_in(path, tmp_path / "made")
    assert why in refused.value.why
    assert refused.value.mend


MAPS = helper.make_sequence_type_proto(
    helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
)
MENDED: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "an operator of a library": (custom, "export it without that operator"),
    "a sequence": (REFUSED["a sequence"][0], "export it with plain tensors"),
    "maps, as scikit-learn's converter gives": (lambda: typed(MAPS), "options={id(model): {'zipmap': False}}"),
    "weights elsewhere": (elsewhere, "as its exporter wrote it, with its weights inside or beside it"),
}


@pytest.mark.parametrize("case", MENDED)
def test_how_to_mend_it_is_about_what_is_wrong(case: str, tmp_path: Path) -> None:
    make, mend = MENDED[case]
    path = stored(make(), tmp_path)
    (tmp_path / "made").mkdir()
    with pytest.raises(ToolkitError) as refused:
        taken_in(path, tmp_path / "made")
    assert mend in refused.value.mend
    assert ("zipmap" in refused.value.mend) == (case == "maps, as scikit-learn's converter gives")


def test_a_mask_that_is_drawn_twice_in_a_row_does_not_hide_that_masks_are_drawn(tmp_path: Path) -> None:
    class Drawing:
        """Gives one answer five times, then another."""

        left = 5

        def infer(self, inputs: dict[str, np.ndarray[Any, Any]]) -> dict[str, np.ndarray[Any, Any]]:
            self.left -= 1
            return {"y": inputs["x"] * (self.left > 0)}

    path = stored(dropping(), tmp_path)
    with pytest.raises(StageError, match="it draws random numbers"):
        refuse_random(path, Drawing(), {"x": normal(1, 16)}, StageError("off", why="by far", mend="none"))  # type: ignore[arg-type]


def test_a_size_that_the_graph_does_not_take_is_told_with_the_flag_that_mends_it(tmp_path: Path) -> None:
    nodes = [node("Reshape", ["x", "to"], ["r"]), node("MatMul", ["r", "w"], ["y"])]
    made = model_of(
        nodes, {"to": np.array([-1, 24]), "w": normal(24, 4)}, inputs=(value("x", "batch", "seq"),),
        outputs=(value("y", None, 4),),
    )  # fmt: skip
    path = stored(made, tmp_path)
    with pytest.raises(SignatureError, match="seq = 7"):
        load_onnx(path, {"seq": 7})
    assert load_onnx(path, {"seq": 24}).signature.at(1)["seq"] == 24


def test_weights_beside_a_file_count_and_a_missing_one_is_named(tmp_path: Path) -> None:
    path = outside(tmp_path)
    assert beside(path) == [tmp_path / "m.weights"]
    assert size_of(path) == path.stat().st_size + (tmp_path / "m.weights").stat().st_size
    (tmp_path / "m.weights").unlink()
    with pytest.raises(StageError, match=r"m\.weights.* missing"):
        load_onnx(path)


def test_a_file_is_known_by_its_ending_or_its_beginning(tmp_path: Path) -> None:
    path = stored(gemm(), tmp_path)
    path.rename(tmp_path / "model.bin")
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    assert is_onnx(tmp_path / "model.bin")
    assert is_onnx(tmp_path / "missing.onnx")
    assert not is_onnx(tmp_path / "model.pt")
    assert not is_onnx(tmp_path)


def linked(folder: Path) -> None:
    (folder / "m.weights").rename(folder / "blob")
    (folder / "m.weights").symlink_to("blob")


def linked_twice(folder: Path) -> None:
    """As in the caches of package managers, and after cp -al."""
    (folder / "other").hardlink_to(folder / "m.weights")


def without_lengths(folder: Path) -> None:
    model = onnx.load(folder / "m.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        told = [each for each in tensor.external_data if each.key != "length"]
        del tensor.external_data[:]
        tensor.external_data.extend(told)
    onnx.save(model, folder / "m.onnx")


@pytest.mark.parametrize("stage", [OnnxFromFile(), TorchFromOnnx()], ids=["as it is", "taken back"])
@pytest.mark.parametrize("change", [linked, linked_twice, without_lengths])
def test_weights_beside_it_are_taken_as_onnx_runtime_takes_them(
    change: Callable[[Path], None], stage: OnnxFromFile | TorchFromOnnx, tmp_path: Path
) -> None:
    onnx.save(gemm(), tmp_path / "m.onnx", save_as_external_data=True, location="m.weights", size_threshold=0)
    change(tmp_path)
    (tmp_path / "out").mkdir()
    stage.run(load_onnx(tmp_path / "m.onnx"), tmp_path / "out", quiet)  # which proves it


@pytest.mark.parametrize("stage", [OnnxFromFile(), TorchFromOnnx()], ids=["as it is", "taken back"])
def test_two_weights_of_one_name_are_refused_by_that_name(stage: OnnxFromFile | TorchFromOnnx, tmp_path: Path) -> None:
    model = gemm()
    model.graph.initializer.append(numpy_helper.from_array(normal(16, 4), "w"))
    onnx.save(model, tmp_path / "m.onnx")
    with pytest.raises(StageError, match="can't compress") as caught:
        stage.run(load_onnx(tmp_path / "m.onnx"), tmp_path, quiet)
    assert "2 initializers named 'w'" in caught.value.why


def test_what_onnx_runtime_does_not_load_is_mended_by_no_size(tmp_path: Path) -> None:
    circle = [node("Add", ["x", "b"], ["a"]), node("Relu", ["a"], ["b"]), node("Gemm", ["b", "w"], ["y"])]
    onnx.save(model_of(circle, {"w": normal(16, 4)}), tmp_path / "m.onnx")
    with pytest.raises(SignatureError) as caught:
        load_onnx(tmp_path / "m.onnx")
    assert "--size" not in caught.value.mend
    assert "export the model again" in caught.value.mend

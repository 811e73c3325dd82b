"""What a size decides, when a network is exported or taken back, holds at every size, or is refused by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, helper, numpy_helper
from torch import nn
from torch.nn import functional as F

from compress.artifact import Signature, TensorSpec
from compress.errors import StageError
from compress.formats.exported.decisions import Decisions
from compress.formats.onnx.load import load_onnx
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.model.odd_sizes import Range
from compress.onnx_export.equal import Wording
from compress.onnx_export.equal_elsewhere import equal_elsewhere
from compress.onnx_export.from_file import OnnxFromFile
from compress.onnx_export.from_torch import OnnxFromTorch
from compress.onnx_export.torch_from_onnx import TorchFromOnnx
from compress.runtime.backends import TorchBackend
from tests.unit.compress.onnx_graphs import normal

node = helper.make_node
TOKENS, IMAGE = ("x:float32[batch,T,8]",), ("x:float32[batch,3,h,w]",)


def silent(_done: int, _total: int, _note: str) -> None:
    pass


class Sequences(nn.Module):
    """Two layers over a sequence, of which a function takes a part first."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.part = nn.Linear(8, 16), nn.Linear(16, 4), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(self.part(x))).mean(1))  # type: ignore[no-any-return]


class Wide(Sequences):
    """Of so many features that a few hundred rows are far more than usual."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(part)
        self.a = nn.Linear(768, 16)


class DownAndUp(nn.Module):
    """Takes pictures of multiples of 8 alone."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.part = nn.Conv2d(3, 4, 3, padding=1), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.relu(self.conv(self.part(x)))
        return found + F.interpolate(F.max_pool2d(found, 8), scale_factor=8.0)


class Neck(nn.Module):
    """Takes pictures of 0 and 3 modulo 4: what goes down twice and up once is joined with what went down once."""

    def __init__(self, part: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.part = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        once = torch.relu(self.a(self.part(x)))
        return once + F.interpolate(self.b(once), scale_factor=2.0)


class Windows(Sequences):
    """Takes multiples of 11 alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.a(self.part(x)).view(x.shape[0], x.shape[1] // 11, 11, 16)
        return self.b(rows.softmax(2).amax((1, 2)))  # type: ignore[no-any-return]


class Groups(Sequences):
    """Of four rows each: what -1 stands for is undefined below four."""

    def __init__(self) -> None:
        super().__init__(lambda x: x.reshape(x.shape[0], x.shape[1] // 4, -1))
        self.a = nn.Linear(32, 16)


class Everywhere(nn.Module):
    """Holds what grows with the square of a picture."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.conv(x).flatten(2)
        return (rows.transpose(1, 2) @ rows).softmax(-1).amax((1, 2))  # type: ignore[no-any-return]


class Rows(nn.Module):
    """What is divided by how many rows a pool gives."""

    def __init__(self, kernel: int, stride: int, pad: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.MaxPool2d(kernel, stride, pad, ceil_mode=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.pool(torch.relu(self.conv(x)))
        return found / found.shape[2]  # type: ignore[no-any-return]


def modeled(module: nn.Module, inputs: Sequence[str]) -> TorchModel:
    module = module.eval()
    sizes = {"T": 99} if isinstance(module, Windows) else None
    return TorchModel(module, infer_signature(module, tuple(map(TensorSpec.parse, inputs)), sizes=sizes))


def last_fifty(x: torch.Tensor) -> torch.Tensor:
    return x[:, -50:] if x.shape[1] > 50 else x


def padded_at_multiples_of_three(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, 1)) if x.shape[1] % 3 == 0 else x


def doubled_at_multiples_of_512(x: torch.Tensor) -> torch.Tensor:
    return 2 * x if x.shape[1] % 512 == 0 else x


def centered_of_several_rows(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(1, keepdim=True) if x.shape[1] > 1 else x


def centered_in_batches_of_four(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0, keepdim=True) if x.shape[0] % 4 == 0 else x


def cut_to_six_hundred(x: torch.Tensor) -> torch.Tensor:
    return x[:, :600] if x.shape[1] > 600 else x


def dark_above_240_rows(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x.shape[2] > 240 else x


def halved_above_300(x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x.shape[1] > 300 else x


def last_three_hundred(x: torch.Tensor) -> torch.Tensor:
    return x[:, -300:] if x.shape[1] > 300 else x


def doubled_by_its_root(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if int(math.sqrt(x.shape[1])) > 20 else x


def doubled_by_its_logarithm(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if math.log2(x.shape[1]) > 9 else x


@pytest.mark.parametrize(
    ("module", "inputs", "told"),
    [
        (Sequences(last_fifty), TOKENS, r"T = 259, where what torch.export decided by a size holds for T up to 50"),
        (
            Sequences(padded_at_multiples_of_three),
            TOKENS,
            r"T = 33, where what torch.export decided by a size holds for T % 3 != 0",
        ),
        (Sequences(last_three_hundred), TOKENS, r"T = \d{3}, .* up to 300"),  # by the range alone
        (Sequences(doubled_at_multiples_of_512), TOKENS, r"T = 512, where .* holds for T % 512 != 0"),
        (Sequences(centered_of_several_rows), TOKENS, "T = 1"),
        (Sequences(centered_in_batches_of_four), TOKENS, "batch = 4"),
        (Wide(cut_to_six_hundred), ("x:float32[batch,T,768]",), "T = 601, where .* holds for T up to 600"),
        (DownAndUp(dark_above_240_rows), IMAGE, r"h = \d+, where .* holds for h from 8 to 240"),
        (Neck(dark_above_240_rows), IMAGE, r"h = \d+, where .* holds for h (from \d to|up to) 240"),
        (Windows(halved_above_300), TOKENS, r"T = \d+, where .* holds for T (from \d+ to|up to) 300"),
        (Rows(2, 2, 1), IMAGE, r"h = \d+"),
        (Rows(2, 3, 1), IMAGE, r"h = \d+"),
        (Sequences(doubled_by_its_root), TOKENS, r"T = 441, where .*T\)+ <= 20"),  # told when it runs, by torch.export
        (Sequences(doubled_by_its_logarithm), TOKENS, r"T = 513, where .*T\)+ <= 9\.0"),
    ],
    ids=[
        "cut to 50",
        "by a remainder",
        "cut to 300",
        "by a far remainder",
        "one row",
        "by the batch",
        "far beyond wide samples",
        "multiples of 8",
        "a neck",
        "windows of 11",
        "pool that drops windows",
        "pool in steps of 3",
        "by a root",
        "by a logarithm",
    ],
)
def test_a_branch_on_a_size_is_refused_with_the_dimension_and_a_size_at_which_it_shows(
    module: nn.Module, inputs: Sequence[str], told: str, tmp_path: Path
) -> None:
    with pytest.raises(StageError, match=f"gives other answers at {told}") as caught:
        OnnxFromTorch().run(modeled(module, inputs), tmp_path, silent)
    assert caught.value.mend


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Sequences(lambda x: x), TOKENS),
        (Sequences(lambda x: x[:, :20]), TOKENS),
        (DownAndUp(lambda x: x), IMAGE),
        (Groups(), TOKENS),
        (Rows(3, 2, 0), IMAGE),  # SqueezeNet's and GoogLeNet's: no window begins behind the last value
    ],
    ids=[
        "without",
        "cut at a place",
        "multiples of 8",
        "reshaped by a size that is computed",
        "pool that drops nothing",
    ],
)
def test_what_decides_nothing_by_sizes_is_exported_and_says_at_which_it_is_equal(
    module: nn.Module, inputs: Sequence[str], tmp_path: Path
) -> None:
    given = OnnxFromTorch().run(modeled(module, inputs), tmp_path, silent)
    tried = given.details["equal_at_sizes"]
    assert tried.keys() == set(TensorSpec.parse(inputs[0]).shape) - {3, 8}
    step = {DownAndUp: 8, Groups: 4}.get(type(module), 1)
    assert all(any(size % (2 * step) for size in sizes) for dim, sizes in tried.items() if dim != "batch")
    assert not any("torch.export" in str(told) for told in given.warnings)


def test_a_range_that_shows_nowhere_is_told(tmp_path: Path) -> None:
    cut = Sequences(lambda x: x[:, :1000] if x.shape[1] <= 60 else x[:, :2000])
    given = OnnxFromTorch().run(modeled(cut, TOKENS), tmp_path, silent)
    (told,) = (str(each) for each in given.warnings if "torch.export" in str(each))
    assert "up to 60" in told
    assert "T = 61" in told


def test_a_size_that_takes_too_much_to_be_tried_is_told(tmp_path: Path) -> None:
    far = Wide(lambda x: x[:, :99_000] if x.shape[1] > 99_000 else x)
    given = OnnxFromTorch().run(modeled(far, ("x:float32[batch,T,768]",)), tmp_path, silent)
    (told,) = (str(each) for each in given.warnings if "torch.export" in str(each))
    assert "T up to 99000: T = 99001 takes too much" in told


def test_a_size_at_which_a_tensor_inside_takes_too_much_is_not_tried(tmp_path: Path) -> None:
    module = Everywhere().eval()
    signature = infer_signature(module, tuple(map(TensorSpec.parse, IMAGE)), sizes={"h": 32, "w": 32})
    given = OnnxFromTorch().run(TorchModel(module, signature), tmp_path, silent)
    assert max(given.details["equal_at_sizes"]["h"]) == 35  # at 259 there are 8288² numbers inside
    assert not any("torch.export" in str(told) for told in given.warnings)


@pytest.mark.parametrize(("most", "steps"), [(100, (100,)), (60, (32, 100))])
def test_a_range_beyond_which_the_model_runs_at_nothing_that_was_tried_is_told(most: int, steps: Sequence[int]) -> None:
    """Where no steps were found in which it takes sizes: else it is the model that refuses them."""
    twice = modeled(Twice(), TOKENS)
    some = Some({32, 33, *steps})
    backends = TorchBackend(TorchModel(some, twice.signature), 1), TorchBackend(twice, 1)
    decided = Decisions({"T": Range(None, most)})
    found = equal_elsewhere(some, *backends, twice.signature, silent, Wording(), done=(1, 1), decided=decided)
    assert found.unseen["T"][1] == f"T up to {most}"
    whole = UpTo(1, most)
    backends = TorchBackend(TorchModel(whole, twice.signature), 1), TorchBackend(twice, 1)
    found = equal_elsewhere(whole, *backends, twice.signature, silent, Wording(), done=(1, 1), decided=decided)
    assert not found.unseen
    assert not found.untried


class Some(nn.Module):
    """Takes so many rows alone."""

    def __init__(self, taken: set[int]) -> None:
        super().__init__()
        self.taken = taken

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in self.taken:
            raise ValueError("it takes others")
        return 2 * x


class OneSize(nn.Module):
    """Takes 32 rows, and 7."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] not in (32, 7):
            raise ValueError("it takes others")
        return 2 * x


def test_a_dimension_of_which_no_size_was_compared_is_told() -> None:
    twice = modeled(Twice(), TOKENS)
    backends = TorchBackend(TorchModel(OneSize(), twice.signature), 1), TorchBackend(twice, 1)
    found = equal_elsewhere(OneSize(), *backends, twice.signature, silent, Wording(), done=(1, 1))
    assert found.nowhere == ["T"]
    assert found.equal == {"batch": [3, 4, 8]}


def test_each_size_that_is_tried_is_told() -> None:
    """A network that takes multiples of 256 alone refuses about a hundred before it is known that none is taken."""
    runs: list[int] = []
    told: list[tuple[int, str]] = []

    class Counted(OneSize):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            runs.append(x.shape[1])
            return super().forward(x)

    twice = modeled(Twice(), TOKENS)
    backends = TorchBackend(TorchModel(Counted(), twice.signature), 1), TorchBackend(twice, 1)

    def progress(_done: int, _total: int, note: str) -> None:
        told.append((len(runs), note))

    equal_elsewhere(Counted(), *backends, twice.signature, progress, Wording(), done=(1, 2))
    sizes = {size for size in runs if size != 32}
    assert len(sizes) > 90
    assert {f"trying T = {size}" for size in sizes} <= {note for _, note in told}
    counts = [count for count, _ in told]
    assert max(after - before for before, after in itertools.pairwise([0, *counts, len(runs)])) <= 3


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class UpTo(nn.Module):
    """As `Twice`, at sizes within bounds."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__()
        self.least, self.most = least, most

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.least <= x.shape[1] <= self.most:
            raise ValueError("split_with_sizes expects another size")
        return x + x


@pytest.mark.parametrize(
    ("least", "most", "smaller", "fails_at"),
    [
        (1, 40, False, 259),
        (1, 40, True, 259),  # torch refuses what ONNX Runtime takes: no fault of the size
        (20, 10**6, False, 1),
        (20, 10**6, True, None),  # a picture below a pool's window
    ],
)
def test_a_size_that_the_first_takes_is_one_that_the_second_has_to_take(
    least: int, most: int, smaller: bool, fails_at: int | None
) -> None:
    first, second = modeled(Twice(), TOKENS), modeled(Twice(), TOKENS)
    second = TorchModel(UpTo(least, most), second.signature)

    def compared() -> dict[str, list[int]]:
        backends = TorchBackend(first, 1), TorchBackend(second, 1)
        found = equal_elsewhere(
            first.module, *backends, first.signature, silent, Wording(), done=(1, 1), smaller=smaller,
            decided=Decisions({"T": Range(None, 30)}),
        )  # fmt: skip
        return found.equal

    if fails_at is None:
        assert {31, 61, 259} <= set(compared()["T"])
    else:
        with pytest.raises(StageError, match=f"fails at T = {fails_at}"):
            compared()


# ONNX files


def stored(nodes: Sequence[NodeProto], tables: dict[str, Any], inputs: dict[str, Sequence[Any]], folder: Path) -> Path:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, 1, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info("y", 1, None)],
        [numpy_helper.from_array(np.asarray(values), name) for name, values in tables.items()],
    )
    opset = 13 if any(each.op_type == "Split" for each in nodes) else 20
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), folder / "m.onnx")
    return folder / "m.onnx"


def off(path: Path, made: Path, shapes: Sequence[dict[str, Sequence[int]]]) -> float:
    """How far the answers are apart at most, by their scale."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    before, after = (
        ort.InferenceSession(str(each), options, providers=["CPUExecutionProvider"]) for each in (path, made)
    )
    worst = 0.0
    for shape in shapes:
        rng = np.random.default_rng(0)
        given = {name: rng.standard_normal(sizes).astype(np.float32) for name, sizes in shape.items()}
        wanted, found = before.run(None, given)[0], after.run(None, given)[0]
        assert wanted.shape == found.shape
        worst = max(worst, float(np.abs(wanted - found).max() / np.abs(wanted).max()))
    return worst


def taken_back_and_written(path: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    (folder / "again").mkdir()
    taken = TorchFromOnnx().run(load_onnx(path), folder, silent)
    made = OnnxFromTorch().run(taken.model, folder / "again", silent)  # type: ignore[arg-type]
    return made.model.path, dict(taken.details["kept_as_they_are"])  # type: ignore[union-attr]


POOLS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "in steps of 2": ("MaxPool", {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]}, False),
    "in steps of 3": ("MaxPool", {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [1, 1, 1, 1]}, False),
    "padded behind alone": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}, False),
    "padded before alone": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 0, 0]}, False),
    "steps wider than the window": ("MaxPool", {"kernel_shape": [2, 2], "strides": [4, 3]}, False),
    "dilated": ("MaxPool", {"kernel_shape": [2, 2], "strides": [3, 3], "pads": [0, 1, 1, 0], "dilations": [2, 2]}, False),
    "without padding": ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2]}, False),
    "an average": ("AveragePool", {"kernel_shape": [2, 2], "strides": [2, 2], "pads": [1, 1, 1, 1]}, True),
    "an average without padding": ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2]}, False),
}  # fmt: skip


@pytest.mark.parametrize("case", POOLS)
def test_a_pool_of_a_file_that_rounds_up_has_its_windows_at_every_size(case: str, tmp_path: Path) -> None:
    kind, attributes, stays = POOLS[case]
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]), node(kind, ["c"], ["p"], ceil_mode=1, **attributes),
        node("Shape", ["p"], ["s"]), node("Slice", ["s", "two", "three"], ["n"]), node("Cast", ["n"], ["rows"], to=1),
        node("Div", ["p", "rows"], ["d"]), node("Conv", ["d", "v"], ["y"]),
    ]  # fmt: skip
    tables = {"w": normal(8, 3, 3, 3), "v": normal(4, 8, 1, 1), "two": np.array([2]), "three": np.array([3])}
    path = stored(nodes, tables, {"x": ("N", 3, "H", "W")}, tmp_path)
    made, kept = taken_back_and_written(path, tmp_path)
    assert bool(kept) is stays
    assert off(path, made, [{"x": (1, 3, h, h + 3)} for h in (*range(7, 20), 33, 51, 224, 225)]) < 1e-4


SPLITS: dict[str, tuple[list[NodeProto], dict[str, Sequence[Any]], list[dict[str, Sequence[int]]]]] = {
    "behind a convolution in steps": (
        [node("Conv", ["x", "k"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]), node("Split", ["c"], ["a", "b"], axis=2, name="split"),
         node("Add", ["a", "b"], ["s"]), node("Conv", ["s", "v"], ["y"])],
        {"x": ("N", 3, "H", "W")}, [{"x": (1, 3, h, 9)} for h in (4, 8, 16, 32, 48, 64, 100, 224)],
    ),
    "of two that are joined on the batch": (
        [node("Concat", ["x", "z"], ["xz"], axis=0), node("MatMul", ["xz", "m"], ["q"]), node("Split", ["q"], ["a", "b"], axis=0, name="split"),
         node("Sub", ["a", "b"], ["d"]), node("MatMul", ["d", "m2"], ["y"])],
        {"x": ("N", 16), "z": ("N", 16)}, [{"x": (n, 16), "z": (n, 16)} for n in (1, 2, 3, 8)],
    ),
    "of two that are joined on the sequence": (
        [node("MatMul", ["x", "m"], ["q"]), node("Concat", ["q", "q"], ["qq"], axis=1), node("Sigmoid", ["qq"], ["g"]),
         node("Split", ["g"], ["a", "b"], axis=1, name="split"), node("Mul", ["a", "b"], ["d"]), node("MatMul", ["d", "m2"], ["y"])],
        {"x": ("N", "T", 16)}, [{"x": (2, t, 16)} for t in (1, 5, 16, 32, 33, 100)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_into_equal_parts_of_an_axis_whose_size_is_computed_holds_at_every_size(
    case: str, tmp_path: Path
) -> None:
    nodes, inputs, shapes = SPLITS[case]
    read = {name for each in nodes for name in each.input}
    tables = {"k": normal(8, 3, 3, 3), "v": normal(4, 8, 1, 1), "m": normal(16, 24), "m2": normal(24, 5)}
    path = stored(nodes, {name: table for name, table in tables.items() if name in read}, inputs, tmp_path)
    made, kept = taken_back_and_written(path, tmp_path)
    assert ["Split" in told for told in kept] == [True]
    assert off(path, made, shapes) < 1e-3


def test_a_split_of_an_axis_that_is_always_as_large_is_a_function_of_torch_though_nothing_tells(tmp_path: Path) -> None:
    """Behind a reshape by computed sizes, as exporters write attention."""
    nodes = [
        node("MatMul", ["x", "m"], ["q"]), node("Shape", ["x"], ["s"]), node("Slice", ["s", "zero", "two"], ["nt"]),
        node("Concat", ["nt", "sizes"], ["shape"], axis=0), node("Reshape", ["q", "shape"], ["r"]),
        node("Split", ["r"], ["a", "b"], axis=2, name="split"), node("Mul", ["a", "b"], ["d"]),
        node("MatMul", ["d", "m2"], ["y"]),
    ]  # fmt: skip
    tables = {
        "m": normal(16, 24), "m2": normal(12, 5), "zero": np.array([0]), "two": np.array([2]), "sizes": np.array([24]),
    }  # fmt: skip
    path = stored(nodes, tables, {"x": ("N", "T", 16)}, tmp_path)
    made, kept = taken_back_and_written(path, tmp_path)
    assert not kept
    assert off(path, made, [{"x": (2, t, 16)} for t in (1, 5, 33, 100)]) < 1e-4


def test_a_resize_back_to_sizes_that_are_computed_stays_behind_one_that_stays(tmp_path: Path) -> None:
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Resize", ["c", "", "third"], ["r"], name="down", mode="nearest", coordinate_transformation_mode="asymmetric",
             nearest_mode="floor"),
        node("Conv", ["r", "v"], ["d"]), node("Shape", ["c"], ["s"]), node("Slice", ["s", "two", "four"], ["hw"]),
        node("Shape", ["d"], ["sd"]), node("Slice", ["sd", "zero", "two"], ["nc"]),
        node("Concat", ["nc", "hw"], ["all"], axis=0), node("Resize", ["d", "", "", "all"], ["u"], mode="nearest"),
        node("Resize", ["d", "", "", "s"], ["u2"], mode="nearest"), node("Add", ["c", "u"], ["a"]), node("Add", ["a", "u2"], ["y"]),
    ]  # fmt: skip
    tables = {
        "w": normal(8, 3, 3, 3), "v": normal(8, 8, 1, 1), "third": np.array([1, 1, 1 / 3, 1 / 3], np.float32),
        "zero": np.array([0]), "two": np.array([2]), "four": np.array([4]),
    }  # fmt: skip
    path = stored(nodes, tables, {"x": ("N", 3, "H", "W")}, tmp_path)
    made, kept = taken_back_and_written(path, tmp_path)
    assert any("down" in told for told in kept)
    assert off(path, made, [{"x": (2, 3, h, h + 3)} for h in (8, 17, 32, 33, 64)]) < 1e-4


def test_an_output_of_at_most_twenty_rows_varies_and_its_file_is_exported(tmp_path: Path) -> None:
    nodes = [
        node("MatMul", ["x", "m"], ["q"]), node("Slice", ["q", "zero", "twenty", "one"], ["c"]),
        node("CumSum", ["c", "axis"], ["y"]),
    ]  # fmt: skip
    tables = {
        "m": normal(16, 5), "zero": np.array([0]), "twenty": np.array([20]), "one": np.array([1]), "axis": np.array(1),
    }  # fmt: skip
    model = load_onnx(stored(nodes, tables, {"x": ("N", "T", 16)}, tmp_path))
    (tmp_path / "out").mkdir()
    given = OnnxFromFile().run(model, tmp_path / "out", silent)
    assert str(given.model.signature.outputs[0]) == "y:float32[N,T_1,5]"


def test_a_signature_that_does_not_hold_of_a_file_is_mended_in_the_file(tmp_path: Path) -> None:
    nodes = [node("MatMul", ["x", "m"], ["q"]), node("Slice", ["q", "zero", "twenty", "one"], ["y"])]
    tables = {"m": normal(16, 5), "zero": np.array([0]), "twenty": np.array([20]), "one": np.array([1])}
    model = load_onnx(stored(nodes, tables, {"x": ("N", "T", 16)}, tmp_path))
    wrong = Signature(model.signature.inputs, (TensorSpec.parse("y:float32[N,20,5]"),), {"T": 32})
    (tmp_path / "out").mkdir()
    with pytest.raises(StageError, match="the signature does not hold") as caught:
        OnnxFromFile().run(type(model)(model.path, wrong), tmp_path / "out", silent)
    assert "compress.save" not in caught.value.mend

"""A part of an ONNX graph that stays as it is inside a network of layers: run by ONNX Runtime, without gradients."""

from __future__ import annotations

import contextlib
import hashlib
import io
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import torch
from google.protobuf.message import DecodeError
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.onnx.ops import symbolic_multi_out

from compress.errors import StageError
from compress.formats.onnx.scope import inner_nodes
from compress.model.watched import Watched
from compress.vetting.onnx_wire import OnnxFileError, vet_onnx_bytes

__all__ = ["DOMAIN", "DTYPES", "ROOM", "OnnxPart"]

DOMAIN = "compress"
ROOM = "OnnxPart"  # the operator that keeps the part's place while torch exports what is around it
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
        torch.uint64, torch.float16, torch.float32, torch.float64,
    )
}  # fmt: skip
MOST = 1 << 30  # bytes of one part
_ROWS = (list, tuple)
ANY = -1  # a size that nothing is known of


class OnnxPart(nn.Module):
    """Nodes of an ONNX file as a layer; its inputs keep the sizes that they have, so nothing is pruned through it.

    Its own arguments are plain, so that a model file can hold it; the model itself is looked through before it runs.

    Args:
        size: bytes of the ONNX model, which are the buffer `model`.
        digest: hex SHA-256 of these.
        told: which nodes it is of, for errors.
        weights: how many numbers its tables hold.
        inputs: of each the dtype and its sizes, -1 where they vary; (input, axis) where one is as large as that.
        outputs: of each the dtype and by axis its size: a number; -1 where it hangs on values; (input, axis, times,
            plus, over) for (times · that size + plus) // over; (input, axis, input, axis) for a product of two.
    """

    def __init__(
        self,
        size: int,
        digest: str,
        told: str,
        weights: int,
        inputs: Sequence[Sequence[Any]],
        outputs: Sequence[Sequence[Any]],
    ) -> None:
        super().__init__()
        if type(size) is not int or not 0 < size <= MOST or type(weights) is not int or not 0 <= weights <= size:
            raise ValueError(f"a part of {size!a} bytes and {weights!a} numbers is none")
        if type(digest) is not str or type(told) is not str or not _is_form(inputs, outputs):
            raise ValueError("its inputs or outputs are not as a part's are described")
        self.size, self.digest, self.told, self.weights = size, digest, told, weights
        self.inputs, self.outputs = inputs, outputs
        self.model: torch.Tensor
        self.register_buffer("model", torch.zeros(size, dtype=torch.uint8))

    def forward(self, *x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What its nodes give, without gradients.

        Raises:
            StageError: it gets other sizes than the file has, or is no ONNX model that may be run.
            Exception: what ONNX Runtime refuses, by its own classes.
        """
        dtypes = [DTYPES[dtype] for dtype, *_ in self.outputs]
        if torch.compiler.is_exporting():
            for one, other in self._alike(x):
                torch._check(one == other)  # type: ignore[no-untyped-call]  # which the exporter proves, or there is no export
            shapes = [self._shape(sizes, x) for _, *sizes in self.outputs]
            given: Any = {"digest": self.digest}
            return tuple(symbolic_multi_out(f"{DOMAIN}::{ROOM}", x, given, dtypes=dtypes, shapes=shapes, version=1))
        self._refuse_other(x)
        if any(isinstance(each, FakeTensor) or each.is_meta for each in x):
            return tuple(
                x[0].new_empty(self._shape(sizes, x), dtype=dtype)
                for (_, *sizes), dtype in zip(self.outputs, dtypes, strict=True)
            )
        return self._run(x)

    def onnx(self) -> bytes:
        """The ONNX model, looked through.

        Raises:
            StageError: it is none, is another, or reaches beyond itself.
        """
        data = self.model.detach().cpu().numpy().tobytes()
        why = "" if hashlib.sha256(data).hexdigest() == self.digest else "its bytes are others than it says"
        try:
            if not why and vet_onnx_bytes(data, Path("/nonexistent")).outside:
                why = "it has weights outside of itself"
        except OnnxFileError as err:
            why = str(err)
        why = why or self._strange(data)
        if why:
            mend = "take the model file from where it was made"
            raise StageError(f"can't run a part that is in ONNX, {self.told}", why=why, mend=mend)
        return data

    def _strange(self, data: bytes) -> str:
        """Why it is no part, which others put into a graph by its inputs and outputs; "" where it is one."""
        try:
            model = onnx.ModelProto.FromString(data)
        except DecodeError as err:
            return str(err)
        graph = model.graph
        read, made = [value.name for value in graph.input], [value.name for value in graph.output]
        tables = {tensor.name for tensor in graph.initializer}
        nodes = {name for node in graph.node for name in node.output}
        if len(read) != len(self.inputs) or len(made) != len(self.outputs):
            return "it has other inputs or outputs than it says"
        if len({*read, *made, ""}) != len(read) + len(made) + 1:
            return "two of its inputs and outputs have one name, or one has none"
        if tables & {*read, *nodes}:
            return f"it holds a value for {min(tables & {*read, *nodes})!a}, which it is given, or computes"
        if not nodes.issuperset(made) or nodes & {*read}:
            return "an output is made by none of its nodes, or an input by one"
        if model.functions or graph.sparse_initializer or model.training_info:
            return "it has functions, sparse tensors or a training"
        if any(node.domain == DOMAIN for node in (*graph.node, *inner_nodes(graph))):
            return "it holds room for another part"
        return ""

    def _run(self, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        session, watched = _opened(self)
        declared = [DTYPES[dtype] for dtype, *_ in self.inputs]
        # In double precision around it, for a proof, it goes on in single precision inside.
        wide = any(
            each.dtype == torch.float64 and dtype == torch.float32 for each, dtype in zip(x, declared, strict=True)
        )
        names = [value.name for value in session.get_inputs()]
        arrays = {
            name: each.detach().to("cpu", dtype).contiguous().numpy()
            for name, each, dtype in zip(names, x, declared, strict=True)
        }
        found = [torch.as_tensor(each) for each in watched.run(session, None, arrays)]
        return tuple(
            each.to(x[0].device, torch.float64 if wide and each.dtype == torch.float32 else each.dtype)
            for each in found
        )

    def _refuse_other(self, x: tuple[torch.Tensor, ...]) -> None:
        if len(x) != len(self.inputs):
            raise StageError(f"can't run {self.told}", why=f"inputs: it takes {len(self.inputs)}", mend="give it these")
        for (_, *sizes), each in zip(self.inputs, x, strict=True):
            have = tuple(each.shape)
            fixed = [(want, size) for want, size in zip(sizes, have, strict=False) if isinstance(want, int)]
            if len(sizes) != len(have) or any(want not in (ANY, size) for want, size in fixed):
                why = f"{self.told} stays as it is in ONNX, and so does the size of what it reads"
                raise StageError(f"can't run {self.told}", why=why, mend="leave the channels that it reads")
        if any(one != other for one, other in self._alike(x)):
            why = f"two axes of what {self.told} reads are as large as each other in the file, and here they are not"
            raise StageError(f"can't run {self.told}", why=why, mend="give it inputs of the sizes that the file takes")

    def _alike(self, x: tuple[torch.Tensor, ...]) -> Iterator[tuple[Any, Any]]:
        """Pairs of sizes that are one."""
        for (_, *sizes), each in zip(self.inputs, x, strict=True):
            for axis, want in enumerate(sizes):
                if not isinstance(want, int):
                    yield each.shape[axis], x[want[0]].shape[want[1]]

    @staticmethod
    def _shape(sizes: Sequence[Any], x: Sequence[torch.Tensor]) -> list[Any]:
        return [_size(each, x) for each in sizes]


def _is_form(inputs: Any, outputs: Any) -> bool:
    """Whether inputs and outputs are described as `OnnxPart` says, by what a file may hold."""
    sides = (*inputs, *outputs) if type(inputs) in _ROWS and type(outputs) in _ROWS else ("",)
    if not all(type(each) in _ROWS and each and type(each[0]) is str and each[0] in DTYPES for each in sides):
        return False
    if not inputs or not outputs:
        return False
    if not all(_is_count(size) or _is_place(size, inputs) for each in inputs for size in each[1:]):
        return False
    return all(_is_count(rule) or _is_rule(rule, inputs) for each in outputs for rule in each[1:])


def _is_count(size: Any) -> bool:
    return type(size) is int and size >= ANY


def _is_place(place: Any, inputs: Sequence[Sequence[Any]]) -> bool:
    if type(place) not in _ROWS or len(place) != 2 or not all(type(each) is int for each in place):
        return False
    at, axis = place
    return bool(0 <= at < len(inputs) and 0 <= axis < len(inputs[at]) - 1)


def _is_rule(rule: Any, inputs: Sequence[Sequence[Any]]) -> bool:
    if type(rule) not in _ROWS or len(rule) not in (4, 5) or not all(type(each) is int for each in rule):
        return False
    places = [(rule[0], rule[1])] if len(rule) == 5 else [(rule[0], rule[1]), (rule[2], rule[3])]
    return all(0 <= at < len(inputs) and 0 <= axis < len(inputs[at]) - 1 for at, axis in places) and (
        len(rule) == 4 or rule[4] > 0
    )


def _size(rule: Any, x: Sequence[torch.Tensor]) -> Any:
    if isinstance(rule, int):
        return max(rule, 1) if rule == ANY else rule
    if len(rule) == 4:
        return x[rule[0]].shape[rule[1]] * x[rule[2]].shape[rule[3]]
    at, axis, times, plus, over = rule
    found = x[at].shape[axis]
    if (times, plus, over) == (1, 0, 1):
        return found
    return (times * found + plus) // over


_SESSIONS: weakref.WeakKeyDictionary[OnnxPart, tuple[ort.InferenceSession, Watched]] = weakref.WeakKeyDictionary()


def _opened(part: OnnxPart) -> tuple[ort.InferenceSession, Watched]:
    """Beside the layer, which is copied and written: a session can be neither."""
    if part not in _SESSIONS:
        data = part.onnx()
        options = ort.SessionOptions()
        options.log_severity_level = 4  # what it can't run is raised, too
        options.intra_op_num_threads = torch.get_num_threads()
        with contextlib.redirect_stderr(io.StringIO()):
            session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        _SESSIONS[part] = session, Watched(data, part.told)
    return _SESSIONS[part]

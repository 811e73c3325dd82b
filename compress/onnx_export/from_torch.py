"""Export a torch module to an ONNX file whose batch is really dynamic, proven against torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import onnx
import torch
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_tensor, uses_external_data
from torch import nn

from compress.artifact import Signature
from compress.console.meanwhile import told_meanwhile
from compress.data.dataset import Dataset
from compress.errors import StageError
from compress.formats.exported.decisions import Decisions, decisions_of, guards_told
from compress.formats.onnx.outline import LARGE
from compress.formats.onnx.scope import made_by
from compress.model import Arrays, Model, OnnxModel, TorchModel, example_inputs
from compress.model.infer import elsewhere, proven, runs_at
from compress.model.inputs import as_bound
from compress.model.unfused import unfused
from compress.onnx_export.attention import written_anew
from compress.onnx_export.equal import BATCHES, Wording, changes, equal_throughout, sizes_assumed
from compress.onnx_export.equal_elsewhere import Elsewhere, equal_elsewhere
from compress.onnx_export.exporter import around
from compress.onnx_export.file import save
from compress.onnx_export.kept_parts import put_back
from compress.onnx_export.recurrent import free_lengths
from compress.onnx_export.refusals import refused
from compress.onnx_export.scripted import attention_anew
from compress.onnx_export.traced_sizes import of_traced_sizes, told_of_traced
from compress.onnx_export.whole_division import divided_anew
from compress.runtime.backends import Backend, OnnxBackend, TorchBackend
from compress.runtime.memory import give_back
from compress.stage import Given, Progress

__all__ = ["OnnxFromTorch", "exported"]

# Of a difference that the usual sizes don't show.
ODD_SIZE = Wording(
    fails="write the forward for any size, without numbers made from shapes; or write a number in place of a dimension "
    "of which one size alone is used (`--input`, `inputs=` in compress.save)",
    differs="look in the forward for what a size decides, such as `if x.shape[1] > 50` or ceil_mode=True, and for "
    "sizes divided by negative numbers (of `-(size // -2)`: `(size + 1) // 2`), and write it without; or write a "
    "number in place of a dimension of which one size alone is used (`--input`)",
)

# What ONNX Runtime 1.23 and later, the one in Triton's containers, and TensorRT 10 and 11 all read.
OPSET = 20
IR_VERSION = 10
TRACING = "tracing: torch.export may take minutes over sizes that vary, or not end; Ctrl-C ends it"
TRACED_SECONDS = 30.0  # that it goes on before that is said, and until it is said again


@dataclass(frozen=True)
class OnnxFromTorch:
    """Opset 20, weights inside the file; compared with torch at several sizes.

    Attributes:
        data: samples to compare on, besides random inputs; typical ones, such as those for calibration.
    """

    data: Dataset | None = None

    name: ClassVar[str] = "onnx_from_torch"
    takes: ClassVar[type] = TorchModel
    gives: ClassVar[type] = OnnxModel

    @property
    def options(self) -> Mapping[str, Any]:
        data = None if self.data is None else self.data.sha256
        return {"opset": OPSET, "ir_version": IR_VERSION, "data": data}

    def check(self, model: Model) -> None:
        """Anything that loads can be tried."""

    def run(self, model: TorchModel, folder: Path, progress: Progress) -> Given:
        path = folder / "model.onnx"
        trials = len(BATCHES) + (self.data is not None)
        total = trials + 3
        progress(0, total, "tracing")
        # The sizes of a model loaded elsewhere may never have been tried.
        model = dataclasses.replace(model, signature=proven(model.module, model.signature).settled)
        runs = runs_at(model.module, model.signature.inputs)
        traced: list[str] = []
        with (
            guards_told(lambda program: traced.extend(of_traced_sizes(program))) as guards,
            told_meanwhile(lambda note: progress(0, total, note), TRACING, TRACED_SECONDS),
        ):
            program = _export(model, _traced_at(model.signature, runs), path)
        decisions = decisions_of(None if program is None else program.exported_program, guards, model.signature)
        del program  # it holds the weights again
        progress(1, total, "checking the file")
        _check_file(path, model.signature, model.module)
        given = OnnxModel(path, model.signature, model.ranges)
        torches, onnxes = TorchBackend(model, torch.get_num_threads()), OnnxBackend(given, threads=1)
        logistic = made_by("Sigmoid", onnx.load(path, load_external_data=False).graph)

        def compared() -> tuple[dict[str, dict[str, Any]], Elsewhere]:
            parity = equal_throughout(
                model.module, torches, onnxes, model.signature, self.data, progress, Wording(), steps=(1, 2),
                logistic=logistic, doubted=lambda inputs, err: _refuse_changing(torches, inputs, err),
            )  # fmt: skip
            return parity, equal_elsewhere(
                model.module, torches, onnxes, model.signature, progress, ODD_SIZE, done=(trials + 2, total),
                logistic=logistic, decided=decisions,
            )  # fmt: skip

        with unfused():  # torch's one operator for an encoder layer gives NaN for rows that a mask hides whole
            parity, others = told_of_traced(compared, list(dict.fromkeys(traced)), model.signature)
        progress(total, total, "equal to torch")
        worst = max(figures["max_abs_error"] for figures in parity.values())
        sizes = model.signature.sizes_text
        at = f"at batches {', '.join(map(str, BATCHES))}" if model.signature.batches else "at the sizes that are fixed"
        return Given(
            given,
            did=f"opset {OPSET}; equal to torch {at}"
            + (f" and on {self.data.source}" if self.data is not None else "")
            + (f", {sizes}" if sizes else "")
            + f" (largest difference {worst:.1e})",
            details={
                "opset": OPSET,
                "ir_version": IR_VERSION,
                "sizes": model.signature.sizes_told,
                "parity": parity,
                "equal_at_sizes": others.equal,
            },
            warnings=(*sizes_assumed(model.signature), *_decided(decisions, others)),
        )


def exported(model: TorchModel, path: Path) -> torch.export.ExportedProgram:
    """Write the file as the stage does, unproven, and give the program that it was made from."""
    runs = runs_at(model.module, model.signature.inputs)
    program = _export(model, _traced_at(model.signature, runs), path)
    _check_file(path, model.signature, model.module)
    if program is None or program.exported_program is None:
        raise StageError(
            "can't follow the export",
            why="torch.onnx tells nothing of the program that it wrote",
            mend="ask for --int8 static",
        )
    return program.exported_program


def _decided(decisions: Decisions, others: Elsewhere) -> Iterator[str]:
    """Warnings where torch takes sizes for which torch.export says nothing, or that nothing was compared at."""
    for dim, span in decisions.ranges.items():
        tried = [size for size in sorted(others.equal.get(dim, [])) if not span.holds(size)]
        if tried:
            at = ", ".join(map(str, tried))
            yield (
                f"What torch.export decided by the size of {dim} holds {span}: outside, the file was equal to torch at "
                f"{dim} = {at}, and nothing says that it is at others."
            )
    left = ((others.untried, "takes too much to be tried"), (others.too_many, "was not tried, as many others were"))
    for found, why in left:
        for dim, (size, text) in found.items():
            yield (
                f"What torch.export decided by a size holds for {text}: {dim} = {size} {why}, and the file may give "
                "other answers there than torch; keep to sizes for which it holds."
            )
    for dim, (sizes, text) in others.unseen.items():
        yield (
            f"What torch.export decided by a size holds for {text}: the model runs at none of the other sizes of {dim} "
            f"that were tried ({min(sizes)} to {max(sizes)}), and where it does, the file may give other answers than "
            f"torch; keep to sizes for which it holds."
        )
    for dim in others.nowhere:
        yield (
            f"{dim} was compared at none of the sizes that show what a size decides: the model runs at none that was "
            f"tried. Where one size of {dim} alone is used, write it in its place (`--input`)."
        )
    if decisions.unread:
        yield (
            "What torch.export decided by a size can't be read here, and sizes at which it does not hold were not "
            f"looked for: {decisions.unread[0][:200]}"
        )


def _refuse_changing(backend: Backend, inputs: Arrays, err: StageError) -> None:
    """Raise StageError where the model's own answers are others each time."""
    if changes(backend, inputs):
        raise StageError(
            "can't export a model whose answers are others each time",
            why="in torch, in eval mode, it gives other answers to the same inputs when they are given again: its "
            "forward draws random numbers, or writes into what it reads (a counter, a cache)",
            mend="leave that out where self.training is False, or make it an input",
        ) from err


def _traced_at(signature: Signature, runs: Callable[[Mapping[str, int]], bool]) -> dict[str, int]:
    """Sizes for the exporter, all unlike each other and above 1: it takes a 1 for a constant, and equals for one."""
    sizes = signature.at(2)
    batches = sorted(signature.batches)
    for dim in batches:
        sizes[dim] = next(size for size in range(2, len(sizes) + 3) if size not in sizes.values() or sizes[dim] == size)
    seen: set[int] = {1}
    again: list[str] = []
    for dim in (*batches, *(name for name in sizes if name not in batches)):
        again += [dim] if sizes[dim] in seen else []
        seen.add(sizes[dim])
    return elsewhere(runs, sizes, again)


def _export(model: TorchModel, sizes: Mapping[str, int], path: Path) -> torch.onnx.ONNXProgram | None:
    signature = model.signature
    arrays = example_inputs(signature.inputs, sizes)
    args = tuple(torch.from_numpy(arrays[spec.name]) for spec in signature.inputs)
    shapes = tuple(
        {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)} for spec in signature.inputs
    )
    # Names of one's own: the exporter does not see that an output's name is that of a tensor inside.
    names: dict[str, Any] = {
        "input_names": [f"signature_input_{index}" for index in range(len(signature.inputs))],
        "output_names": [f"signature_output_{index}" for index in range(len(signature.outputs))],
    }
    script = isinstance(model.module, torch.jit.ScriptModule)
    try:
        with around(), torch.no_grad():
            if script:
                axes = dict(zip(names["input_names"], shapes, strict=True))
                axes |= {
                    name: {axis: dim for axis, dim in enumerate(spec.shape) if isinstance(dim, str)}
                    for name, spec in zip(names["output_names"], signature.outputs, strict=True)
                }
                with attention_anew():
                    torch.onnx.export(
                        model.module, args, path, dynamo=False, opset_version=OPSET, dynamic_axes=axes, **names
                    )
                return None
            return torch.onnx.export(  # weights beside the file: inside, it would hold them some four times
                model.module, args, path, dynamo=True, opset_version=OPSET, external_data=True,
                dynamic_shapes=as_bound(model.module, shapes), verbose=False,
                custom_translation_table=written_anew() | divided_anew(), **names,
            )  # fmt: skip
    except Exception as err:  # the exporter wraps anything that the user's forward may do
        raise refused(err, model.module, signature) from err


def _name(model: onnx.ModelProto, names: Mapping[str, str]) -> None:
    """Give the graph's inputs and outputs their names, in place; a tensor inside that has one of these makes room."""
    given = {value.name for value in model.graph.input}
    for node in list(model.graph.node):  # an output that is an input has its name, and no node
        alike = len(node.input) == 1 and names.get(node.input[0]) == names.get(node.output[0], "")
        if node.op_type == "Identity" and alike and node.input[0] in given:
            model.graph.node.remove(node)
    inside = {name for node in model.graph.node for name in node.output} | {t.name for t in model.graph.initializer}
    new = {name: f"{name}_inside" for name in names.values() if name in inside} | dict(names)

    def rename(graph: onnx.GraphProto) -> None:
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = new.get(value.name, value.name)
        for node in graph.node:
            node.input[:] = [new.get(name, name) for name in node.input]
            node.output[:] = [new.get(name, name) for name in node.output]
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    rename(attribute.g)

    rename(model.graph)


def _check_file(path: Path, signature: Signature, module: nn.Module) -> None:
    """Check what the exporter wrote, and write it anew: with its names, weights inside where they fit."""
    give_back()
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        if uses_external_data(tensor) and ExternalDataInfo(tensor).length <= LARGE:
            load_external_data_for_tensor(tensor, str(path.parent))
    model.ir_version = IR_VERSION
    opset = next(entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
    if opset != OPSET:
        why = f"asked for opset {OPSET}, it wrote {opset}"
        raise StageError("torch.onnx wrote another opset", why=why, mend="install the torch that constraints.txt names")
    given = zip((value.name for value in model.graph.input), signature.inputs, strict=True)
    made = zip((value.name for value in model.graph.output), signature.outputs, strict=True)
    _name(model, {name: spec.name for name, spec in (*given, *made)})
    put_back(model, module, signature)
    free_lengths(model.graph)
    traced: dict[str, str] = {}
    for spec, value in zip(signature.inputs, model.graph.input, strict=True):
        dims = value.type.tensor_type.shape.dim
        for want, have in zip(spec.shape, dims, strict=True):
            if isinstance(want, str) and not have.dim_param:
                raise StageError(
                    "the exported model takes one size only",
                    why=f"the dimension {want!r} of {spec.name!r} became the constant {have.dim_value}",
                    mend="look in the forward for Python numbers made from shapes, such as int(x.shape[0])",
                )
            if isinstance(want, str):
                if traced.setdefault(have.dim_param, want) != want:
                    raise StageError(
                        "the exported model takes only inputs of equal sizes",
                        why=f"the dimensions {traced[have.dim_param]!r} and {want!r} became one",
                        mend="give them one name, if they are the same (`--input`, `inputs=` in compress.save)",
                    )
                have.dim_param = want
    save(model, path)

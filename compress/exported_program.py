"""Load an exported program (`torch.export.save`), whose file names its own inputs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.export.graph_signature import InputKind

from compress.artifact import Signature, TensorSpec
from compress.errors import CheckpointError
from compress.model import TorchModel, infer_outputs

__all__ = ["load_exported_program"]


def load_exported_program(path: Path) -> TorchModel:
    """Load a .pt2 file; it has no layers, so it can be exported and quantized but not pruned.

    Raises:
        CheckpointError: the file is damaged or from an incompatible release.
    """
    try:
        program = torch.export.load(path)
        module = program.module(check_guards=False)
    except Exception as err:  # torch.export gives many kinds for damaged files
        why = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        mend = "write it again with torch.export.save and this release of torch"
        raise CheckpointError(f"can't load the exported program {path}", why=why, mend=mend) from err
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    inputs = []
    for name in names:
        value = values[name]
        # Only the first dimension has a name of its own in the artifact; others are numbered.
        shape = tuple(
            size if isinstance(size, int) else "batch" if axis == 0 else f"dim_{axis}"
            for axis, size in enumerate(value.shape)
        )
        inputs.append(TensorSpec(name, str(value.dtype).removeprefix("torch."), shape))
    specs = tuple(inputs)
    return TorchModel(module, Signature(specs, infer_outputs(module, specs)), layered=False)

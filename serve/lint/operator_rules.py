"""Operators that not every Triton's ONNX Runtime has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from serve.lint.file_rules import onnx_files
from serve.lint.finding import Findings, warning
from serve.lint.model import Model
from serve.pack.onnx_reader import OnnxFile

__all__ = ["operator_rules"]

SINCE = {
    ("com.microsoft", "MatMulNBits"): ("layers with weights of few bits", "1.17", "24.03"),
    ("com.microsoft", "GatherBlockQuantized"): ("tables with weights of few bits", "1.23", "25.09"),
}
"""What it is, the ONNX Runtime that has it as `compress export --int4` writes it, and the Triton that has that; the
newest last. build.py of triton-inference-server/server tells which has which."""
FORMATS = {10: ("1.18", "24.05"), 11: ("1.23", "25.09")}
"""The ONNX Runtime that reads a version of ONNX's format first, and the Triton that has that."""


def operator_rules(model: Model, files: Mapping[Path, OnnxFile], *, container: bool) -> Findings:
    """What a Triton elsewhere may be too old for. The embedded one opens the file here, and says so itself.

    Args:
        model: any.
        files: what `read_onnx` found.
        container: it is for a Triton elsewhere.
    """
    if not container or model.backend != "onnxruntime":
        return
    for path in onnx_files(model):
        held = files.get(path, OnnxFile())
        needed = [since for operator, since in SINCE.items() if operator in held.operators]
        formats = [(f"ONNX's format {ir}", *since) for ir, since in FORMATS.items() if needed and held.ir >= ir]
        if needed:
            what, runtime, triton = max((*needed, *formats[-1:]), key=lambda each: tuple(map(int, each[2].split("."))))
            yield warning(
                model.name,
                f"{path.parent.name}/{path.name} has {what}, which ONNX Runtime reads since {runtime}",
                f"serve it by Triton {triton} or newer",
            )

"""Operators that torch.onnx writes for the sizes traced alone, so that the file is right at no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from torch.export import ExportedProgram
from torch.fx import Node

from compress.artifact import Signature
from compress.errors import StageError
from compress.onnx_export.equal import Wording

__all__ = ["of_traced_sizes", "told_of_traced"]

_Found = TypeVar("_Found")
MADE = Wording().made


def of_traced_sizes(program: ExportedProgram) -> list[str]:
    """What a program calls of these: pools to sizes other than 1 or computed, and inverse real Fourier transforms.

    Args:
        program: as torch.export gives it, before torch.onnx takes operators apart.
    """
    found = [_named(node) for node in program.graph.nodes if node.op == "call_function"]
    return list(dict.fromkeys(filter(None, found)))


def _named(node: Node) -> str:
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    if name.startswith("adaptive_") and len(node.args) > 1:
        sizes = node.args[1] if isinstance(node.args[1], Sequence) else (node.args[1],)
        fixed = any(not isinstance(size, int) or size != 1 for size in sizes)
        told = " × ".join("a computed size" if isinstance(size, Node) else str(size) for size in sizes)
        return f"{name} to {told}" if fixed else ""
    return name if name.startswith("fft_irfft") else ""


def told_of_traced(run: Callable[[], _Found], operators: Sequence[str], signature: Signature) -> _Found:
    """What a comparison gives, whose error tells of such operators in place of what forwards may do else.

    Args:
        run: compares.
        operators: of `of_traced_sizes`.
        signature: of what is compared.

    Raises:
        StageError: of the comparison.
    """
    try:
        return run()
    except StageError as err:
        free = [dim for dim in signature.told if dim not in signature.batches]
        if not (operators and free and err.what.startswith((f"{MADE} fails", f"{MADE} gives other answers"))):
            raise
        raise StageError(
            err.what,
            why=f"{err.why}; torch.onnx writes {', '.join(operators[:3])} for the sizes traced alone",
            mend=f"write the sizes that are used in place of {', '.join(free)} (`--input`, `inputs=` in compress.save)",
        ) from err

"""What `compress lint` shows in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compress.tensorrt.lint import Lint

__all__ = ["show_lint"]

HEADS = {
    "tensorrt": "For TensorRT; another runtime takes and refuses other things (--target cpu tells of ONNX Runtime):",
    "cpu": "For ONNX Runtime on a CPU (--target tensorrt tells of TensorRT on a GPU):",
}
RUNTIMES = {"tensorrt": "TensorRT", "cpu": "ONNX Runtime"}
COLOURS = {"error": "red", "slow": "yellow", "note": "blue"}


def show_lint(found: Lint, console: Console, *, layers: bool = False) -> None:
    """What it is for, what to mend, then how many layers compute in what; where they are asked for, each of them."""
    console.print(HEADS[found.target], markup=False, highlight=False, soft_wrap=True)
    _show_findings(found, console)
    told = ", ".join(f"{count} {kind}" for kind, count in found.counts.items())
    console.print(f"layers: {told}" + ("" if layers else " (--layers shows each)"), highlight=False)
    if layers:
        console.print(_table(found))


def _table(found: Lint) -> Table:
    table = Table(title=f"As {RUNTIMES[found.target]} would run it, read off the graph", title_justify="left")
    for column in ("layer", "kind", "computes in", "gives", "why"):
        table.add_column(column, overflow="fold")
    for layer in found.layers:
        style = "yellow" if layer.precision == "FP32" and len(found.counts) > 1 else ""
        table.add_row(
            escape(layer.name), escape(layer.kind), layer.precision, layer.gives, escape(layer.why), style=style
        )
    return table


def _show_findings(found: Lint, console: Console) -> None:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for item in found.findings:
        alike.setdefault((item.severity, item.what, item.mend), []).append(item.layer)
    for (severity, what, mend), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        where = f"[bold]{escape(names[0])}[/]{more} " if names[0] else ""
        console.print(f"{where}[{COLOURS[severity]}]{severity}[/]: {escape(what)}", highlight=False, soft_wrap=True)
        console.print(f"  mend: {mend}", markup=False, highlight=False, soft_wrap=True)
    if not found.findings:
        console.print("nothing to mend")

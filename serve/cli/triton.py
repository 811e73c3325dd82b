"""`serve triton`: parse, call, print."""

from __future__ import annotations

import os

from cyclopts import App
from rich.console import Console

__all__ = ["triton"]

triton = App(name="triton", help="The Triton that `serve up` starts, where the machine has none of its own.")
out = Console(highlight=False, soft_wrap=True)


@triton.command
def install(*, python: str | None = None) -> None:
    """Fetch Triton's Python wheel, and NumPy 1 for it, into the cache folder: 75 MB, beside the environment.

    Nothing of the environment changes. Under a Python for which there is no NumPy 1 (3.13 and later), Triton's Python
    models run under an earlier one, in an environment that is made beside it: packages that hooks import go there.

    Parameters
    ----------
    python
        Interpreter of 3.11 or 3.12 for Triton's Python models; by default the running one, else one of PATH or uv's.
    """
    from serve.triton.find import find_triton
    from serve.triton.wheel import install, private

    folder = install(python=python)
    wheel = private()
    out.print(f"Triton is in {folder}", markup=False)
    if wheel is not None and wheel.python is not None:
        out.print(f"packages that hooks import go there: pip --python {wheel.python} install …", markup=False)
    find_triton({name: value for name, value in os.environ.items() if name not in ("PATH", "TRITONSERVER")})

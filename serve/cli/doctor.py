"""`serve doctor`: what this machine has and lacks."""

from __future__ import annotations

import sys

from rich.console import Console

__all__ = ["doctor"]

out = Console(highlight=False, soft_wrap=True)
LACKS = 1


def doctor() -> None:
    """Say what this machine has and lacks: versions, cores, instruction sets, memory, Triton, ports.

    To paste into a report of a fault; no value of an environment variable is in it. Exit code 1 where something stands
    in the way.
    """
    from serve.doctor.run import examine

    found = examine()
    out.print(found.text(), markup=False)
    if not found.faults:
        return
    out.print("\nTo mend:", markup=False)
    for fact in found.faults:
        out.print(f"- {fact.name}: {fact.told}\n    {fact.mend}", markup=False)
    sys.exit(LACKS)

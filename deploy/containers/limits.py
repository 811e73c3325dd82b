"""How many processes and threads a pod may have: what `podman kube play` gives none of.

All containers run as one user, whose processes the kernel counts together. So what forks without end in one pod is
held by that pod's control group, before it leaves the others none.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path, PurePosixPath

from compress.errors import ServerError

__all__ = ["SHARES", "limit"]

SHARES = {"triton": Fraction(3, 8), "gateway": Fraction(1, 8), "prometheus": Fraction(1, 16)}
"""Of what one user may have in containers: two Tritons, as in a roll, and the others are fewer."""
MOST = 16384  # that is shared, where a user may have more, or any number
PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def limit(part: str, pod: str, pid: int) -> None:
    """Bound the processes of a pod.

    Args:
        part: of the application.
        pod: the pod's id, as it is in the name of its control group.
        pid: of its first process.

    Raises:
        ServerError: the pod has no control group for processes, or it can't be written.
    """
    try:
        group = _group(pod, (PROC / f"{pid}/cgroup").read_text())
        of_user = _of_user((PROC / f"{pid}/limits").read_text())
        (group / "pids.max").write_text(f"{int(min(of_user, MOST) * SHARES[part])}\n")
    except OSError as err:
        raise ServerError(
            "can't bound the number of a pod's processes",
            why=str(err),
            mend="run it as root, or where control groups of version 2 give your user the controller `pids`, "
            "as systemd does",
        ) from err


def _of_user(text: str) -> int:
    """As the process has it, and every container: `nproc` of Podman's default_ulimits."""
    words = next((line.split() for line in text.splitlines() if line.startswith("Max processes")), [])
    return int(words[2]) if len(words) > 2 and words[2].isdecimal() else MOST


def _group(pod: str, text: str) -> Path:
    """The pod's folder, above those of its containers."""
    rows = [line.split(":", 2) for line in text.splitlines()]
    roots = {path: CGROUPS / "pids" for _, kinds, path in rows if "pids" in kinds.split(",")}
    for path, root in (roots or {path: CGROUPS for _, kinds, path in rows if not kinds}).items():
        for each in (PurePosixPath(path), *PurePosixPath(path).parents):
            if pod in each.name:
                return root / each.relative_to("/")
    raise FileNotFoundError(f"the pod {pod[:12]} has no control group: {text.strip()}")

"""Run as a script between us and tritonserver: has the kernel stop the server when its parent dies, then becomes it.

Usage: python -I -S child.py PARENT_PID CPUS PROGRAM [ARGUMENT...], where CPUS is such as 0,1 or empty for all
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """The setting outlives the exec. SIGTERM, not SIGKILL: on it, tritonserver ends its Python stubs."""
    parent, cpus, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the kernel knew whom to tell
        sys.exit(1)
    os.execv(program, sys.argv[3:])  # noqa: S606 - becoming that program is what this script is for


if __name__ == "__main__":
    main()

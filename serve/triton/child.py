"""Run as a script between us and tritonserver: has the kernel stop the server when its parent dies, then becomes it.

What the server and its models make is this user's alone. The library that makes the regions of shared memory opens
them to all users whatever the umask (shm_open, then fchmod to 0644), so the kernel is told to leave that call out.

Usage: python -I -S child.py PARENT_PID CPUS PROGRAM [ARGUMENT...], where CPUS is such as 0,1 or empty for all
"""

import ctypes
import os
import resource
import signal
import struct
import sys

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SET_MODE_FILTER, ALLOW_SPECULATION = 1, 4  # without the second, older kernels make the whole process slow
# By machine: its AUDIT_ARCH, and the numbers of seccomp(2) and fchmod(2).
CALLS = {"x86_64": (0xC000003E, 317, 91), "aarch64": (0xC00000B7, 277, 52)}
OPEN_TO_ALL = 0o644
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of the filter's machine: a word of the call, jump if equal, the verdict
ALLOW, LEAVE_OUT = 0x7FFF0000, 0x00050000  # the second answers 0, as the call would


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def main() -> None:
    """The setting outlives the exec. SIGTERM, not SIGKILL: on it, tritonserver ends its Python stubs."""
    parent, cpus, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    os.umask(0o077)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each connection is a file of the server's
    # What starts it may have bounded itself. Each of its threads, and a model has some thirty, takes a stack of this.
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    keep_closed()
    if os.getppid() != parent:  # it died before the kernel knew whom to tell
        sys.exit(1)
    os.execv(program, sys.argv[3:])  # noqa: S606 - becoming that program is what this script is for


def keep_closed() -> None:
    """Have `fchmod(FILE, 0644)` do nothing, here and in what is started.

    Where the kernel refuses, regions are open to other users until `private.close_regions` sees them.
    """
    if os.uname().machine not in CALLS:
        return
    machine, seccomp, fchmod = CALLS[os.uname().machine]
    # Of struct seccomp_data: the call's number at 0, the machine at 4, the second argument at 24.
    steps = [
        (LOAD, 0, 0, 4), (EQUAL, 0, 5, machine),
        (LOAD, 0, 0, 0), (EQUAL, 0, 3, fchmod),
        (LOAD, 0, 0, 24), (EQUAL, 0, 1, OPEN_TO_ALL),
        (RETURN, 0, 0, LEAVE_OUT), (RETURN, 0, 0, ALLOW),
    ]  # fmt: skip
    code = b"".join(struct.pack("HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    library = ctypes.CDLL(None)
    library.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    library.syscall(ctypes.c_long(seccomp), SET_MODE_FILTER, ALLOW_SPECULATION, ctypes.byref(program))


if __name__ == "__main__":
    main()

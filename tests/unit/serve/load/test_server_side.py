"""What a server takes of this machine is told of the server's own processes, or of none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serve.load.figures.server_side import _processes

LISTENS = """
import pathlib, socket, sys
if sys.argv[1]:
    pathlib.Path("/proc/self/comm").write_text(sys.argv[1])
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process names itself in /proc")
@pytest.mark.parametrize("name", ["", "conmon", "docker-proxy", "rootlessport"])
def test_who_listens_for_a_container_is_not_taken_for_the_server(name: str) -> None:
    command = [sys.executable, "-c", LISTENS, name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as listener:
        assert listener.stdout is not None
        found = [process.pid for process in _processes(int(listener.stdout.readline()))]
        listener.communicate("")
    assert found == ([] if name else [listener.pid])

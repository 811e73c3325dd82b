"""What a server takes of this machine is told of a server that is known to be one, or of none, with what is there."""

from __future__ import annotations

import html
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from serve.load.figures.result import LoadResult
from serve.load.figures.server_side import _processes
from serve.load.report.page import page
from serve.load.report.report import LoadReport
from serve.load.report.terminal import print_report
from serve.load.run import run_load
from tests.load_servers import at_once, options, served

LISTENS = """
import pathlib, socket, sys
pathlib.Path("/proc/self/comm").write_text({name!r})
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
"""
FORWARDS = """
import asyncio, sys
async def pipe(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def forward(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    await asyncio.gather(pipe(reader, back), pipe(there, writer))
async def main():
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()
asyncio.run(main())
"""


@contextmanager
def listening(command: list[str], cwd: Path | None = None) -> Iterator[tuple[int, int]]:
    """A process that prints the port at which it listens; its id and the port."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd) as listener:
        assert listener.stdout is not None
        try:
            yield listener.pid, int(listener.stdout.readline())
        finally:
            listener.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="a process names itself in /proc")
@pytest.mark.parametrize("name", ["tritonserver", "python3.11", "docker-proxy", "tritonserver2", "a forwarder"])
def test_of_what_listens_a_triton_alone_is_known_by_its_name(name: str) -> None:
    with listening([sys.executable, "-c", LISTENS.format(name=name)]) as (pid, port):
        found, untold = _processes(port)
    assert [process.pid for process in found] == ([pid] if name == "tritonserver" else [])
    assert untold == ("" if name == "tritonserver" else f"{name} is at that port")


@pytest.mark.parametrize(
    ("command", "known"),
    [(["serve", "up"], True), (["serve", "gateway"], True), (["-m", "serve", "up"], True), (["serve", "load"], False),
     (["host", "-L", "serve", "up"], False), (["proxy", "up"], False)],
)  # fmt: skip
def test_this_project_s_gateway_is_known_by_its_command(command: list[str], known: bool, tmp_path: Path) -> None:
    (tmp_path / "serve").mkdir()
    script = LISTENS.format(name="python")
    for name in ("serve/__main__.py", "serve/__init__.py", "proxy", "host"):
        (tmp_path / name).write_text("" if name.endswith("__init__.py") else script)
    with listening([sys.executable, *command], tmp_path) as (pid, port):
        found, untold = _processes(port)
    assert [process.pid for process in found] == ([pid] if known else [])
    assert bool(untold) != known


def test_a_forwarder_s_cpu_is_not_told_for_the_server_s() -> None:
    with served(at_once) as server:
        port = server.url.rpartition(":")[2]
        with listening([sys.executable, "-c", FORWARDS, port]) as (pid, there):
            name = psutil.Process(pid).name()
            urls = f"http://127.0.0.1:{there}", server.url
            results = [run_load(options(server, url=url)) for url in urls]
    through, direct = results
    assert through.count > 0
    assert (through.server, through.server_untold) == (None, f"{name} is at that port")
    assert direct.server is not None
    assert direct.server_untold == ""
    again = LoadResult.from_dict(json.loads(json.dumps(through.to_dict(), default=str)))
    assert again.server_untold == through.server_untold
    report = LoadReport((through,), "a", machine={"cpu": "any"})
    shown = Console(width=120, record=True)
    print_report(report, shown)
    assert f"not measured: {name} is at that port" in shown.export_text()
    assert f"server's CPU not measured: {name} is at that port" in html.unescape(page(report))

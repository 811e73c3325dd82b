"""`serve doctor`: facts of this machine, each fault with its mend, and nothing that is secret."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from serve.cli.main import main
from serve.doctor.run import examine
from serve.triton.ports import Ports


def test_versions_cores_instructions_memory_and_triton_are_told() -> None:
    told = examine(ports=()).text()
    for name in ("compress-serve", "Python", "processor", "instructions", "memory", "shared memory", "disk", "Triton"):
        assert f"\n{name} " in f"\n{told}", name
    assert "torch 2." in told
    assert "tritonserver" in told


def test_a_port_that_is_taken_is_told_with_the_flag_that_changes_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        (fault,) = examine(ports=(port,)).faults
    assert fault.name == f"port {port}"
    assert "0 takes a free one" in fault.mend
    assert examine(ports=(port,)).faults == ()


def test_the_ports_are_those_of_serve_up() -> None:
    from serve.doctor.run import PORTS

    assert set(vars(Ports()).values()) <= set(PORTS)


def test_a_triton_that_cannot_be_used_is_a_fault() -> None:
    (fault,) = examine(ports=(), environ={"TRITONSERVER": "/nonexistent/tritonserver"}).faults
    assert fault.name == "Triton"
    assert "TRITONSERVER" in fault.told


def test_no_value_of_the_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVE_API_KEY", "a-secret-of-somebody")
    assert "a-secret-of-somebody" not in examine(ports=()).text()


def test_a_fault_is_told_last_and_gives_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITONSERVER", "/nonexistent/tritonserver")
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert "To mend:\n- Triton: can't run the tritonserver" in capsys.readouterr().out


def test_it_needs_no_extra() -> None:
    """Whoever lacks an extra is who runs it."""
    code = (
        "import sys, serve.doctor.run as run; run.examine(ports=()); "
        "assert not {'torch', 'fastapi', 'tritonclient', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)

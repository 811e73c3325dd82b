"""The dependencies have wheels where nobody here runs them; skipped without a package index."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve.triton.wheel import TRITON
from tests.resolve import SYSTEMS, new_pip, resolve

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pip")
    if not new_pip(folder):
        pytest.skip("no package index can be reached")
    return folder


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_compresses_and_serves_can_be_installed(pip: Path, system: str) -> None:
    wheels, why = resolve(pip, SYSTEMS[system], ".[compress,serve]")
    assert not why
    (torch,) = [name for name in wheels if name.startswith("torch-")]
    assert SYSTEMS[system].markers["platform_machine"] in torch


@pytest.mark.parametrize("system", SYSTEMS)
def test_triton_has_a_wheel_on_linux_alone(pip: Path, system: str) -> None:
    wheels, _ = resolve(pip, SYSTEMS[system], f"nvidia-pytriton=={TRITON}")
    assert bool(wheels) == system.startswith("Linux")

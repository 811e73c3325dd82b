"""What each part may reach, and what the packages promise to offer."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys

import pytest

import compress
import serve

MODULES = sorted(
    module.name
    for package in (compress, serve)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__") and ".backends.onnxruntime" not in module.name
)


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    "module",
    ["serve", "serve.cli.main", "serve.up.run", "serve.pack.write", "serve.gateway.app", "serve.load.run"],
)
def test_serve_leaves_torch_and_onnx_alone(module: str) -> None:
    loaded = fresh(f"import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})").split()
    assert not {"torch", "onnx", "onnxruntime", "matplotlib"} & set(loaded)


@pytest.mark.parametrize("module", ["compress", "compress.artifact", "compress.errors", "compress.cli"])
def test_an_artifact_is_read_without_torch(module: str) -> None:
    assert "torch" not in fresh(f"import sys, {module}; print(*sys.modules)").split()


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith(("child", "hooks.packed.model"))])
def test_what_a_module_offers_is_there(module: str) -> None:
    loaded = importlib.import_module(module)
    for name in getattr(loaded, "__all__", []):
        assert hasattr(loaded, name), f"{module}.{name}"


def test_the_python_api_has_what_it_names() -> None:
    assert set(compress.__all__) == {
        "Artifact",
        "ExportOptions",
        "OptimizeOptions",
        "export",
        "load",
        "optimize",
        "save",
    }
    offered = fresh("import compress; print([callable(getattr(compress, n)) for n in compress.__all__ * 2])")
    assert "False" not in offered, "a module of the same name would hide a function"
    with pytest.raises(AttributeError, match="nothing"):
        compress.nothing  # noqa: B018


@pytest.mark.parametrize("package", ["compress", "serve"])
def test_each_command_runs_as_a_module_too(package: str) -> None:
    version = subprocess.run([sys.executable, "-m", package, "--version"], check=True, capture_output=True, text=True)
    assert version.stdout.strip() == compress.__version__ == serve.__version__

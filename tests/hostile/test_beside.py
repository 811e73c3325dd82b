"""What stands beside a file that somebody was given, under a module's name, is not run by looking at the file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve_models import hook_file, tiny_artifact

NAMES = (
    "numpy", "onnxruntime", "json", "time", "onnx", "torch", "multiprocessing", "runpy", "usercustomize", "sitecustomize",
    "ctypes", "tempfile",
)  # fmt: skip
COMMANDS = {
    "inspect": ["compress", "inspect", "artifact", "--roofline"],
    "measure": ["compress", "measure", "artifact/model.onnx", "copy.onnx"],
    "pack": ["serve", "pack", "artifact/model.onnx", "--repository", "models", "--name", "tiny"],
    "lint": ["serve", "lint", "packed"],
    "hooks new": ["serve", "hooks", "new", "--task", "tabular", "--artifact", "artifact", "--out", "made/hooks.py"],
    "hooks check": ["serve", "hooks", "check", "hooks/my_hooks.py", "--artifact", "artifact"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_modules_beside_a_file_are_not_run(name: str, tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "artifact")
    shutil.copyfile(tmp_path / "artifact/model.onnx", tmp_path / "copy.onnx")
    hook_file(tmp_path / "hooks")
    command, *arguments = COMMANDS[name]
    script = str(Path(sys.executable).parent / command)
    if name == "lint":
        pack = [script, "pack", "artifact", "--repository", "packed", "--name", "tiny"]
        subprocess.run(pack, cwd=tmp_path, check=True, capture_output=True)
    for module in NAMES:
        (tmp_path / f"{module}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({module!r} + ' ')\n")
    done = subprocess.run([script, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_process_that_a_command_starts_has_the_current_folder_on_its_path(tmp_path: Path) -> None:
    """Those of multiprocessing, too, which are told no flags."""
    program = (
        "import sys, os, concurrent.futures as f, multiprocessing as m, PACKAGE as p\n"
        "if __name__ == '__main__':\n"
        "    sys.argv = ['x', '--help']\n"
        "    try:\n        p.main()\n    except SystemExit:\n        pass\n"
        "    with f.ProcessPoolExecutor(1, m.get_context('spawn')) as pool:\n"
        "        pool.submit(os.getpid).result()\n"
    )
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "runpy.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for package in ("compress.__main__", "serve.cli.main"):
        (tmp_path / "program.py").write_text(program.replace("PACKAGE", package))
        command = [sys.executable, str(tmp_path / "program.py")]
        subprocess.run(command, cwd=tmp_path / "here", capture_output=True, check=True)
        assert not (tmp_path / "ran").exists()

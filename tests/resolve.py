"""Whether everything can be installed on systems that nobody here has: python -m tests.resolve [EXTRA...]

pip's own resolver is asked, for wheels alone and under constraints.txt, and downloads none of them. Markers such as
`platform_machine` it reads off the machine that it runs on, whatever --platform says: they are told it, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_BOOT = """
import json, sys
from pip._vendor.packaging import markers
real, told = markers.default_environment, json.loads(sys.argv.pop(1))
markers.default_environment = lambda: {**real(), **told}
from pip._internal.cli.main import main
sys.exit(main())
"""


class System(NamedTuple):
    """One that things are to be installed on.

    Attributes:
        tags: what its wheels may be called, as `--platform` takes it.
        markers: what requirements may ask of it.
    """

    tags: tuple[str, ...]
    markers: dict[str, str]


SYSTEMS = {
    "Linux on ARM64, glibc 2.35": System(
        ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 36))),
        {"platform_machine": "aarch64", "sys_platform": "linux", "platform_system": "Linux"},
    ),
    "macOS 14 on ARM64": System(
        tuple(f"macosx_{major}_{minor}_{kind}" for major, minor in ((11, 0), (12, 0), (13, 0), (14, 0))
              for kind in ("arm64", "universal2")),
        {"platform_machine": "arm64", "sys_platform": "darwin", "platform_system": "Darwin"},
    ),
}  # fmt: skip


def new_pip(folder: Path) -> bool:
    """Fetch a pip that resolves by metadata alone (before 23.3 it downloads the wheels); False without a network."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "pip>=25"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def resolve(pip: Path, system: System, what: str) -> tuple[list[str], str]:
    """Ask pip.

    Args:
        pip: the folder that `new_pip` has filled.
        what: a requirement, or `.[EXTRA,EXTRA]` of this project.

    Returns:
        The wheels by name, and what stands in the way, "" where nothing does.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ["--dry-run", "--ignore-installed", "--only-binary=:all:", "--quiet", "--report", str(report)]
        options += ["--implementation=cp", "--python-version=3.11", "--abi=cp311", "--abi=abi3", "--abi=none"]
        options += [f"--platform={tag}" for tag in system.tags]
        pinned = (
            ["-c", "constraints.txt"] if what.startswith(".") else ["--no-deps"]
        )  # others are of a folder of theirs
        command = [sys.executable, "-c", _BOOT, json.dumps(system.markers), "install", *options, *pinned, what]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": str(pip)}
        )
        if done.returncode:
            return [], done.stderr.strip()
        rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    return sorted(Path(row["download_info"]["url"]).name for row in rows), ""


def main() -> int:
    extras = sys.argv[1:] or [
        ".[compress,serve]",
        ".[all]",
        "nvidia-pytriton==0.7.0",
        "onnxruntime-gpu",
        "tensorrt-cu13",
    ]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        if not new_pip(Path(folder)):
            print("no package index can be reached", file=sys.stderr)
            return 2
        for name, system in SYSTEMS.items():
            for what in extras:
                wheels, why = resolve(Path(folder), system, what)
                failed += bool(why) and what.startswith(".")
                told = f"{len(wheels)} wheels" if wheels else why.splitlines()[-1]
                print(f"{name:28} {what:26} {told}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

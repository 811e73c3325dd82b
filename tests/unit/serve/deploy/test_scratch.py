"""What a Triton that was killed left in its pod's memory and /tmp is gone before the next one starts, by the real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve.deploy.cluster.render import files
from serve.deploy.cluster.workload import workload_of
from serve.deploy.options import RenderOptions

ROOT = Path(__file__).parents[4]
OPTIONS = RenderOptions(gateway_image="registry.example/gateway:1.0", image="registry.example/triton:26.07-pillow")
SHM, TMP = "/dev/shm", "/tmp"  # noqa: S108  of a pod
NOBODY = 65534
# Deeper than any path can be written, made from within.
DEEP = (
    "cd own; name=$(printf %0200d 0); mkdir -p $name/closed; echo x > $name/closed/file; chmod 0 $name/closed; "
    "for _ in $(seq 40); do mkdir around; mv $name around; mv around $name; done"
)
STARTED = "#!/bin/sh\nprintf '%s\\n' started \"$@\"\n"
Object = dict[str, Any]


@pytest.fixture(scope="module")
def containers() -> dict[str, Object]:
    """Of Triton, by who takes it."""
    written = files(workload_of(ROOT / "model_repository"), OPTIONS)
    deployment = next(yaml.safe_load_all(written["base/triton.yaml"]))
    (pod,) = [each for each in yaml.safe_load_all(written["podman/triton.yaml"]) if each["kind"] == "Pod"]
    return {
        "Kubernetes": deployment["spec"]["template"]["spec"]["containers"][0],
        "Podman": pod["spec"]["containers"][0],
    }


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where any user may work: root would be kept from nothing."""
    made = Path(tempfile.mkdtemp(prefix="scratch-"))
    made.chmod(0o777)
    try:
        yield made
    finally:
        shutil.rmtree(made)


def as_user(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    user = NOBODY if os.geteuid() == 0 else None
    path = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    return subprocess.run(words, cwd=folder, env=path, user=user, capture_output=True, text=True, check=False)


def start(folder: Path, container: Object) -> list[str]:
    """The container's words, with its two folders here; what a tritonserver that stands for Triton's was given."""
    (folder / "bin").mkdir(exist_ok=True)
    server = folder / "bin/tritonserver"
    server.write_text(STARTED)
    server.chmod(0o755)
    words = [*container["command"], *container["args"]]
    here = [word.replace(SHM, f"{folder}/shm").replace(f"{TMP} ", f"{folder}/own ") for word in words]
    text = " ".join(here).replace(str(folder), "")
    assert SHM not in text, "this machine's own are not touched"
    assert TMP not in text, "nor these"
    done = as_user(here, folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def make(folder: Path, script: str) -> None:
    done = as_user(["sh", "-ec", f"mkdir -p {folder}/shm {folder}/own; {script}"], folder)
    assert done.returncode == 0, done.stderr


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for part in ("shm", "own") for path in (folder / part).rglob("*"))


@pytest.mark.parametrize("who", ["Kubernetes", "Podman"])
@pytest.mark.parametrize(
    "script",
    [
        "echo region > shm/triton_python_backend_shm_region_1; mkdir -p own/a/b; echo x > own/a/b/c",
        "echo x > shm/.hidden; mkfifo own/pipe; : > 'own/a name\nof -two lines'",
        "mkdir -p shm/a/b; echo x > shm/a/b/c; chmod 0 shm/a/b; chmod 0 shm/a",
        "echo x > shm/file; chmod 0 shm/file; chmod 500 shm; mkdir own/a; chmod 0 own",
        DEEP,
    ],
    ids=["regions", "odd names", "closed folders", "closed volumes", "deep folders"],
)
def test_what_the_one_before_left_is_gone_and_triton_gets_its_words(
    folder: Path, script: str, who: str, containers: dict[str, Object]
) -> None:
    container = containers[who]
    make(folder, script)
    assert start(folder, container) == ["started", *container["args"]]
    assert left(folder) == []
    assert start(folder, container)[0] == "started", "with nothing to remove, too"


def test_a_link_is_removed_and_what_it_leads_to_stays(folder: Path, containers: dict[str, Object]) -> None:
    make(
        folder, "mkdir kept; echo x > kept/file; chmod 500 kept; ln -s ../kept shm/link; ln -s ../../kept/file own/link"
    )
    start(folder, containers["Kubernetes"])
    assert left(folder) == []
    assert (folder / "kept/file").read_text() == "x\n"
    assert (folder / "kept").stat().st_mode & 0o777 == 0o500


@pytest.mark.skipif(os.geteuid() != 0, reason="a file of somebody else's needs root")
def test_what_can_not_be_removed_keeps_triton_from_nothing(folder: Path, containers: dict[str, Object]) -> None:
    make(folder, "echo x > own/mine")
    theirs = folder / "shm/theirs"
    theirs.mkdir()
    (theirs / "file").write_text("x")
    assert start(folder, containers["Kubernetes"])[0] == "started"
    assert left(folder) == ["shm/theirs", "shm/theirs/file"]


def test_it_starts_where_a_folder_is_not_there(folder: Path, containers: dict[str, Object]) -> None:
    assert start(folder, containers["Kubernetes"])[0] == "started"

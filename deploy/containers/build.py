"""`make images`: each image built, measured, and listed."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from compress.errors import ServerError
from deploy.containers.engine import Engine, missing
from deploy.containers.say import say
from deploy.containers.sbom import write_sbom
from serve.doctor.before import CPU_WHEELS, own_sources
from serve.repository.read import read_models
from serve.up.container import requirements_of

__all__ = [
    "IMAGES",
    "PLAYED",
    "Built",
    "Image",
    "bases",
    "build",
    "build_all",
    "check_images",
    "check_machine",
    "tag_of",
]

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy/docker"
VERSION = "0.1.0"
MB = 1_000_000
# NVIDIA's of the wheel's year, as it lies on a disk: 15.5 GB by the word of its maintainers.
NVIDIAS = ("nvcr.io/nvidia/tritonserver:24.06-py3", 15_500)


@dataclass(frozen=True)
class Image:
    """What is built.

    Attributes:
        name: of it, and of its Dockerfile.
        base: the build argument that names its base; "" for none.
        packages: whether there is something to list.
    """

    name: str
    base: str = "PYTHON"
    packages: bool = True


@dataclass(frozen=True)
class Built:
    """An image that was built.

    Attributes:
        tag: by which it is run.
        id: of its content.
        layers: digests of the file systems that it is made of.
        size_bytes: of its files.
        seconds: that the build took.
    """

    tag: str
    id: str
    layers: tuple[str, ...]
    size_bytes: int
    seconds: float


IMAGES = (
    Image("gateway"),
    Image("triton-cpu"),
    Image("prometheus", base="DEBIAN"),
    Image("compress"),
    Image("models", base="", packages=False),
)
PLAYED = ("gateway", "triton-cpu", "prometheus")


def tag_of(name: str) -> str:
    return f"localhost/compress-serve-{name}:{VERSION}"


def bases(names: Iterable[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The base images, by their build argument: of the environment, else of the Dockerfiles."""
    found = {}
    for image in IMAGES:
        if image.name in names and image.base:
            lines = (DOCKER / f"{image.name}.Dockerfile").read_text().splitlines()
            default = next(line.partition("=")[2] for line in lines if line.startswith(f"ARG {image.base}="))
            found[image.base] = environ.get(f"{image.base}_IMAGE") or f"docker.io/library/{default}"
    return found


def check_machine(engine: Engine, names: Iterable[str], *, play: bool) -> None:
    """Say all that is missing before anything is built or run.

    Args:
        engine: that is to be used.
        names: of images that are to be built.
        play: whether pods are to run, too.

    Raises:
        ServerError: something is.
    """
    names = tuple(names)
    lacks = missing(engine, list(dict.fromkeys(bases(names).values())), play=play)
    if lacks:
        why, mend = ("; ".join(dict.fromkeys(words)) for words in zip(*lacks, strict=True))
        what = "can't build the images here" if names else "can't run containers here"
        raise ServerError(what, why=why, mend=mend)


def check_images(engine: Engine, names: Iterable[str]) -> None:
    """Images that are to be run are here: they are in no registry.

    Raises:
        ServerError: one is not.
    """
    if lacks := [name for name in names if not engine.has_image(tag_of(name))]:
        mend = f"make images; or: python -m deploy.containers build {' '.join(lacks)}"
        raise ServerError("can't run containers here", why=f"not built yet: {', '.join(lacks)}", mend=mend)


def build(engine: Engine, image: Image, repository: Path, *, cache: bool = True, root: Path = ROOT) -> Built:
    """Build one.

    Args:
        engine: builds it.
        image: which.
        repository: whose hooks a Triton shall be able to run, and what the image "models" holds.
        cache: take steps of an earlier build that nothing has changed.
        root: of the sources.

    Raises:
        ServerError: the build failed; its own words stand above.
    """
    file = root / f"deploy/docker/{image.name}.Dockerfile"
    context, tag = (repository if image.name == "models" else root), tag_of(image.name)
    words = ["build", "--file", str(file), "--tag", tag, *([] if cache else ["--no-cache"])]
    words += [f"--build-arg={name}={base}" for name, base in bases([image.name]).items()]
    words += [f"--build-arg=TORCH_INDEX={CPU_WHEELS}"] if image.name == "compress" and not _told_where() else []
    if engine.podman:
        ignored = file.with_name(f"{file.name}.dockerignore")
        words += ["--format=docker", f"--timestamp={_epoch()}"]  # the other format has no place for health checks
        words += [f"--ignorefile={ignored}"] if ignored.exists() else []
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        command = [engine.command, *words, *shlex.split(os.environ.get("BUILD_FLAGS", "")), str(context)]
        environ = os.environ | {"SOURCE_DATE_EPOCH": _epoch(), "DOCKER_BUILDKIT": "1"}
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False, env=environ)
        if done.returncode:
            log.seek(0)
            say(log.read()[-4000:])
            raise ServerError(f"can't build {tag}", why=f"exit code {done.returncode}", mend="see what it said above")
    seconds = time.perf_counter() - begun
    (told,) = engine.ask("image", "inspect", tag)
    return Built(tag, told["Id"], tuple(told["RootFS"]["Layers"]), told["Size"], seconds)


def build_all(engine: Engine, names: Iterable[str], repository: Path, folder: Path) -> list[Built]:
    """Build those named, print a line of each, and write their bills of materials.

    Args:
        engine: builds them.
        names: of images.
        repository: as for `build`.
        folder: gets NAME.cdx.json.
    """
    (DOCKER / "hooks.txt").write_text("".join(f"{text}\n" for text in requirements_of(read_models(repository))))
    done = []
    for image in IMAGES:
        if image.name not in names:
            continue
        made = build(engine, image, repository)
        words = f"{made.tag:45} {made.size_bytes / MB:8,.1f} MB  {made.seconds:5.0f} s"
        if image.packages:
            path = folder / f"{image.name}.cdx.json"
            words += f"  {write_sbom(engine, made.tag, path)} packages: {path}"
        say(words)
        if image.name == "triton-cpu":
            say(f"{NVIDIAS[0]:45} {NVIDIAS[1]:8,.1f} MB  by the word of its maintainers, for comparison")
        done.append(made)
    return done


def _told_where() -> bool:
    """Whether pip's configuration says where packages are: then it has to reach the build, by BUILD_FLAGS."""
    asked = [sys.executable, "-m", "pip", "config", "list"]
    return own_sources(subprocess.run(asked, capture_output=True, text=True, check=False).stdout)


def _epoch() -> str:
    """Of every file: of no commit, as layers of an earlier build are taken again; ZIP knows no earlier time."""
    return os.environ.get("SOURCE_DATE_EPOCH") or "315532800"

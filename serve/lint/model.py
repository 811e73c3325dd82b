"""A model folder as lint sees it: the whole configuration, and what stands beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.config.names import leads_out
from serve.config.pbtxt import parse, read_config

__all__ = ["AOTI", "FILES", "Model", "read"]

FILES = {
    "onnxruntime": "model.onnx", "openvino": "model.xml", "tensorrt": "model.plan", "pytorch": "model.pt",
    "python": "model.py",
}  # fmt: skip
"""The model's file, by backend."""
AOTI = "torch_aoti"
"""The platform of AOTInductor packages, which came with Triton 25.06; its backend is pytorch, too."""
PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "ensemble": "ensemble",
}


@dataclass(frozen=True)
class Model:
    """One folder of a repository.

    Attributes:
        folder: where it stands.
        config: the protobuf message of its config.pbtxt; any field of Triton's schema may be set.
        backend: what runs it: "ensemble", the name that config.pbtxt gives, or the one that its files tell; or "".
        present: the versions that Triton sees: folders named by a number without zeros in front.
        served: those that the version policy takes.
    """

    folder: Path
    config: Any
    backend: str
    present: tuple[int, ...]
    served: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def is_ensemble(self) -> bool:
        return self.backend == "ensemble"

    def file(self, version: int) -> Path:
        """The model's file in a version."""
        usual = "model.pt2" if self.config.platform == AOTI else FILES.get(self.backend, "")
        return self.folder / str(version) / (self.config.default_model_filename or usual)


def read(folder: Path) -> Model:
    """Read a model's folder.

    Raises:
        OSError: config.pbtxt is missing or can't be read.
        ValueError: it is no text, no Triton configuration, or names a model file outside the version's folder.
    """
    config = parse(read_config(folder / "config.pbtxt"))
    named = config.default_model_filename
    if leads_out(named):  # no rule may open what stands elsewhere
        raise ValueError(f"default_model_filename {named!r} leads out of the version's folder")
    present = tuple(
        sorted(int(sub.name) for sub in folder.iterdir() if sub.is_dir() and sub.name == str_of_number(sub.name))
    )
    return Model(folder, config, _backend(folder, config, present), present, _served(config, present))


def str_of_number(name: str) -> str | None:
    """The name as Triton would write it, None when it is no version."""
    return str(int(name)) if name.isascii() and name.isdecimal() else None


def _backend(folder: Path, config: Any, present: tuple[int, ...]) -> str:
    if config.backend:
        return str(config.backend)
    if config.platform:
        return PLATFORMS.get(config.platform, "")
    for backend, file in FILES.items():
        there = any((folder / str(version) / file).is_file() for version in present)
        if config.default_model_filename == file or (not config.default_model_filename and there):
            return backend
    return ""


def _served(config: Any, present: tuple[int, ...]) -> tuple[int, ...]:
    policy = config.version_policy
    kind = policy.WhichOneof("policy_choice")
    if kind == "all":
        return present
    if kind == "specific":
        return tuple(version for version in present if version in policy.specific.versions)
    newest = policy.latest.num_versions if kind == "latest" else 1
    return present[len(present) - newest :] if 0 < newest < len(present) else present if newest > 0 else ()

"""A pruned candidate as it would be shipped, without the training that changes no size and no time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compress.model import Model, OnnxModel
from compress.stage import Stage

__all__ = ["finished"]


def finished(model: Model, tail: Sequence[Stage], folder: Path) -> OnnxModel:
    """The file that further stages make of a model.

    Args:
        model: of torch.
        tail: stages that end in an ONNX file.
        folder: is there, and empty; it holds what they write.
    """
    for index, stage in enumerate(tail):
        beside = folder / str(index)
        beside.mkdir()
        model = stage.run(model, beside, lambda _done, _total, _note: None).model
    assert isinstance(model, OnnxModel)  # noqa: S101  the tail ends in a file
    return model

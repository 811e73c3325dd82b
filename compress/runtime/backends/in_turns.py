"""Several large files as backends of which one is in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compress.formats.files import files_of
from compress.model import Arrays, Model, OnnxModel
from compress.runtime.backends import Backend, open_model
from compress.runtime.memory import give_back

__all__ = ["InTurns", "open_all"]


class _Slot:
    """Room for one opened model."""

    def __init__(self) -> None:
        self._owner: InTurns | None = None
        self._opened: Backend | None = None

    def of(self, owner: InTurns, opening: Callable[[], Backend]) -> Backend:
        """What this owner has opened; another's is closed before it is opened anew."""
        if self._owner is not owner or self._opened is None:
            self._owner = self._opened = None
            give_back()
            self._opened, self._owner = opening(), owner
        return self._opened


class InTurns:
    """A file that is opened where it is asked, once more where another one of its slot was asked meanwhile.

    Answers are those of a backend that stays open. The first call after another one's takes as long as opening does:
    whoever takes the time makes one that does not count.
    """

    def __init__(self, model: OnnxModel, threads: int, slot: _Slot) -> None:
        self._model, self._threads, self._slot = model, threads, slot
        opened = self._here()
        self._runtime, self._emulated = opened.runtime, opened.emulated

    @property
    def runtime(self) -> str:
        return self._runtime

    @property
    def emulated(self) -> bool:
        return self._emulated

    def infer(self, inputs: Arrays) -> Arrays:
        return self._here().infer(inputs)

    def _here(self) -> Backend:
        return self._slot.of(self, lambda: open_model(self._model, threads=self._threads))


def open_all(models: Mapping[str, Model], *, threads: int) -> dict[str, Backend]:
    """A backend for each model, by name; of files with weights beside them only one is in memory at a time.

    These are larger than the one file that serves a model (`compress.onnx_export.file.MOST`): each open one has its
    weights in memory once, in ONNX Runtime's own order.
    """
    slot = _Slot()
    return {
        name: InTurns(model, threads, slot)
        if isinstance(model, OnnxModel) and len(files_of(model.path)) > 1
        else open_model(model, threads=threads)
        for name, model in models.items()
    }

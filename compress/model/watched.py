"""Runs of ONNX files that may have no end: a Loop goes on for as long as what the file computes says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime as ort

from compress.errors import ResourceError, StageError, ToolkitError
from compress.vetting.loops import SETTING, loop_seconds, may_not_end
from compress.vetting.memory import memory_left

__all__ = ["Watched", "without_end"]

GRACE = 2.0
"""Seconds that ONNX Runtime has to stop: it looks before each node, and a body without any has no node."""
EVERY = 0.25
LEAST_MEMORY = 512 << 20
"""Bytes that are left to everybody else: a loop that collects what its rounds give takes all there is."""


def without_end(name: str, seconds: float) -> StageError:
    """What a run that took too long is told as."""
    return StageError(
        f"{name} does not come to an end",
        why=f"it has a loop, and one run of it takes more than {seconds:g} s",
        mend=f"give the loop a trip count; if it is only slow, set {SETTING} to more seconds",
    )


class Watched:
    """Runs of one file that are given up when they take too long, or all memory.

    Each is in a thread of its own, which is left to itself where ONNX Runtime does not stop: it ends with the process.

    Args:
        model: the path of the file, or its bytes.
        name: what it is told by, where it has no path.
    """

    def __init__(self, model: Path | bytes, name: str = "") -> None:
        self._name = model.name if isinstance(model, Path) else name
        self._needed, self._seconds = may_not_end(model), loop_seconds()
        self._ended: object = None

    def run(self, session: ort.InferenceSession, outputs: list[str] | None, inputs: dict[str, Any]) -> list[Any]:
        """What a session gives. What has ended once on these very inputs runs as if there were no watch.

        Raises:
            StageError, ResourceError: it was given up. What ONNX Runtime raises is raised as it is.
        """
        if not self._needed or self._ended is inputs:
            found: list[Any] = session.run(outputs, inputs)
            return found
        found = self.call(lambda options: session.run(outputs, inputs, options))
        self._ended = inputs
        return found

    def call(self, run: Callable[[ort.RunOptions], Any]) -> Any:
        """The same for any call of a session that takes options."""
        if not self._needed:
            return run(ort.RunOptions())
        options = ort.RunOptions()
        options.log_severity_level = 4  # that it was told to stop
        answers: list[Any] = []
        failures: list[BaseException] = []

        def work() -> None:
            try:
                answers.append(run(options))
            except BaseException as err:  # raised where it was asked for
                failures.append(err)

        worker = threading.Thread(target=work, name="onnx-loop", daemon=True)
        worker.start()
        given_up: ToolkitError | None = None
        try:
            given_up = self._awaited(worker)
        finally:  # a Ctrl-C, too
            if worker.is_alive():
                options.terminate = True
                worker.join(GRACE)
        if given_up is not None:
            raise given_up
        if failures:
            raise failures[0]
        return answers[0]

    def _awaited(self, worker: threading.Thread) -> ToolkitError | None:
        """Why it was given up; None where it ended."""
        begun = time.monotonic()
        while True:
            worker.join(EVERY)
            if not worker.is_alive():
                return None
            if time.monotonic() - begun > self._seconds:
                return without_end(self._name, self._seconds)
            if (left := memory_left()) < LEAST_MEMORY:
                return ResourceError(
                    f"{self._name} takes all memory",
                    why=f"it has a loop, and while that ran {left / 1e6:,.0f} MB of memory were left to this machine",
                    mend="give the loop a trip count; if it is meant to be so large, take a larger machine",
                )

"""The task metric through a server, hooks included, held against what `compress` measured of the artifact."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compress.artifact import Artifact
from compress.errors import ArtifactError, RepositoryError, ServerError
from serve.client import infer_content

__all__ = ["LABEL_KEYS", "Verified", "files_of", "samples_of", "verify"]

LABEL_KEYS = ("label", "labels", "y", "target", "targets")
IN_FLIGHT = 8
MEND = "give a .npz with an array for each input of the served model, and one of labels; or a folder of files by label"


@dataclass(frozen=True)
class Sample:
    """One item: values by the served model's input names, or a file's content, and its label."""

    content: bytes
    content_type: str
    label: str


@dataclass(frozen=True)
class Verified:
    """What came of it.

    Attributes:
        count: samples asked.
        right: answers that name the label.
        expected: the artifact's own accuracy; None when nothing says it.
        tolerance: how far the two may be apart, as a share.
        wrong: a few of the wrong answers, as (number of the sample, label, answer).
    """

    count: int
    right: int
    expected: float | None
    tolerance: float
    wrong: tuple[tuple[int, str, str], ...]

    @property
    def accuracy(self) -> float:
        """Right answers as a share."""
        return self.right / self.count

    @property
    def holds(self) -> bool:
        """Whether the server answers as well as the artifact does; true when nothing was expected."""
        return self.expected is None or abs(self.accuracy - self.expected) <= self.tolerance + 1e-12


def verify(
    url: str,
    name: str,
    evaluation: Path,
    *,
    artifact: Path | None = None,
    tolerance: float = 0.0,
    output: str | None = None,
    timeout_s: float = 30.0,
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Verified:
    """Ask the served model for each sample, and count the right answers.

    An answer is right when the output is the label itself, as hooks give it, or when its largest element stands at the
    label's place.

    Args:
        url: of the gateway.
        name: of the model.
        evaluation: samples, see `samples_of`.
        artifact: the folder that was packed; its last stage's accuracy is what is expected.
        tolerance: how far the two may be apart, as a share (0.002 is 0.2 points).
        output: which output to look at; the first by default.
        timeout_s: for one answer.
        on_progress: told how many of how many are done.

    Raises:
        RepositoryError: the samples can't be read.
        ServerError: the server refuses one.
        ArtifactError: the artifact can't be read, or no accuracy was measured of it.
    """
    expected = None if artifact is None else _measured(artifact)
    samples = list(samples_of(evaluation))
    right = 0
    wrong: list[tuple[int, str, str]] = []
    with ThreadPoolExecutor(IN_FLIGHT) as pool:

        def ask(sample: Sample) -> dict[str, Any]:
            return infer_content(url, name, sample.content, sample.content_type, timeout_s=timeout_s)

        for number, (sample, answer) in enumerate(zip(samples, pool.map(ask, samples), strict=True)):
            found = _answer(answer, output)
            if found == sample.label:
                right += 1
            elif len(wrong) < 5:
                wrong.append((number, sample.label, found))
            on_progress(number + 1, len(samples))
    return Verified(len(samples), right, expected, tolerance, tuple(wrong))


def samples_of(evaluation: Path) -> Iterator[Sample]:
    """The samples of a file or folder.

    A .npz holds an array for each input of the served model, by its name, with an item a row, and the labels under
    "label" or "y". A folder holds files in subfolders that are named after the label, or a labels.csv with the columns
    file and label.

    Raises:
        RepositoryError: it is none of these, or empty.
    """
    samples = list(_of_folder(evaluation) if evaluation.is_dir() else _of_arrays(evaluation))
    if not samples:
        raise RepositoryError(f"can't verify with {evaluation}", why="there is no sample in it", mend=MEND)
    yield from samples


def _of_arrays(path: Path) -> Iterator[Sample]:
    try:
        with np.load(path, allow_pickle=False) as data:
            arrays = {name: data[name] for name in data.files}
    except (OSError, ValueError) as err:
        raise RepositoryError(f"can't verify with {path}", why=str(err), mend=MEND) from err
    key = next((key for key in LABEL_KEYS if key in arrays), None)
    if key is None:
        raise RepositoryError(
            f"can't verify with {path}", why=f"none of its arrays {', '.join(arrays)} is called label or y", mend=MEND
        )
    labels = arrays.pop(key).reshape(-1)
    odd = next((name for name, array in arrays.items() if len(array) != len(labels)), None)
    if odd is not None or not arrays:
        why = f"{odd!r} has another number of rows than {key!r}" if odd else "it has labels only"
        raise RepositoryError(f"can't verify with {path}", why=why, mend=MEND)
    for row, label in enumerate(labels.tolist()):
        values = {name: _plain(array[row]) for name, array in arrays.items()}
        yield Sample(json.dumps(values).encode(), "application/json", _word(label))


def _of_folder(folder: Path) -> Iterator[Sample]:
    for path, label in files_of(folder):
        try:
            yield Sample(path.read_bytes(), "application/octet-stream", label)
        except OSError as err:
            raise RepositoryError(f"can't verify with {path}", why=str(err), mend=MEND) from err


def files_of(folder: Path) -> list[tuple[Path, str]]:
    """The files of a folder with their labels, see `samples_of`.

    Raises:
        RepositoryError: its labels.csv has other columns.
    """
    table = folder / "labels.csv"
    if table.is_file():
        with table.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        if rows and not {"file", "label"} <= set(rows[0]):
            raise RepositoryError(f"can't verify with {table}", why="it has no columns file and label", mend=MEND)
        return [(folder / row["file"], row["label"]) for row in rows]
    return [(path, path.parent.name) for path in sorted(folder.glob("*/*")) if path.is_file()]


def _plain(item: Any) -> Any:
    value = np.asarray(item).tolist()
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _word(value: object) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _answer(answer: dict[str, Any], output: str | None) -> str:
    """The label that an answer names."""
    outputs = answer.get("outputs", {})
    if output is None:
        output = next(iter(outputs), "")
    if output not in outputs:
        raise ServerError(
            f"there is no output {output!r}", why=f"the model gives {', '.join(outputs)}", mend="name one with --output"
        )
    value = outputs[output]
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, list):
        scores: Sequence[float] = np.asarray(value, dtype=np.float64).reshape(-1).tolist()
        return str(max(range(len(scores)), key=scores.__getitem__))
    return _word(value)


def _measured(artifact: Path) -> float:
    found = Artifact.load(artifact)
    accuracies = [stage.measured.accuracy for stage in found.stages if stage.measured.accuracy is not None]
    if not accuracies:
        raise ArtifactError(
            f"can't verify against {artifact}",
            why="no accuracy was measured when it was made",
            mend="export it with --eval, or leave --artifact out to see the accuracy alone",
        )
    return accuracies[-1]

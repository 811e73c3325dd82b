"""The task metric through a server, hooks included, held against what `compress` measured of the artifact."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compress.artifact import Artifact
from compress.errors import ArtifactError
from compress.vetting.texts import read_json
from serve.http.ask import infer_content
from serve.verify.chance import difference
from serve.verify.labels import label_of, numbers_of
from serve.verify.samples import Sample, samples_of
from serve.verify.who import Served

__all__ = ["Verified", "VerifiedPart", "verify"]

IN_FLIGHT = 8
SHOWN = 5  # wrong answers


@dataclass(frozen=True)
class VerifiedPart:
    """What came of the answers of one model, or of one version of it.

    Attributes:
        by: who answered, as model/version; "" where nothing is released under the name.
        count: samples that it answered.
        right: answers that name the label.
        expected: the artifact's own accuracy; None where it is not to be held against it.
        tolerance: how far the two may be apart, as a share; None leaves to chance what it explains.
        wrong: a few of the wrong answers, as (number of the sample, label, answer).
        proven: whether the server said that this one serves the artifact's own file; None where it does not say, or
            no artifact was given.
        measured_on: samples that the artifact's accuracy is of, where its report says so.
    """

    by: str
    count: int
    right: int
    expected: float | None
    tolerance: float | None
    wrong: tuple[tuple[int, str, str], ...]
    proven: bool | None = None
    measured_on: int | None = None

    @property
    def accuracy(self) -> float:
        """Right answers as a share."""
        return self.right / self.count

    @property
    def difference(self) -> tuple[float, float]:
        """Interval of the accuracy less the one that was expected."""
        return difference(self.accuracy, self.count, self.expected or 0.0, self.measured_on)

    @property
    def holds(self) -> bool:
        """Whether the server answers as well as the artifact does; true when nothing was expected."""
        if self.expected is None or abs(self.accuracy - self.expected) <= (self.tolerance or 0.0) + 1e-12:
            return True
        low, high = self.difference
        return self.tolerance is None and low <= 0.0 <= high


@dataclass(frozen=True)
class Verified:
    """What came of it.

    Attributes:
        parts: one for each model or version that answered, who answered most first.
        release: of the name, in words; "" where nothing is released under it.
    """

    parts: tuple[VerifiedPart, ...]
    release: str = ""

    @property
    def count(self) -> int:
        """Samples asked."""
        return sum(part.count for part in self.parts)

    @property
    def holds(self) -> bool:
        """Whether each that serves the artifact's file answers as well as the artifact does."""
        return all(part.holds for part in self.parts)


@dataclass
class _Tally:
    count: int = 0
    right: int = 0
    wrong: list[tuple[int, str, str]] = field(default_factory=list)


def verify(
    url: str,
    name: str,
    evaluation: Path,
    *,
    artifact: Path | None = None,
    tolerance: float | None = None,
    output: str | None = None,
    timeout_s: float = 30.0,
    key: str = "",
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Verified:
    """Ask the served model for each sample, and count the right answers, by who gave them.

    An answer is right when the output is the label itself, as hooks give it, or when its largest element stands at the
    label's place. Where the artifact names its classes, a label may be its name or its number.

    Args:
        url: of the gateway.
        name: of the model.
        evaluation: samples, see `samples_of`.
        artifact: the folder that was packed; its last stage's accuracy is what is expected of who serves its file.
            Whether anybody does is looked at first.
        tolerance: how far the two may be apart, as a share (0.002 is 0.2 points); None allows what chance explains.
        output: which output to look at; the first by default.
        timeout_s: for one answer.
        key: where the gateway asks for one.
        on_progress: told how many of how many are done.

    Raises:
        RepositoryError: the samples can't be read.
        ServerError: the server refuses one.
        ArtifactError: the artifact can't be read, is another one than is served, or has no accuracy to compare with;
            or none of the answers came from who serves it.
    """
    served = Served(url, name, timeout_s, key)
    loaded = None if artifact is None else Artifact.load(artifact)
    numbers: dict[str, str] = {}
    expected: tuple[float, int | None] | None = None
    if loaded is not None:
        served.check(loaded)
        expected, numbers = (_accuracy(loaded), _samples_of(loaded)), numbers_of(loaded)
    samples = list(samples_of(evaluation, served.inputs))
    tallies: dict[str, _Tally] = {}
    with ThreadPoolExecutor(IN_FLIGHT) as pool:

        def ask(sample: Sample) -> dict[str, Any]:
            return infer_content(url, name, sample.content, sample.content_type, timeout_s=timeout_s, key=key)

        for number, (sample, answer) in enumerate(zip(samples, pool.map(ask, samples), strict=True)):
            tally = tallies.setdefault(str(answer.get("served_by") or ""), _Tally())
            tally.count += 1
            found = label_of(answer, output)
            if numbers.get(found, found) == numbers.get(sample.label, sample.label):
                tally.right += 1
            elif len(tally.wrong) < SHOWN:
                tally.wrong.append((number, sample.label, found))
            on_progress(number + 1, len(samples))
    parts = []
    for by, tally in sorted(tallies.items(), key=lambda each: -each[1].count):
        proven = None if loaded is None else served.serves(by or name, loaded)
        wanted = (None, None) if expected is None or proven is False else expected
        wrong = tuple(tally.wrong)
        parts.append(VerifiedPart(by, tally.count, tally.right, wanted[0], tolerance, wrong, proven, wanted[1]))
    if loaded is not None and all(part.proven is False for part in parts):
        raise served.none_of(loaded, len(samples))
    return Verified(tuple(parts), "" if served.release is None else str(served.release))


def _accuracy(artifact: Artifact) -> float:
    """Of the packed file: the last stage's."""
    last = artifact.stages[-1].measured if artifact.stages else None
    if last is not None and last.accuracy is not None:
        return last.accuracy
    what = f"can't verify against {artifact.folder}"
    mend = "leave --artifact out to see the served model's accuracy alone"
    if last is None or last.metric is None:
        why = "nothing was measured on data when it was made"
        raise ArtifactError(what, why=why, mend=f"{mend}, or export it again with --eval data that has labels")
    why = f"it was judged by {last.metric}; how many samples it names rightly is not known"
    raise ArtifactError(what, why=why, mend=f"{mend}; an export with class labels in --eval would tell")


def _samples_of(artifact: Artifact) -> int | None:
    """Samples that the artifact was judged on."""
    try:
        samples = read_json(artifact.folder / "report.json")["evaluation"]["samples"]
    except (OSError, ValueError, KeyError, TypeError):  # an artifact is whole without a report
        return None
    return samples if type(samples) is int and 0 < samples < 1 << 63 else None

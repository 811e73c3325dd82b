"""The task metric through a server, hooks included, held against what `compress` measured of the artifact."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.artifact import Artifact
from compress.errors import ArtifactError, ServerError
from compress.vetting.texts import read_json
from serve.http.ask import config_of, infer_content
from serve.verify.samples import Sample, samples_of

__all__ = ["Verified", "label_of", "verify"]

IN_FLIGHT = 8


@dataclass(frozen=True)
class Verified:
    """What came of it.

    Attributes:
        count: samples asked.
        right: answers that name the label.
        expected: the artifact's own accuracy; None when nothing says it.
        tolerance: how far the two may be apart, as a share.
        wrong: a few of the wrong answers, as (number of the sample, label, answer).
        proven: whether the server said that it serves the artifact's own file; None where it does not say.
        measured_on: samples that the artifact's accuracy is of, where its report says so.
    """

    count: int
    right: int
    expected: float | None
    tolerance: float
    wrong: tuple[tuple[int, str, str], ...]
    proven: bool | None = None
    measured_on: int | None = None

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
    key: str = "",
    on_progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Verified:
    """Ask the served model for each sample, and count the right answers.

    An answer is right when the output is the label itself, as hooks give it, or when its largest element stands at the
    label's place. Where the artifact names its classes, a label may be its name or its number.

    Args:
        url: of the gateway.
        name: of the model.
        evaluation: samples, see `samples_of`.
        artifact: the folder that was packed; its last stage's accuracy is what is expected. Whether its file is the
            one that is served is looked at first.
        tolerance: how far the two may be apart, as a share (0.002 is 0.2 points).
        output: which output to look at; the first by default.
        timeout_s: for one answer.
        key: where the gateway asks for one.
        on_progress: told how many of how many are done.

    Raises:
        RepositoryError: the samples can't be read.
        ServerError: the server refuses one.
        ArtifactError: the artifact can't be read, is another one than is served, or has no accuracy to compare with.
    """
    expected, proven, measured_on = None, None, None
    numbers: dict[str, str] = {}
    if artifact is not None:
        loaded = Artifact.load(artifact)
        proven = _same_file(url, name, loaded, timeout_s, key)
        expected, measured_on = _accuracy(loaded), _samples_of(loaded)
        numbers = _numbers(loaded)
    inputs = [str(each.get("name", "")) for each in _config(url, name, timeout_s, key).get("input") or ()]
    samples = list(samples_of(evaluation, inputs))
    right = 0
    wrong: list[tuple[int, str, str]] = []
    with ThreadPoolExecutor(IN_FLIGHT) as pool:

        def ask(sample: Sample) -> dict[str, Any]:
            return infer_content(url, name, sample.content, sample.content_type, timeout_s=timeout_s, key=key)

        for number, (sample, answer) in enumerate(zip(samples, pool.map(ask, samples), strict=True)):
            found = label_of(answer, output)
            if numbers.get(found, found) == numbers.get(sample.label, sample.label):
                right += 1
            elif len(wrong) < 5:
                wrong.append((number, sample.label, found))
            on_progress(number + 1, len(samples))
    return Verified(len(samples), right, expected, tolerance, tuple(wrong), proven, measured_on)


def _numbers(artifact: Artifact) -> dict[str, str]:
    """The number of each class by its name, where no name is a number itself."""
    names = artifact.processor.labels if artifact.processor else ()
    return {} if any(map(str.isdecimal, names)) else {name: str(number) for number, name in enumerate(names)}


def _same_file(url: str, name: str, artifact: Artifact, timeout_s: float, key: str) -> bool | None:
    """Whether the served network is the artifact's own file; None where the server does not say.

    Raises:
        ArtifactError: it is another one: then their accuracies have nothing to do with each other.
    """
    served = _served_sha256(url, name, timeout_s, key)
    if served is None:
        return None
    if served == artifact.sha256:
        return True
    raise ArtifactError(
        f"can't verify against {artifact.folder}",
        why=f"{name} serves another file: sha256 {served[:12]}…, where {artifact.model_file} of the artifact has "
        f"{artifact.sha256[:12]}…",
        mend=f"name the artifact that {name} was packed from, or pack this one and serve it, or leave --artifact out",
    )


def _served_sha256(url: str, name: str, timeout_s: float, key: str) -> str | None:
    """What `serve pack` wrote into the configuration of the network: the model itself, or one that it asks."""
    config = _config(url, name, timeout_s, key)
    own = _parameter(config, "model_sha256")
    if own:
        return own
    steps = (config.get("ensemble_scheduling") or {}).get("step") or ()
    behind = [_parameter(config, "network"), *(str(step.get("model_name", "")) for step in steps)]
    found = (_parameter(_config(url, part, timeout_s, key), "model_sha256") for part in behind if part)
    return next(filter(None, found), None)


def _config(url: str, name: str, timeout_s: float, key: str) -> dict[str, Any]:
    try:
        return config_of(url, name, timeout_s=timeout_s, key=key)
    except ServerError:  # it does not tell; whether it answers at all is seen with the samples
        return {}


def _parameter(config: dict[str, Any], key: str) -> str:
    value = (config.get("parameters") or {}).get(key) or {}
    return str(value.get("string_value", "")) if isinstance(value, dict) else ""


def _word(value: object) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def label_of(answer: dict[str, Any], output: str | None) -> str:
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
    if not isinstance(value, list):
        return _word(value)
    flat = list(_flat(value))
    if flat and all(isinstance(each, str) for each in flat):
        return str(flat[0])  # labels come best first
    if not flat or not all(isinstance(each, int | float) for each in flat):
        raise ServerError(
            f"the output {output!r} names no label",
            why="it is neither a text, nor texts, nor a score for each class",
            mend="name an output that does with --output",
        )
    scores: Sequence[float] = [float(each) for each in flat]
    return str(max(range(len(scores)), key=scores.__getitem__))


def _flat(value: Any) -> Iterator[Any]:
    """The elements of a tensor in JSON, an item's; None for what is no tensor."""
    if len({len(each) if isinstance(each, list) else -1 for each in value}) > 1:
        yield None
        return
    for each in value:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each


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

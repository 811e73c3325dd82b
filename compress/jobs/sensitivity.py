"""`compress sensitivity`: how much each group of layers loses by pruning, alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from compress.console.wording import Note, assumed_of
from compress.data.dataset import Dataset
from compress.errors import ToolkitError
from compress.evaluate.evaluation import judged
from compress.evaluate.halves import halves
from compress.evaluate.metrics import Metric
from compress.jobs.branch import Silent
from compress.jobs.on_ray import OnRay, Task, on_ray, reads_of
from compress.jobs.original import Original, known_by, original
from compress.jobs.places import claimed
from compress.jobs.recipe import data_at, inputs_of, with_sizes
from compress.model import OnnxModel, TorchModel
from compress.onnx_export.torch_from_onnx import taken_back
from compress.options import SensitivityOptions
from compress.options.ranges import check_ranges
from compress.pipeline import Watcher, hashing_shown
from compress.prune.known_channels import Known
from compress.prune.sensitivity import GroupSensitivity, Sensitivity, Thinning, layer_sensitivity
from compress.report.sensitivity import write_sensitivity
from compress.stage import Progress
from compress.storage.steady import refuse_changed

__all__ = ["sensitivity"]

TURNS = 2  # tasks for each that runs at the same time: layers take unlike long


def sensitivity(checkpoint: str | Path, options: SensitivityOptions, *, watcher: Watcher | None = None) -> Sensitivity:
    """Prune one group of layers at a time and judge the model; write sensitivity.json and sensitivity.html.

    Args:
        checkpoint: any file that `compress.load` reads and that still has its layers.
        options: how to.
        watcher: is told how it goes on; by default nobody is.

    Raises:
        ToolkitError: input that can't be used.

    Examples:
        >>> found = sensitivity("model.pt", SensitivityOptions(output=Path("sensitive"), eval="eval.npz", samples=50))
        >>> sorted(found.limits(max_drop=100))
        ['0']
    """
    check_ranges(options)
    checkpoint, watcher = Path(checkpoint), watcher or Silent()
    # Files are added to the folder, it is not replaced: it may be the one that this runs in.
    written = [options.output / f"sensitivity.{ending}" for ending in ("json", "html")]
    beside = options.output.parent / f"{options.output.name}.work"
    with (
        claimed(written[0], inputs=inputs_of(options, checkpoint), also=written[1:]), hashing_shown(watcher),
        on_ray(options, beside) as cluster,
    ):  # fmt: skip
        return _sensitivity(checkpoint, options, watcher, cluster)


def _sensitivity(checkpoint: Path, options: SensitivityOptions, watcher: Watcher, cluster: OnRay | None) -> Sensitivity:
    judging = _opened(checkpoint, options)
    progress = watcher.started("sensitivity")
    elsewhere = None if cluster is None else partial(_elsewhere, cluster, checkpoint, options, progress)
    found = layer_sensitivity(
        judging.model,
        judging.data,
        judging.metric,
        ratios=options.ratios,
        samples=options.samples,
        importance=options.importance,
        progress=progress,
        elsewhere=elsewhere,
    )
    told = judging.told
    found = dataclasses.replace(
        found,
        data=judging.sha256,
        model=known_by(judging.file),
        notes=(*assumed_of(judging.model.assumed), *(each for each in told if isinstance(each, Note))),
        warnings=(*(each for each in told if not isinstance(each, Note)), *found.warnings),
    )
    refuse_changed()
    write_sensitivity(found, options.output, options.max_drop)
    if cluster is not None and options.shared is None:  # what nobody looks for again
        cluster.shared.clear()
    return found


@dataclass(frozen=True)
class _Judging:
    """What is thinned, and what it is judged by: the same wherever it is opened."""

    file: Original
    model: TorchModel
    data: Dataset
    sha256: str
    metric: Metric
    told: tuple[str, ...]


def _opened(checkpoint: Path, options: SensitivityOptions) -> _Judging:
    file = original(checkpoint, options)
    model = taken_back(file) if isinstance(file, OnnxModel) else file
    model = with_sizes(model, checkpoint, {"evaluation": options.eval})
    data = Dataset.open(data_at(options.eval, checkpoint, model), model.signature)
    whole, metric, told = judged(data, options.metric, options.judge, model)
    choice, _ = halves(whole) if len(whole) > 1 else (whole, None)
    return _Judging(file, model, choice, data.sha256, metric, tuple(told))


def _elsewhere(
    cluster: OnRay, checkpoint: Path, options: SensitivityOptions, progress: Progress, thinning: Thinning
) -> list[GroupSensitivity]:
    """Groups in turns to as many tasks as keep the cluster busy to the end; each opens the model once."""
    there, asked = cluster.placed(checkpoint, options)
    count = min(len(thinning.groups), TURNS * cluster.slots)
    parts = [range(first, len(thinning.groups), count) for first in range(count)]
    known = cluster.ray.put(thinning.known)
    found: dict[int, GroupSensitivity] = {}
    left = set(range(count))
    given = [(cluster.task, there, asked, known, part) for part in parts]
    for place, curves in cluster.answers(_thinned, given, lambda: left):
        left.discard(place)
        found |= zip(parts[place], curves, strict=True)
        progress(len(found), len(thinning.groups), "layers tried")
    return [found[at] for at in range(len(thinning.groups))]


def _thinned(
    task: Task, checkpoint: Path, options: SensitivityOptions, known: Known, part: Sequence[int]
) -> list[GroupSensitivity] | ToolkitError:
    """On a node: some of the groups. An error of the user's goes back as what it is, not as one of Ray's."""
    try:
        with task.begun(*reads_of(checkpoint, options)):
            judging = _opened(checkpoint, options)
            thinning = Thinning(
                judging.model, judging.data, judging.metric, ratios=options.ratios, samples=options.samples,
                importance=options.importance, known=known,
            )  # fmt: skip
            return [thinning.thinned(thinning.groups[at]) for at in part]
    except ToolkitError as err:
        return err

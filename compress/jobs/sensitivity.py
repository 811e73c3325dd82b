"""`compress sensitivity`: how much each group of layers loses by pruning, alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from compress.console.wording import Note, assumed_of
from compress.data.dataset import Dataset
from compress.evaluate.evaluation import judged
from compress.evaluate.halves import halves
from compress.jobs.export import Silent
from compress.jobs.original import known_by, original
from compress.jobs.places import claimed
from compress.jobs.recipe import data_at, inputs_of, with_sizes
from compress.model import OnnxModel
from compress.onnx_export.torch_from_onnx import taken_back
from compress.options import SensitivityOptions
from compress.options.ranges import check_ranges
from compress.pipeline import Watcher, hashing_shown
from compress.prune.sensitivity import Sensitivity, layer_sensitivity
from compress.report.sensitivity import write_sensitivity

__all__ = ["sensitivity"]


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
    with claimed(written[0], inputs=inputs_of(options, checkpoint), also=written[1:]), hashing_shown(watcher):
        return _sensitivity(checkpoint, options, watcher)


def _sensitivity(checkpoint: Path, options: SensitivityOptions, watcher: Watcher) -> Sensitivity:
    file = original(checkpoint, options)
    model = taken_back(file) if isinstance(file, OnnxModel) else file
    model = with_sizes(model, checkpoint, {"evaluation": options.eval})
    data = Dataset.open(data_at(options.eval, checkpoint, model), model.signature)
    whole, metric, told = judged(data, options.metric, options.judge, model)
    choice, _ = halves(whole) if len(whole) > 1 else (whole, None)
    found = layer_sensitivity(
        model,
        choice,
        metric,
        ratios=options.ratios,
        samples=options.samples,
        importance=options.importance,
        progress=watcher.started("sensitivity"),
    )
    found = dataclasses.replace(
        found,
        data=data.sha256,
        model=known_by(file),
        notes=(*assumed_of(model.assumed), *(each for each in told if isinstance(each, Note))),
        warnings=(*(each for each in told if not isinstance(each, Note)), *found.warnings),
    )
    write_sensitivity(found, options.output, options.max_drop)
    return found

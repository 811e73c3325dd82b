"""What a run is judged on and by: samples to choose by, others to prove on, a metric, and how sure it has to be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from compress.console.wording import Note, counted
from compress.data.class_labels import read_labels, with_class_ids
from compress.data.dataset import Dataset
from compress.data.overlap import Overlap, overlaps
from compress.data.sources import Fetched
from compress.data.steady_samples import refuse_unsteady
from compress.errors import RecipeError
from compress.evaluate.halves import halves, has_ids
from compress.evaluate.intervals import SUREST, least_samples, paired_interval, percent
from compress.evaluate.judge import Budget, Judge
from compress.evaluate.kinder import copies_told, made_with, overlap_told
from compress.evaluate.labels_told import known_alone, labels_told, squeezed
from compress.evaluate.metric_choice import by_shape, find_metric
from compress.evaluate.metrics import BY_LABELS, CLASSES, METRICS, TAGS, Metric
from compress.evaluate.output_kind import by_labels
from compress.evaluate.probe import probe
from compress.evaluate.samples_elsewhere import samples_elsewhere
from compress.model import OnnxModel, TorchModel
from compress.options import CompressOptions
from compress.runtime.backends import open_model
from compress.runtime.measure import cores

__all__ = ["Evaluation", "budget_of", "evaluation_of", "judged"]


@dataclass(frozen=True)
class Evaluation:
    """Samples and the metric; what chooses and what proves share no sample.

    Attributes:
        proof: what the report's figures are over.
        metric: what is judged by.
        confidence: of the intervals.
        choice: what decides among models, where a run does; otherwise None.
        how: where the two come from, in words; empty where nothing is chosen.
        notes: what a reader should know of the labels and the metric.
        made_with: of the data that the model is made with, by option, what stands in the evaluation data, too.
    """

    proof: Dataset
    metric: Metric
    confidence: float
    choice: Dataset | None = None
    how: str = ""
    notes: tuple[str, ...] = ()
    made_with: Mapping[str, Overlap] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "samples": len(self.proof),
            "sha256": self.proof.sha256,
            "confidence": self.confidence,
            "output": self.metric.output,
            "threshold": self.metric.threshold,
            "chosen_on": None if self.choice is None else {"samples": len(self.choice), "sha256": self.choice.sha256},
            "split": self.how,
            "made_with": {name: asdict(found) for name, found in self.made_with.items()},
        }

    def refuse(self, original: TorchModel | OnnxModel, budget: Budget) -> None:
        """Refuse a budget that no result could keep on these samples, before the work.

        Raises:
            RecipeError: they are too few, the metric has no interval, or the original's own answers mean nothing.
        """
        for data in (self.proof, *(() if self.choice is None else (self.choice,))):
            self._refuse_too_few(data, budget)
            judge = Judge(open_model(original, threads=cores()), data, self.metric, confidence=budget.confidence)
            if judge.doubts:
                raise RecipeError(
                    "can't keep a largest drop on this evaluation data",
                    why=" ".join(judge.doubts),
                    mend="give more samples, with labels that fit the model, or judge by another --metric",
                )
            if budget.confidence is not None and not judge.gives_intervals:
                raise RecipeError(
                    f"can't tell how sure a drop of {self.metric.name} is",
                    why="it gives one figure for all samples, which has no interval",
                    mend="add --budget-by point, or let it give a score for each sample",
                )
            if budget.confidence is not None and self.metric.name in (*CLASSES, *TAGS):
                self._refuse_rare(judge.unseen, budget, len(data))

    def _refuse_too_few(self, data: Dataset, budget: Budget) -> None:
        if budget.confidence is None or not self.metric.counted:
            return
        least = least_samples(budget.points / self.metric.scale, budget.confidence)
        if least is not None and len(data) >= least:
            return
        unseen = self.metric.scale * paired_interval(0, 0, len(data), budget.confidence).high
        takes = "no number of samples is enough" if least is None else f"it takes {least:,}"
        if least is not None and self.choice is not None:
            takes += " to choose by, and as many others to prove on"
        raise RecipeError(
            f"can't be sure of {counted(budget.points, 'points')} of {self.metric.name} with "
            f"{counted(len(data), 'samples')}",
            why=f"where none of them shows a change, {unseen:.2g} points may still be lost at "
            f"{percent(budget.confidence)} "
            f"confidence; {takes}",
            mend="give more evaluation data, allow a larger drop, or take the estimate itself: --budget-by point",
        )

    def _refuse_rare(self, unseen: float | None, budget: Budget, samples: int) -> None:
        """Refuse where what is there has so few samples that errors in it may go unseen."""
        if unseen is None or unseen <= budget.points:
            return
        what = "samples that hold anything" if self.metric.name in TAGS else "samples of the rarest class"
        raise RecipeError(
            f"can't be sure of {counted(budget.points, 'points')} of {self.metric.name} with "
            f"{counted(samples, 'samples')}",
            why=f"where none of them shows a change, {unseen:.2g} points may still be lost at "
            f"{percent(budget.confidence or 0.0)} confidence: {what} are too few",
            mend=f"give more evaluation data, above all {what}, allow a larger drop, or take the estimate itself: "
            "--budget-by point",
        )


def budget_of(options: CompressOptions, max_drop: float) -> Budget:
    """The budget of a largest drop."""
    return Budget(max_drop, options.confidence if options.budget_by == "interval" else None)


def evaluation_of(
    options: CompressOptions,
    model: TorchModel | OnnxModel,
    opened: Mapping[str, str],
    *,
    chooses: bool,
    chosen_before: str = "",
    proves: bool = True,
) -> Evaluation | None:
    """Open the evaluation data, and split it where the run chooses by it.

    Args:
        options: of the run.
        model: the original, which answers a few samples.
        opened: where the data of each option lies, by the option's name.
        chooses: whether the run decides anything by a metric.
        chosen_before: hash of evaluation data that an earlier run has chosen by; if it is this one, its other half
            proves.
        proves: whether figures are told by it: samples that the model is made with, too, are looked for then.

    Returns:
        None without evaluation data.

    Raises:
        RecipeError, DatasetError, SignatureError: what can't be used.
    """
    _refuse_options(options)
    if options.eval is None:
        return None
    data = Dataset.open(opened["eval"], model.signature)
    data, metric, notes = judged(data, options.metric, options.judge, model)
    kinder = made_with(options, data, opened, model) if proves else {}
    notes += tuple(overlap_told(name, getattr(options, name), found) for name, found in kinder.items())
    before = bool(chosen_before) and chosen_before == data.sha256
    chooses = chooses or before
    if proves:
        notes += copies_told(data)
    if options.selection is not None:
        chosen = Dataset.open(opened["selection"], model.signature)
        refuse_unsteady("--selection", chosen)
        if chosen.sha256 == data.sha256:
            raise RecipeError(
                "can't choose and prove on the same samples",
                why="--selection and --eval hold the same data",
                mend="give other samples to choose by, or leave --selection out: --eval is then split",
            )
        if (shared := overlaps(data, {"selection": chosen})["selection"]).counts:
            raise RecipeError(
                "can't choose and prove on the same samples",
                why=f"{shared.told} --selection stand in --eval, too",
                mend="give other samples to choose by, or leave --selection out: --eval is then split",
            )
        chosen = _labelled_alike(chosen, metric, data, model)
        how = f"models are chosen by the {counted(len(chosen), 'samples')} of --selection"
        if before:  # the sensitivity's half has chosen, too
            data = halves(data)[1]
        return Evaluation(data, metric, options.confidence, chosen, how, notes, kinder)
    if not chooses:
        return Evaluation(data, metric, options.confidence, None, "", notes, kinder)
    choice, proof = halves(data)
    by = ", each label alike" if has_ids(data) else ""
    all_of_them = counted(len(data), "evaluation samples")
    how = f"models are chosen by {len(choice):,} of the {all_of_them} and proven on the other "
    how += f"{len(proof):,} (split by seed 0{by}, copies of a sample kept together)"
    return Evaluation(proof, metric, options.confidence, choice, how, notes, kinder)


def judged(
    data: Dataset, name: str | None, output: str | None, model: TorchModel | OnnxModel
) -> tuple[Dataset, Metric, tuple[str, ...]]:
    """The data with its labels as class ids where a built-in metric looks at them, the metric, and words on both.

    Args:
        data: to judge on.
        name: of the metric; by default what fits.
        output: to judge, of several; by default the one that can be meant.
        model: answers a few samples.

    Raises:
        RecipeError: labels or a metric that can't serve, or several outputs that can be meant.
        DatasetError: samples that are others each time they are read.
    """
    refuse_unsteady("--eval", data)
    notes: tuple[str, ...] = ()
    if name is None or name in METRICS:
        if isinstance(data.labels, Fetched) and (name is None or METRICS[name].needs_labels):
            data = replace(data, labels=read_labels(data))  # all are looked at, and made once
        data = squeezed(data, model.signature, output)
    scored = data.pairs and data.labels is not None
    if name in (None, "top1", "top5", *CLASSES) and not scored:
        data, notes = with_class_ids(data)
    found = probe(open_model(model, threads=cores()).infer, model, data)
    sample, endings = found.outputs, found.endings
    made = model.processor
    tags = made.labels if made is not None and made.task == "token-classification" else None
    metric = find_metric(
        name, data, model.signature, output=output, sample=sample, rows=found.rows, endings=endings, tags=tags, ask=True
    )
    elsewhere = samples_elsewhere(metric, model.signature)
    judged_one = next((spec for spec in model.signature.outputs if spec.name == metric.output), None)
    if name is None and metric.name == "agreement" and judged_one is not None and by_shape(judged_one, endings):
        shown = f"{judged_one.name!r}, {judged_one.dtype}[{', '.join(map(str, judged_one.shape))}],"
        notes += (
            Note(
                f"Nothing but its shape says that {shown} gives a score for each class: agreement is how often its "
                "largest value is the same one. For an embedding give --metric cosine."
            ),
        )
    unlabelled = name is None and metric.name == "agreement" and data.labels is None
    if metric.needs_labels and not metric.classifies:
        notes = ()  # they are looked at as they are
    data, unknown = known_alone(data, metric, model.signature)
    notes += unknown
    if metric.together > 1:
        of = f"how alike (cosine) {metric.output!r} is for the two texts of each of {counted(len(data) // 2, 'pairs')}"
        notes += (Note(f"{metric.name} holds {of} against their labels, by rank."),)
    if metric.threshold is not None and metric.output is not None:
        why = found.because.get(metric.output, "it gives more than 0 to 1")
        scale = "probabilities" if metric.threshold else "logits"
        told = f"A label counts as given above {metric.threshold:g}: {metric.output!r} gives {scale}, as {why}."
        notes += (Note(told),)
    others = labels_told(data, metric, model.signature, sample, named=name is not None)
    notes = others if others and not metric.needs_labels else (*notes, *others)
    if (name is None or output is None) and len(model.signature.outputs) > 1:
        other = " (another: --judge)" if output is None and metric.output is not None else ""
        which = "all of them together" if metric.output is None else repr(metric.output)
        given = counted(len(model.signature.outputs), "outputs")
        notes += (Note(f"The model gives {given}: {metric.name} judges {which}{other}."),)
    elif name is None and notes and not metric.needs_labels and not unlabelled:
        notes += (Note(f"The metric is {metric.name}, with the original's own answers."),)
    if unlabelled:
        notes += (Note("No labels in the evaluation data: agreement with the original is judged, not accuracy."),)
    return data, metric, (*notes, *elsewhere)


def _labelled_alike(data: Dataset, metric: Metric, proof: Dataset, model: TorchModel | OnnxModel) -> Dataset:
    if not metric.needs_labels:
        return data
    if metric.together > 1 and not (data.pairs and data.labels is not None):
        raise RecipeError(
            f"can't choose by {metric.name} on {data.source}",
            why="it has no pairs of texts with scores",
            mend="give it the columns of --eval: two texts and how alike they are",
        )
    if metric.name in METRICS:
        data = squeezed(data, model.signature, metric.output)
    if metric.name in BY_LABELS:
        judged_one = [spec for spec in model.signature.outputs if spec.name == metric.output]
        forms = [None if data.labels is None else by_labels(data.labels, spec, None) for spec in judged_one]
        if None in forms:
            raise _unlike(data, metric, proof)
        data, _ = known_alone(data, metric, model.signature)
    if not metric.classifies and proof.labels is not None:
        alike = data.labels is not None and data.labels.ndim == proof.labels.ndim
        if alike and (data.labels.dtype.kind == "f") == (proof.labels.dtype.kind == "f"):  # type: ignore[union-attr]
            return data
        raise _unlike(data, metric, proof)
    data, _ = with_class_ids(data)
    if not has_ids(data):
        raise RecipeError(
            f"can't choose by {metric.name} on {data.source}",
            why="it has no labels that are one class for each sample",
            mend="add an array `label` [n] of integers to it",
        )
    return data


def _unlike(data: Dataset, metric: Metric, proof: Dataset) -> RecipeError:
    shape = () if proof.labels is None else proof.labels.shape[1:]
    return RecipeError(
        f"can't choose by {metric.name} on {data.source}",
        why="its labels are not of the kind that those of --eval are",
        mend=f"add an array `label` {['n', *shape]} to it".replace("'", ""),
    )


def _refuse_options(options: CompressOptions) -> None:
    least, most = SUREST
    if not least <= options.confidence <= most:
        raise RecipeError(
            f"can't be {options.confidence:.17g} sure",
            why=f"--confidence is a share from {least:g} to {most:.6f}",
            mend="give 0.95 for 95%",
        )
    taught = None if options.finetune is not None else options.judge  # it names what labels teach, too
    for flag, value in (("--selection", options.selection), ("--judge", taught)):
        if value is not None and options.eval is None:
            raise RecipeError(
                f"{flag} is given, but no evaluation data",
                why="there is nothing to prove on",
                mend="add --eval eval.npz",
            )

"""Which metric fits what an output is, what the labels are, and what was asked for."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import RecipeError
from compress.evaluate.chance import OfPlaces, OfShuffled
from compress.evaluate.class_metrics import ClassFigure
from compress.evaluate.endings import Ending
from compress.evaluate.label_metrics import (
    IntersectionOverUnion,
    binary_accuracy_of,
    f1_of,
    pixel_accuracy_of,
)
from compress.evaluate.layout import lies_otherwise
from compress.evaluate.metrics import BATCH, BY_LABELS, CLASSES, METRICS, PLACES, SETS, TAGS, Metric
from compress.evaluate.number_metric import of_numbers
from compress.evaluate.output_choice import OutputContent, content_of, named_so, rebuilds, the_output
from compress.evaluate.output_kind import SHARES, OutputForm, OutputKind, by_labels, no_classes
from compress.evaluate.rank_correlation import similarity_scores
from compress.evaluate.shares import as_values, hits
from compress.evaluate.tag_metrics import TagF1, are_entities
from compress.evaluate.users_metric import users_metric
from compress.model import Arrays
from compress.storage.hashing import digest_of_code

__all__ = ["by_shape", "find_metric"]

Array = np.ndarray[Any, Any]
FORMER = {"f1": "f1_samples"}  # as earlier releases called it: which of its averages it is was not told
_KIND_OF = {
    **dict.fromkeys(SETS, OutputKind.SIGMOID), **dict.fromkeys((*PLACES, *TAGS), OutputKind.DENSE),
    "r2": OutputKind.REGRESSION,
}  # fmt: skip


def find_metric(
    name: str | None,
    data: Dataset,
    signature: Signature,
    *,
    output: str | None = None,
    sample: Arrays | None = None,
    rows: Array | None = None,
    endings: Mapping[str, Ending | None] | None = None,
    tags: Sequence[str] | None = None,
    ask: bool = False,
) -> Metric:
    """The metric of that name, or the one that fits what the output is.

    Labels that are class ids for each place of a map or of a sequence are judged by pixel_accuracy (of tokens that have
    a class each by f1_entities or f1_tokens), labels of 0 and 1,
    each by itself, by f1_samples (of one alone: binary_accuracy), other numbers in the output's shape by r2.
    Pairs of texts with scores are judged by spearman, where each text is embedded by itself.
    Class scores are judged by top1 with labels and by agreement without, answers that are integers by agreement, single
    values by mse, all else by cosine: also what looks like class scores by its shape alone, where that is an input's
    and there are no labels, or where the labels can't be ids of classes.

    Args:
        name: one of METRICS; `package.module:name` of a function (outputs, labels) → scores [n] or one float, or of a
            torchmetrics object (or a class of these); or None.
        data: what is judged on.
        signature: of the model.
        output: the one to judge, of several.
        sample: outputs of some samples, by which vectors of length 1 are told from class scores.
        rows: where these samples are in the data; by default they are its first.
        endings: of the outputs by name, where they are known: see `compress.evaluate.endings.ending_of`.
        tags: names of the classes, of a model that gives one for each token: f1_entities or f1_tokens fits it then.
        ask: whether several outputs that could be meant are an error; otherwise the first of them is taken.

    Raises:
        RecipeError: an unknown name, or a metric that the data or the model can't serve.
    """
    name = FORMER.get(name, name) if name is not None else None
    if name is not None and not re.fullmatch(r"[\w.]+:\w+", name) and name not in METRICS:
        why = f"known are {', '.join(METRICS)}"
        raise RecipeError(f"there is no metric {name!r}", why=why, mend="name one of these, or package.module:function")
    if name is not None and name not in METRICS:
        return _users(name, signature, output, sample, ask=ask)
    if name == "spearman" or (name is None and data.pairs and data.labels is not None):
        return _of_pairs(data, signature, output, sample, ask=ask)
    if name is None or name in BY_LABELS:
        fitting = _of_labels(name, data, signature, output, (sample, rows), endings or {}, tags)
        if fitting is not None:
            return fitting
    ids = data.labels is not None and data.labels.ndim == 1 and data.labels.dtype.kind in "iu"
    labels = data.labels if ids else None
    chosen = the_output(name, signature, labels, output, sample, ask=ask)
    specs = [spec for spec in signature.outputs if chosen in (None, spec.name)]
    kinds = {content_of(spec, None if sample is None else sample.get(spec.name)) for spec in specs}
    if name is None:
        name = _fitting(kinds, labelled=labels is not None)
        given = [spec.shape for spec in signature.inputs if spec.dtype.startswith("float")]
        if data.labels is None:
            unlike = rebuilds(specs[0].shape, given)
        else:
            shares = by_labels(data.labels, specs[0], None)
            unlike = no_classes(data.labels) and (shares is None or shares.kind is not OutputKind.SOFTMAX)
        if name == "agreement" and unlike and by_shape(specs[0], endings or {}):
            name = "cosine"
    metric = METRICS[name]
    if metric.needs_labels and labels is None:
        raise RecipeError(
            f"can't judge by {name}",
            why="the evaluation data has no labels that are one class for each sample",
            mend="add an array `label` [n] of integers to it, or judge by --metric agreement or cosine",
        )
    shape = specs[0].shape
    classifies = len(shape) == 2 and isinstance(shape[1], int) and shape[1] > 1 and OutputContent.ANSWERS not in kinds
    which = "first output" if specs[0] is signature.outputs[0] else "output"
    if metric.classifies and not classifies and (name != "agreement" or kinds != {OutputContent.ANSWERS}):
        raise RecipeError(
            f"can't judge by {name}",
            why=f"the model's {which} is {specs[0]}, not one logit for each class",
            mend="judge by --metric cosine or mse, or by a function of your own: package.module:function; of several "
            "outputs, name the one that is meant with --judge",
        )
    if name in CLASSES:
        return _of_classes(name, specs[0].name)
    return metric.of(specs[0].name if metric.classifies else chosen)


def by_shape(spec: TensorSpec, endings: Mapping[str, Ending | None]) -> bool:
    """Whether nothing but its shape says that an output gives class scores: an unnamed embedding has the same.

    Args:
        spec: of the output.
        endings: of the outputs by name, where they are known.
    """
    return content_of(spec) is OutputContent.CLASSES and not named_so(spec.name) and endings.get(spec.name) is None


def _fitting(kinds: set[OutputContent], *, labelled: bool) -> str:
    if kinds == {OutputContent.CLASSES}:
        return "top1" if labelled else "agreement"
    if kinds == {OutputContent.ANSWERS}:
        return "agreement"
    return "mse" if kinds == {OutputContent.VALUES} else "cosine"


def _of_labels(
    name: str | None,
    data: Dataset,
    signature: Signature,
    output: str | None,
    sample: tuple[Arrays | None, Array | None],
    endings: Mapping[str, Ending | None],
    tags: Sequence[str] | None,
) -> Metric | None:
    """The metric by labels that are sets, numbers, or class ids for each place; None where not one output fits."""
    forms = []
    for spec in signature.outputs if data.labels is not None else ():
        if output in (None, spec.name) and spec.dtype.startswith("float"):
            form = by_labels(data.labels, spec, endings.get(spec.name))
            forms += [] if form is None else [(spec, _of_shares(form, spec, data, name, sample))]
    wanted = _KIND_OF.get(name or "")
    found = [(spec, form) for spec, form in forms if form.kind in (_KIND_OF.values() if wanted is None else [wanted])]
    if name is None and any(form.kind is OutputKind.SOFTMAX for _, form in forms):
        return None  # class ids of one output, which would be numbers of another
    if name is None and not forms and data.labels is not None:
        _refuse_layout(data, signature, output)
    if len(found) == 1:
        spec, form = found[0]
        if form.wrong and name != "r2":
            raise _misvalued(data, form)
        if form.kind is OutputKind.DENSE and (name in TAGS or (name is None and tags is not None)):
            return _of_tags(name, form, spec, tags or ())
        if form.kind is OutputKind.DENSE:
            return _of_places(name or "pixel_accuracy", form, spec.name)
        if form.kind is OutputKind.REGRESSION:
            numbers = None if name is None and form.ending == "normalize" else of_numbers(data, spec.name)
            if numbers is not None or name is None:
                return numbers
        else:
            return _of_sets(name, data, spec, form)
    if name is None:
        return None
    if not forms and data.labels is not None:
        _refuse_layout(data, signature, output)
    if (wrong := [form for _, form in forms if form.wrong]) and name != "r2":
        raise _misvalued(data, wrong[0])
    needed = {
        OutputKind.DENSE: "class ids for each place of an output",
        OutputKind.REGRESSION: "numbers in an output's shape that are not all the same",
    }.get(wanted, "0 or 1 for each value of an output")  # type: ignore[arg-type]
    raise RecipeError(
        f"can't judge by {name}",
        why=f"it needs labels that are {needed}" + (", and several outputs fit" if len(found) > 1 else ""),
        mend="add such an array `label` to the evaluation data, name an output with --judge, or take --metric cosine",
    )


def _refuse_layout(data: Dataset, signature: Signature, output: str | None) -> None:
    """Labels that are as many as an output's values, and lie in another order, are judged by no metric.

    Raises:
        RecipeError: with both shapes.
    """
    of = tuple(data.labels.shape[1:])  # type: ignore[union-attr]
    for spec in signature.outputs:
        if output in (None, spec.name) and spec.dtype.startswith("float") and lies_otherwise(spec.shape[1:], of):
            raise RecipeError(
                f"can't judge by the labels in {data.source}",
                why=f"they are {_shown(of)}, and the output is {spec}: their axes are in another order",
                mend="transpose the labels to the output's order, or judge by --metric cosine, which leaves them aside",
            )


def _shown(of: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, ('n', *of)))}]"


def _misvalued(data: Dataset, form: OutputForm) -> RecipeError:
    return RecipeError(
        f"can't judge by the labels in {data.source}",
        why=form.wrong,
        mend="write them as 0 and 1 (255 or -1 where it is not known); numbers to hit as floats, or say --metric r2",
    )


def _of_shares(
    form: OutputForm, spec: TensorSpec, data: Dataset, name: str | None, sample: tuple[Arrays | None, Array | None]
) -> OutputForm:
    """The form of an output, as numbers to hit where it hits them, or where these are asked for."""
    if form.because != SHARES:
        return form
    outputs, rows = sample
    values = None if outputs is None else outputs.get(spec.name)
    hit = values is not None and hits(form, values, data.take(slice(0, len(values)) if rows is None else rows)[1])
    return as_values(form) if hit or name == "r2" else form


def _of_sets(name: str | None, data: Dataset, spec: TensorSpec, form: OutputForm) -> Metric:
    labels = math.prod(data.labels.shape[1:])  # type: ignore[union-attr]
    name = name or ("binary_accuracy" if labels == 1 else "f1_samples")
    threshold = 0.5 if form.ending == "sigmoid" else 0.0
    scorer = (binary_accuracy_of if name == "binary_accuracy" else f1_of)(threshold)
    return dataclasses.replace(METRICS[name], per_sample=scorer, output=spec.name, labels=labels, threshold=threshold)


def _of_classes(name: str, output: str) -> Metric:
    def figure() -> ClassFigure:
        return ClassFigure(name, output)

    return dataclasses.replace(METRICS[name], accumulated=figure, chance=figure, output=output)


def _of_places(name: str, form: OutputForm, output: str) -> Metric:
    axis = form.axis
    of_classes = name == "miou"
    metric = dataclasses.replace(
        METRICS[name], output=output, chance=lambda: OfPlaces(axis, form.doubt, of_classes=of_classes)
    )
    if name == "miou":
        return dataclasses.replace(metric, accumulated=lambda: IntersectionOverUnion(axis, output))
    return dataclasses.replace(metric, per_sample=pixel_accuracy_of(axis))


def _of_tags(name: str | None, form: OutputForm, spec: TensorSpec, names: Sequence[str]) -> Metric:
    """F1 of a class for each token; of entities where the classes are named so.

    Raises:
        RecipeError: entities are asked for, and the classes' names don't say where they begin.
    """
    entities = are_entities(names) if name is None else name == "f1_entities"
    if entities and not are_entities(names):
        raise RecipeError(
            "can't judge by f1_entities",
            why=f"the classes are {', '.join(names[:8])[:200] or 'without names'}, no parts of entities as B-PER is",
            mend="take --metric f1_tokens, or name them in id2label of the model's config.json",
        )

    def counted() -> TagF1:
        return TagF1(names, form.axis, spec.name, entities=entities)

    metric = METRICS["f1_entities" if entities else "f1_tokens"]
    return dataclasses.replace(metric, accumulated=counted, chance=counted, output=spec.name, code=",".join(names))


def _of_pairs(data: Dataset, signature: Signature, output: str | None, sample: Arrays | None, *, ask: bool) -> Metric:
    """Spearman's correlation of the similarities of pairs with their labels.

    Raises:
        RecipeError: the data has no pairs, or no scores; or no one output is a vector for each of a pair.
    """
    if not data.pairs or data.labels is None:
        raise RecipeError(
            "can't judge by spearman",
            why="the evaluation data has no " + ("scores of its pairs" if data.pairs else "pairs of texts"),
            mend="give texts to a Hugging Face folder of an encoder of sentences: two columns, --text-column and "
            "--text-pair-column, and --label-column for how alike the two are",
        )
    vectors = [spec.name for spec in signature.outputs if spec.dtype.startswith("float") and len(spec.shape) == 2]
    chosen = (
        vectors[0]
        if output is None and len(vectors) == 1
        else the_output("spearman", signature, None, output, sample, ask=ask)
    )
    if chosen not in vectors:
        raise RecipeError(
            "can't judge by spearman",
            why=f"the output {chosen} is no vector for each text",
            mend=f"name one with --judge: {', '.join(vectors) or 'this model gives none'}; or take --metric cosine",
        )
    return dataclasses.replace(METRICS["spearman"], over_all=similarity_scores(chosen), output=chosen)


def _users(source: str, signature: Signature, output: str | None, sample: Arrays | None, *, ask: bool) -> Metric:
    """A user's metric; a function sees all outputs, an object of torchmetrics one."""
    found = users_metric(source)
    updated = found.updated
    if updated is not None or output is not None:
        output = the_output(source, signature, None, output, sample, ask=ask)
    metric = Metric(
        source,
        per_sample=found.per_sample,
        over_all=found.over_all,
        accumulated=None if updated is None else lambda: updated(output),
        higher_is_better=found.higher_is_better,
        scale=found.scale,
        bounds=found.bounds,
        output=output,
        code=digest_of_code(source),
    )
    return dataclasses.replace(
        metric, chance=lambda: OfShuffled(_figure(metric), higher_is_better=metric.higher_is_better)
    )


def _figure(metric: Metric) -> Callable[[Arrays, Array], float]:
    """A metric that needs no original's outputs, of some samples at once."""

    def judge(outputs: Arrays, labels: Array) -> float:
        if metric.per_sample is not None:  # as many at a time as it is given elsewhere
            parts = [slice(start, start + BATCH) for start in range(0, len(labels), BATCH)]
            scores = [
                metric.per_sample({name: values[part] for name, values in outputs.items()}, {}, labels[part])
                for part in parts
            ]
            return float(np.concatenate(scores).mean())
        if metric.accumulated is not None:
            running = metric.accumulated()
            running.update(outputs, labels)
            return float(running.compute())
        assert metric.over_all is not None  # noqa: S101  a metric has one of the three
        return float(np.mean(metric.over_all(outputs, labels)))

    return judge

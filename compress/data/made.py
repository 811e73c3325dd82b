"""What samples are refused for, one batch at a time: those of an array before any work, made ones as they come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from compress.errors import DatasetError

__all__ = ["Taught", "fitting", "refuse_not_finite", "refuse_unfit"]

Array = np.ndarray[Any, Any]


def refuse_not_finite(values: Array, name: str, numbers: Array, source: str) -> None:
    """Refuse NaN and infinite values in samples.

    Args:
        values: [samples, …] of any dtype.
        name: of the input.
        numbers: of the samples, as the user's dataset counts them.
        source: what the user called the data.

    Raises:
        DatasetError: there are some; names the first sample.
    """
    if values.dtype.kind != "f" or np.isfinite(values).all():
        return
    first = int(np.argmin(np.isfinite(values).reshape(len(values), -1).all(axis=1)))
    raise DatasetError(
        f"{source} holds NaN or infinite values",
        why=f"in sample {numbers[first]}, in the input {name!r}",
        mend="find where they come from, or leave those samples out",
    )


def fitting(values: Array, dtype: np.dtype[Any], name: str, source: str) -> Array:
    """Samples in the dtype that the first one had, or that the model takes.

    Raises:
        DatasetError: they are of another kind, which this one doesn't hold.
    """
    if not np.can_cast(values.dtype, dtype, "same_kind"):
        raise DatasetError(
            f"the samples of {source} are unlike each other",
            why=f"{name!r} is {dtype} in some and {values.dtype} in others",
            mend="give each sample the same arrays, of the same dtype",
        )
    refuse_unfit(values, dtype, name, source)
    return np.asarray(values, dtype)


def refuse_unfit(values: Array, dtype: np.dtype[Any], name: str, source: str) -> None:
    """Refuse values that a narrower dtype does not hold: integers would wrap, and floats become infinite.

    Args:
        values: [samples, …], of the kind of the dtype.
        dtype: that the model takes.
        name: of the input.
        source: what the user called the data.

    Raises:
        DatasetError: there are some; names one.
    """
    if not values.size or values.dtype.kind not in "iuf" or np.can_cast(values.dtype, dtype, "safe"):
        return
    info: Any = np.finfo(dtype) if dtype.kind == "f" else np.iinfo(dtype)
    low, high = np.asarray([info.min, info.max], dtype).tolist()
    there = values[np.isfinite(values)] if dtype.kind == "f" else values  # others are refused as such
    ends = [there.min().item(), there.max().item()] if there.size else []  # Python's, which compare as they are
    if beyond := [end for end in ends if not low <= end <= high]:
        raise DatasetError(
            f"{source} does not fit {name!r}",
            why=f"it holds {beyond[0]}, and {dtype}, which that takes, goes from {low} to {high}",
            mend="find where such values come from; or export the model with a wider type",
        )


@dataclass(frozen=True)
class Taught:
    """What labels that are trained on may be.

    Attributes:
        output: that they teach.
        classes: where they are class ids; None where they are values.
    """

    output: str
    classes: int | None = None

    def refuse(self, labels: Array, numbers: Array, source: str) -> None:
        """Refuse labels that are no class of the model, and values that are no numbers.

        Args:
            labels: [samples, …].
            numbers: of the samples, as the user's data counts them.
            source: what the user called the data.

        Raises:
            DatasetError: there are some; names the first sample.
        """
        good = np.isfinite(labels) if self.classes is None else (labels >= 0) & (labels < self.classes)
        if good.all():
            return
        first = int(np.argmin(good.reshape(len(labels), -1).all(axis=1)))
        if self.classes is None:
            why = f"sample {numbers[first]} has NaN or infinite values in its label"
            mend = "leave those samples out"
        else:
            told = f"the classes of {self.output!r} go from 0 to {self.classes - 1}"
            why = f"sample {numbers[first]} has the label {labels.reshape(len(labels), -1)[first][0]}, {told}"
            mend = "leave samples without a class out, and give class ids from 0 as integers [n]"
        raise DatasetError(f"can't train on the labels in {source}", why=why, mend=mend)

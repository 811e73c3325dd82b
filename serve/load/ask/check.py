"""Is an answer the right one? Judged while the load runs, so that a server that hurries and errs is found out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import orjson

from serve.gateway.oip.protocol import InferResponse, parse_response
from serve.gateway.oip.tensors import NoNumbersError, ProtocolError, plain_numbers

__all__ = ["Answer", "Check", "Judge", "Verdict", "outputs_of_plain", "word_of"]

Form = Literal["binary", "json", "grpc", "plain"]


@dataclass(frozen=True)
class Verdict:
    """What is wrong with an answer ("" for nothing), and how many of how many labels it names."""

    wrong: str = ""
    right: int = 0
    labelled: int = 0


@dataclass(frozen=True)
class Answer:
    """A body; `header_length` as the Open Inference Protocol's header of that name says, None without it."""

    body: bytes
    header_length: int | None = None


@dataclass(frozen=True)
class Check:
    """What answers are held against.

    Attributes:
        form: how they are written: Open Inference Protocol ("binary", "json", "grpc"), or anything ("plain").
        contains: text that each must hold; "" for none.
        same: whether all answers to one request must be alike.
        values: for each request, the expected values by output, as nested lists; empty for none.
        tolerance: how far a number may be from the one that is expected.
        labels: for each request, the label of each of its rows; empty for none.
        output: which output names the label; "" for the answer's first, where nobody knows the model's.
    """

    form: Form
    contains: str = ""
    same: bool = False
    values: tuple[Mapping[str, Any], ...] = ()
    tolerance: float = 1e-3
    labels: tuple[Sequence[str], ...] = ()
    output: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "form": self.form, "contains": self.contains, "same": self.same, "values": list(self.values),
            "tolerance": self.tolerance, "labels": list(self.labels), "output": self.output,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        values = dict(data)
        return cls(**values | {"values": tuple(values["values"]), "labels": tuple(values["labels"])})


@dataclass
class Judge:
    """Holds answers against a check; remembers first answers, where all must be alike."""

    check: Check
    first: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._contains = self.check.contains.encode()
        self._expected = [{name: np.asarray(value) for name, value in values.items()} for values in self.check.values]

    def verdict(self, number: int, answer: Answer) -> Verdict:
        """Judge an answer.

        Args:
            number: of the request, in the job's order.
            answer: of status 200.
        """
        check = self.check
        if self._contains not in answer.body:
            return Verdict("other text")
        if not (check.same or check.values or check.labels):
            return Verdict()
        try:
            outputs = _outputs(check.form, answer)
        except (ProtocolError, ValueError, KeyError, TypeError):
            return Verdict("unreadable answer")
        if check.same and not _alike(self.first.setdefault(number, outputs), outputs, check.tolerance):
            return Verdict("another answer")
        if check.values and not _alike(self._expected[number], outputs, check.tolerance, among=True):
            return Verdict("wrong values")
        if not check.labels:
            return Verdict()
        if check.output and check.output not in outputs:
            return Verdict("no such output")
        labels = check.labels[number]
        found = _labels(outputs, check.output, len(labels))
        return Verdict("", sum(a == b for a, b in zip(labels, found, strict=False)), len(labels))


def _outputs(form: Form, answer: Answer) -> dict[str, Any]:
    """Values by output name; an answer of no known form is one output."""
    if form == "grpc":
        return {tensor.name: tensor.data for tensor in _from_grpc(answer.body).outputs}
    if form in ("binary", "json"):
        return {tensor.name: tensor.data for tensor in parse_response(answer.body, answer.header_length).outputs}
    try:
        data = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        return {"": np.array([answer.body], dtype=object)}
    found = data.get("outputs", data) if isinstance(data, dict) else {"": data}
    if not isinstance(found, dict):
        found = {"": found}
    return {name: _array(value) for name, value in found.items()}


def outputs_of_plain(body: bytes) -> list[str]:
    """The names of the outputs of an answer of no known form; none where it names none."""
    return [name for name in _outputs("plain", Answer(body)) if name]


def _array(value: Any) -> Any:
    try:
        return plain_numbers(value)
    except NoNumbersError:
        return np.array([orjson.dumps(value)]) if isinstance(value, dict) else np.asarray(value, dtype=object)
    except ValueError:  # lists of unlike lengths
        return np.array([orjson.dumps(value)], dtype=object)


def _from_grpc(body: bytes) -> InferResponse:
    from serve.load.send.grpc_form import response_of

    return response_of(body)


def _alike(expected: Mapping[str, Any], found: Mapping[str, Any], tolerance: float, *, among: bool = False) -> bool:
    """Whether all of `expected` stands in `found`; and nothing else, unless `among`."""
    if not among and expected.keys() != found.keys():
        return False
    for name, value in expected.items():
        other = found.get(name)
        if other is None:
            return False
        if value.dtype.kind in "biuf" and other.dtype.kind in "biuf":
            if value.size != other.size:
                return False
            flat = np.asarray(value, np.float64).ravel(), np.asarray(other, np.float64).ravel()
            if not np.allclose(*flat, rtol=0, atol=tolerance, equal_nan=True):
                return False
        elif list(map(word_of, value.ravel())) != list(map(word_of, other.ravel())):
            return False
    return True


def _labels(outputs: Mapping[str, Any], output: str, rows: int) -> list[str]:
    """The label of each row: the value itself, the first of its texts, or the place of the largest number."""
    value = outputs.get(output) if output else next(iter(outputs.values()), None)
    if value is None:
        return []
    if value.size == rows:
        return [word_of(item) for item in value.ravel()]
    if rows == 0 or value.size == 0 or value.size % rows:
        return []
    if value.dtype.kind not in "biuf":  # labels come best first
        return [word_of(item) for item in value.reshape(rows, -1)[:, 0]]
    return [str(place) for place in np.asarray(value).reshape(rows, -1).argmax(axis=1).tolist()]


def word_of(value: object) -> str:
    """A label or an element as text."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return str(value.item() if isinstance(value, np.generic) else value)

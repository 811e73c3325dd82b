"""What the bodies of requests with lists of samples have in common, and Triton's answers to them: no web framework."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from serve.config.names import MODEL_NAME
from serve.gateway.edge.openai_errors import ParameterError
from serve.gateway.errors import BadRequestError, UpstreamBrokenError
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import parse_response
from serve.gateway.oip.tensors import ProtocolError

__all__ = [
    "MOST_SAMPLES",
    "OTHERS",
    "Gives",
    "TritonAnswer",
    "check_number",
    "list_of",
    "model_of",
    "rows_of",
    "tokens_of",
    "unknown",
    "values_of",
]

MOST_SAMPLES = 2048
OTHERS = "GET /v1/models lists those that are asked here"

TritonAnswer = tuple[bytes, bytes | None]
"""Its body, and its header that says how long the JSON in it is."""


class Gives(Protocol):
    """What a model gives for each sample."""

    @property
    def output(self) -> str:
        """The name of its numbers."""

    @property
    def width(self) -> int:
        """How many there are."""

    @property
    def tokens(self) -> str:
        """The name of how many tokens it was; "" for none."""


def values_of(body: Any, fields: Sequence[str], example: str) -> dict[str, Any]:
    """The body, an object of known fields; raises BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError("the body is no JSON object", mend=f"send {example}")
    for name in body:
        if name not in fields:
            raise ParameterError(
                str(name)[:64], f"{str(name)[:64]!r} is not known here", why=f"known are {', '.join(fields)}",
                mend="leave it out", code="unknown_parameter",
            )  # fmt: skip
    return body


def model_of(values: dict[str, Any]) -> str:
    """The name of the model that is asked; raises ParameterError."""
    model = values.get("model")
    if not isinstance(model, str) or not model:
        raise ParameterError("model", "no model is named", mend=OTHERS, code="missing_required_parameter")
    if not re.fullmatch(MODEL_NAME, model):
        raise unknown(model)
    return model


def unknown(model: str) -> ParameterError:
    """There is no such model."""
    told = f"the model {model[:100]!r} does not exist"
    return ParameterError("model", told, mend=OTHERS, code="model_not_found", status=404)


def check_number(values: dict[str, Any], name: str) -> int | None:
    """A whole number above 0, if there is one; raises ParameterError."""
    found = values.get(name)
    if found is not None and (type(found) is not int or found < 1):
        raise ParameterError(name, f"{name} is no number above 0")
    return found


def list_of(given: Any, param: str, what: str) -> list[Any]:
    """A list that is neither empty nor too long.

    Args:
        given: in a field.
        param: its name.
        what: it holds, for people.

    Raises:
        ParameterError: it is another.
    """
    if not isinstance(given, list):
        raise ParameterError(param, f"{param} is no list", mend=f"send a list of {what}")
    if not given:
        raise ParameterError(param, f"{param} is empty", mend=f"send at least one of {what}")
    if len(given) > MOST_SAMPLES:
        raise ParameterError(
            param, f"{param} is too long", why=f"it holds {len(given)} {what}, and {MOST_SAMPLES} are allowed",
            mend="send several requests",
        )  # fmt: skip
    return given


def tokens_of(model: ModelMetadata) -> str:
    """The output that counts the tokens of a sample; "" where a model has none."""
    counts = (each.name for each in model.outputs if each.name == "tokens" and each.datatype == "INT32")
    return next(counts, "")


def rows_of(
    answers: Sequence[TritonAnswer], places: Sequence[Sequence[int]], by: Gives, what: str
) -> tuple[list[Any], int]:
    """The numbers of each sample, float32[width], in the order of the request, and the tokens of all.

    Args:
        answers: Triton's.
        places: that the samples of each have in the request.
        by: what the model gives.
        what: they are, for people.

    Raises:
        UpstreamBrokenError: an answer can't be read, has no such numbers, or is not of so many samples.
    """
    rows: list[Any] = [None] * sum(map(len, places))
    tokens = 0
    for (body, length), at in zip(answers, places, strict=True):
        try:
            result = parse_response(body, int(length) if length is not None else None)
        except ValueError as err:
            why = str(err) if isinstance(err, ProtocolError) else "its header length is not a number"
            raise UpstreamBrokenError("the model server's answer can't be read", why=why) from err
        outputs = {tensor.name: tensor.data for tensor in result.outputs}
        found = outputs.get(by.output)
        if found is None or found.shape[1:] != (by.width,) or not np.isfinite(found).all():
            raise UpstreamBrokenError(
                f"the model's answer is no {what}",
                why=f"its {by.output!r} is not {by.width} numbers for each text",
            )
        if len(found) != len(at):
            raise UpstreamBrokenError(f"the model's answer is no {what}", why=f"{len(found)} came for {len(at)} texts")
        for place, row in zip(at, np.ascontiguousarray(found, "<f4"), strict=True):
            rows[place] = row
        tokens += int(outputs[by.tokens].sum()) if by.tokens in outputs else 0
    return rows, tokens

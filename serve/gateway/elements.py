"""A bound on the elements of each input: a few bytes of JSON can ask for a tensor that fills the memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import orjson

from serve.gateway.errors import BadRequestError, TooManyElementsError

__all__ = ["check_elements", "check_shape"]


def check_elements(body: bytes, header_length: int | None, most: int) -> None:
    """Look at the shapes that an infer request claims.

    Args:
        body: of the request.
        header_length: bytes of its JSON in the binary form; None where it is all JSON.
        most: elements of one input.

    Raises:
        BadRequestError: no shapes can be read.
        TooManyElementsError: an input has more.
    """
    length = len(body) if header_length is None else header_length
    try:
        inputs = orjson.loads(memoryview(body)[:length])["inputs"]
        for item in inputs:
            check_shape(str(item["name"]), item["shape"], most)
    except (orjson.JSONDecodeError, KeyError, TypeError) as err:
        raise BadRequestError("the request's inputs can't be read", why=repr(err), mend="see GET .../example") from err


def check_shape(name: str, shape: Iterable[int], most: int) -> None:
    """Raises TooManyElementsError where an input of that shape has more elements."""
    elements = math.prod(shape)
    if elements > most:
        raise TooManyElementsError(name, elements, most)

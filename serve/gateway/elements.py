"""A bound on the elements of each input: a few bytes of JSON can ask for a tensor that fills the memory."""

from __future__ import annotations

import math

import orjson

from serve.gateway.errors import BadRequestError, TooManyElementsError

__all__ = ["check_elements"]


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
        shapes = [(item["name"], math.prod(item["shape"])) for item in inputs]
        for name, elements in shapes:
            if elements > most:
                raise TooManyElementsError(str(name), elements, most)
    except (orjson.JSONDecodeError, KeyError, TypeError) as err:
        raise BadRequestError("the request's inputs can't be read", why=repr(err), mend="see GET .../example") from err

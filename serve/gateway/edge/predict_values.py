"""Plain values to an infer request and back, for the process that reads what is long: no web framework is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from serve.gateway.errors import BadRequestError, TooManyElementsError, UpstreamBrokenError
from serve.gateway.oip.friendly import from_values, to_values
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import Message, build_request, parse_response
from serve.gateway.oip.tensors import ProtocolError, Tensor

__all__ = ["answer_of", "message_from", "message_of"]


def message_of(values: Any, metadata: ModelMetadata, most: int) -> tuple[Message, bool]:
    """The infer request that JSON values by input name make, and whether they are one item.

    Args:
        values: what the JSON says.
        metadata: of the model.
        most: elements of an input; 0 for any number.

    Raises:
        GatewayError: they don't fit the model.
    """
    if not isinstance(values, dict):
        why = f"an object was expected, {type(values).__name__} came"
        raise BadRequestError("the body is not values by input name", why=why, mend='send {"input name": value, ...}')
    inputs, item = from_values(metadata, values)
    return message_from(inputs, most), item


def message_from(inputs: Sequence[Tensor], most: int) -> Message:
    """The infer request of these inputs; raises TooManyElementsError."""
    for tensor in inputs:
        if most and tensor.data.size > most:
            raise TooManyElementsError(tensor.name, tensor.data.size, most)
    return build_request(inputs)


def answer_of(
    body: bytes, length: bytes | None, metadata: ModelMetadata, item: bool, *, released: bool = False
) -> bytes:
    """The answer in plain values, as JSON.

    Args:
        body: Triton's answer.
        length: its header that says how long its JSON is, where tensors follow.
        metadata: of the model.
        item: drop the batch dimension, of size 1.
        released: whether a release chose who answers: then the body says who did, as another model's version is none
            of the one that was asked.

    Raises:
        UpstreamBrokenError: the answer can't be read.
    """
    try:
        result = parse_response(body, int(length) if length is not None else None)
    except ValueError as err:
        why = str(err) if isinstance(err, ProtocolError) else "its header length is not a number"
        raise UpstreamBrokenError("the model server's answer can't be read", why=why) from err
    values = {
        "model": metadata.name,
        "version": result.model_version,
        **({"served_by": f"{result.model_name}/{result.model_version}"} if released else {}),
        "outputs": to_values(metadata, result.outputs, item=item),
    }
    return orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY)

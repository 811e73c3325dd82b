"""Triton's generate form to an infer request, and answers to events, for the process that reads what is long.

The form is that of Triton's generate extension: inputs by name, beside them `parameters` and `id`.
"""

from __future__ import annotations

from typing import Any

import orjson

from serve.gateway.edge.predict_values import answer_of, message_of
from serve.gateway.errors import BadRequestError
from serve.gateway.oip.contract import UnfitError, check_id, check_parameters
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import Message

__all__ = ["asked_of", "event_of", "generated_of"]

Asked = tuple[Message, bool, str, dict[str, bool | int | float | str]]


def asked_of(values: Any, metadata: ModelMetadata, most: int) -> Asked:
    """The infer request of a generate request's JSON, whether it is one item, its id and its parameters.

    An input that has one of the two names is an input.

    Args:
        most: elements of an input; 0 for any number.

    Raises:
        GatewayError: they don't fit the model.
    """
    name = ""
    parameters: Any = {}
    if isinstance(values, dict):
        inputs = {spec.name for spec in metadata.inputs}
        name = values.pop("id", "") if "id" not in inputs else ""
        parameters = values.pop("parameters", {}) if "parameters" not in inputs else {}
        _check(name, parameters)
    message, item = message_of(values, metadata, most)
    return message, item, name, parameters


def _check(name: Any, parameters: Any) -> None:
    """Whether both are short: here, where it does not keep the event loop from others."""
    if not isinstance(parameters, dict):
        raise BadRequestError("the parameters are no object", mend='write them as in "parameters": {"temperature": 0}')
    try:
        check_id(name)
        check_parameters(parameters, shared_memory=False)
    except UnfitError as err:
        mend = "Triton's parameters are true, false, texts, and numbers of 64 bits"
        raise BadRequestError("the id or the parameters can't be sent", why=err.why or err.error, mend=mend) from err


def event_of(body: bytes, length: bytes, metadata: ModelMetadata, item: bool) -> bytes:
    """An answer as an event, in the form of /predict; arguments and errors as of `answer_of`."""
    return b"data: " + answer_of(body, length, metadata, item) + b"\n\n"


def generated_of(body: bytes, length: bytes, metadata: ModelMetadata, item: bool) -> bytes:
    """The same in Triton's generate form: outputs beside the names of the model and its version."""
    told = orjson.loads(answer_of(body, length, metadata, item))
    flat = {"model_name": told["model"], "model_version": told["version"], **told["outputs"]}
    return b"data: " + orjson.dumps(flat) + b"\n\n"

"""Infer requests and answers as gRPC messages of the Open Inference Protocol."""

from __future__ import annotations

from collections.abc import Sequence

from tritonclient.grpc import service_pb2 as messages

from serve.gateway.oip.protocol import InferResponse
from serve.gateway.oip.tensors import ProtocolError, Tensor, from_raw, to_raw

__all__ = ["request_of", "response_of"]


def request_of(model: str, inputs: Sequence[Tensor]) -> bytes:
    """A ModelInferRequest for all of the model's outputs, its tensors raw."""
    message = messages.ModelInferRequest(model_name=model)
    for tensor in inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(to_raw(tensor))
    found: bytes = message.SerializeToString()
    return found


def response_of(body: bytes) -> InferResponse:
    """Read a ModelInferResponse whose tensors are raw.

    Raises:
        ProtocolError: it is none.
    """
    try:
        message = messages.ModelInferResponse.FromString(body)
    except Exception as err:  # the decoder's error has no public name
        raise ProtocolError(f"not an infer response: {err}") from err
    if len(message.outputs) != len(message.raw_output_contents):
        raise ProtocolError("the tensors are not raw")
    outputs = tuple(
        from_raw(output.name, output.datatype, list(output.shape), raw)
        for output, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    )
    return InferResponse(message.model_name, message.model_version, outputs)

"""An infer request over gRPC, held against the model's contract: the rules are those of HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tritonclient.grpc import service_pb2 as messages

from serve.gateway.oip.contract import ITEM_BYTES, Contract, UnfitError, check_framing, check_parameters, check_range
from serve.gateway.oip.sequence import SEQUENCE_ID, Named, named

__all__ = ["check_message", "in_reply", "rename", "restore", "walked_bytes"]

# The field of InferTensorContents that holds a datatype's elements.
_FIELDS = {
    "BOOL": "bool_contents", "INT8": "int_contents", "INT16": "int_contents", "INT32": "int_contents",
    "INT64": "int64_contents", "UINT8": "uint_contents", "UINT16": "uint_contents", "UINT32": "uint_contents",
    "UINT64": "uint64_contents", "FP32": "fp32_contents", "FP64": "fp64_contents", "BYTES": "bytes_contents",
}  # fmt: skip


def check_message(
    message: Any,
    contract: Contract,
    rest: Callable[[], object] = lambda: None,
    *,
    shared_memory: bool,
    raws: Sequence[bytes | memoryview] | None = None,
) -> None:
    """Whether a ModelInferRequest fits the model.

    Args:
        message: inference.ModelInferRequest.
        contract: of the model.
        rest: is called about every millisecond that elements take to be looked at.
        raws: its raw inputs, where they were left aside.
        shared_memory: whether it may name regions of shared memory.

    Raises:
        UnfitError: it does not.
        TooManyElementsError: an input has more elements than are allowed.
    """
    parameters = _values(message.parameters)
    check_parameters(parameters, shared_memory=shared_memory)
    contract.check_sequence(parameters.get(SEQUENCE_ID))
    if raws is None:
        raws = list(message.raw_input_contents)
    carried = 0
    for tensor in message.inputs:
        count = contract.elements(tensor.name, tensor.datatype, list(tensor.shape))
        parameters = _values(tensor.parameters)
        check_parameters(parameters, shared_memory=shared_memory)
        filled = [field.name for field, _ in tensor.contents.ListFields()]
        if "shared_memory_region" in parameters:
            size = ITEM_BYTES.get(tensor.datatype)
            if filled or (size is not None and parameters.get("shared_memory_byte_size") != count * size):
                raise UnfitError(f"the input {tensor.name!r} is not what its shared memory says")
        elif raws:
            if filled:
                raise UnfitError(f"the input {tensor.name!r} has its data twice")
            if carried == len(raws):
                raise UnfitError(f"there is no raw data for the input {tensor.name!r}")
            _raw(tensor.name, tensor.datatype, raws[carried], count, rest)
            carried += 1
        else:
            field = _FIELDS.get(tensor.datatype, "")
            if filled not in ([field], []) or (have := len(getattr(tensor.contents, field, ()))) != count:
                have = 0 if filled not in ([field], []) else have
                raise UnfitError(f"the input {tensor.name!r} has {count} elements by its shape, and {have} of its type")
            check_range(tensor.datatype, getattr(tensor.contents, field, ()), rest)
    if carried != len(raws):
        raise UnfitError(f"there are {len(raws)} raw inputs, and {carried} that take them")
    contract.check_together(
        [tensor.name for tensor in message.inputs], [list(tensor.shape) for tensor in message.inputs]
    )
    for output in message.outputs:
        parameters = _values(output.parameters)
        check_parameters(parameters, shared_memory=shared_memory)
        if "classification" in parameters:
            contract.check_outputs([output.name])
            empty = any(0 in tensor.shape for tensor in message.inputs)
            contract.check_classes(output.name, parameters["classification"], empty=empty)
    contract.check_outputs([output.name for output in message.outputs])


def walked_bytes(message: Any, head: int, raws: Sequence[bytes | memoryview] | None) -> int:
    """Bytes of a ModelInferRequest that are looked at element by element: what is typed, and raw texts.

    Args:
        message: as of `check_message`.
        head: bytes of what protobuf has read.
        raws: as of `check_message`.
    """
    raw = sum(map(len, message.raw_input_contents if raws is None else raws))
    typed = head - raw if raws is None else head
    return typed + (raw if any(tensor.datatype == "BYTES" for tensor in message.inputs) else 0)


def rename(message: Any, digest: str) -> Named | None:
    """The sequence of a ModelInferRequest, which has its name from its client's key from then on; None for none.

    Args:
        message: inference.ModelInferRequest.
        digest: of its client's key; "" where there are none.
    """
    if SEQUENCE_ID not in message.parameters:
        return None
    sequence = named(_values(message.parameters), digest)
    if sequence is not None and sequence.renamed:
        _write(message.parameters, sequence.sent)
    return sequence


def in_reply(sequence: Named, answer: bytes) -> bytes:
    """A ModelInferResponse with its client's id of the sequence, where Triton says its own: in answers of ensembles."""
    if not sequence.renamed or SEQUENCE_ID.encode() not in answer:
        return answer
    message = messages.ModelInferResponse.FromString(answer)
    restore(message, {sequence.sent: sequence})
    reply: bytes = message.SerializeToString()
    return reply


def restore(answer: Any, sequences: Mapping[int | str, Named]) -> None:
    """Write the client's id into an inference.ModelInferResponse of one of these sequences, which are by Triton's."""
    if SEQUENCE_ID in answer.parameters:
        sent = _values(answer.parameters)[SEQUENCE_ID]
        if (sequence := sequences.get(sent)) is not None:
            _write(answer.parameters, sequence.asked)


def _write(parameters: Any, sequence: int | str) -> None:
    kind = "int64_param" if isinstance(sequence, int) else "string_param"
    parameters[SEQUENCE_ID].CopyFrom(messages.InferParameter(**{kind: sequence}))


def _raw(name: str, datatype: str, raw: bytes | memoryview, count: int, rest: Callable[[], object]) -> None:
    size = ITEM_BYTES.get(datatype)
    if size is None:
        check_framing(name, raw, count, rest)
    elif len(raw) != count * size:
        raise UnfitError(f"the input {name!r} is {count * size} bytes by its shape, and {len(raw)} by its data")


def _values(parameters: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise UnfitError(f"the parameter {name[:64]!r} has no value")
        found[name] = getattr(parameter, kind)
    return found

"""A served model's metadata as Triton tells it, and an example request made from it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import orjson

from serve.gateway.access.slots import Batcher
from serve.gateway.oip.tensors import DATATYPES, ProtocolError

__all__ = ["EXAMPLE_SOURCE", "ModelMetadata", "TensorMetadata", "example_elements", "example_json", "example_request"]

# Response header of the gateway's example: "model" (the model brought it) or "metadata" (made up of zeros).
EXAMPLE_SOURCE = b"example-source"
MOST_MADE_UP = 1 << 20  # elements of an example for a client
DEFAULT_IDLE = 1_000_000  # microseconds
CORRELATION_ID, TEXT = "CONTROL_SEQUENCE_CORRID", "TYPE_STRING"


@dataclass(frozen=True)
class TensorMetadata:
    """One input or output: `shape` has the batch first where the model batches, -1 where a dimension varies.

    A request may leave out an input that is `optional`.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.datatype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class ModelMetadata:
    """What a client has to know of a model.

    Attributes:
        versions: the versions that Triton serves.
        batched: whether the first dimension of every tensor is the batch.
        example: an infer request that came with the model, or None.
        part_of: the packed model that it is a step of; "" where it stands for itself.
        shares_steps: whether it asks other models, at whatever version is their newest, for all versions of its own.
        max_batch_size: items that a request may hold; 0 where the model does not batch, or nothing is known.
        sequence_texts: whether the id of a sequence may be a text: where the model asks for numbers, or nothing is
            known, a text would end Triton.
        steps: models, and their versions (None for Triton's choice), that an ensemble asks.
        network: that a packed pipeline asks from its code, at Triton's choice of a version; "" for none.
        decoupled: whether it gives any number of answers to a request; None where nothing is known.
        task: what `serve pack` says that it does; "" where nobody says.
        dimensions: lengths that its embeddings may be cut to, ascending.
        heeds_cancellation: whether it says that it ends soon once a request is cancelled, as packed hooks do.
        instances: of it, that work at the same time; 0 for those of others that it asks, or where nothing is known.
        together: requests that one of these may answer at a time, for whose batches it waits; 0 where nothing is known.
        waits_s: for how long one that is free waits for more of a batch, at most; infinite where they don't work on
            requests in the order in which these came, or nothing is known.
        batcher: of its sequences; None where it has none, or nothing is known.
    """

    name: str
    versions: tuple[str, ...]
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    batched: bool
    example: Mapping[str, Any] | None = None
    part_of: str = ""
    shares_steps: bool = False
    max_batch_size: int = 0
    sequence_texts: bool = False
    steps: tuple[tuple[str, str | None], ...] = ()
    decoupled: bool | None = None
    batcher: Batcher | None = None
    network: str = ""
    task: str = ""
    instances: int = 0
    dimensions: tuple[int, ...] = ()
    heeds_cancellation: bool = False
    together: int = 0
    waits_s: float = math.inf

    @property
    def answer_bytes(self) -> float:
        """Bytes of the longest answer's tensors; infinite where its dimensions, or BYTES, leave it open."""
        total = 0
        for tensor in self.outputs:
            dims = (max(1, self.max_batch_size), *tensor.shape[1:]) if self.batched else tensor.shape
            if min(dims, default=1) < 0 or tensor.datatype == "BYTES" or (self.batched and not self.max_batch_size):
                return math.inf
            total += math.prod(dims) * DATATYPES[tensor.datatype].itemsize
        return math.inf if self.decoupled is None or self.decoupled else total

    @property
    def latest(self) -> str:
        """The version that answers those who name none, where several are served; "" where one is."""
        return _newest(self.versions) if len(self.versions) > 1 else ""

    @classmethod
    def parse(cls, metadata: bytes, config: bytes | None) -> Self:
        """Read Triton's answers to /v2/models/M and, where it gives one, /v2/models/M/config.

        Without a config, a model counts as batched when each of its tensors has a first dimension that varies.

        Raises:
            ProtocolError: an answer that is not what it should be.
        """
        try:
            data = orjson.loads(metadata)
            known = orjson.loads(config) if config is not None else {}
            optional = {item["name"] for item in known.get("input", ()) if item.get("optional")}
            inputs = tuple(_tensor(item, optional=item["name"] in optional) for item in data["inputs"])
            outputs = tuple(_tensor(item) for item in data["outputs"])
            batched = all(tensor.shape[:1] == (-1,) for tensor in (*inputs, *outputs))
            if "max_batch_size" in known:
                batched = known["max_batch_size"] > 0
            text = known.get("parameters", {}).get("example_inputs", {}).get("string_value")
            example = orjson.loads(text) if text else None
            if example is not None and not isinstance(example.get("inputs"), list):
                raise ProtocolError("example_inputs has no list of inputs")
            parameters = known.get("parameters", {})
            whole = parameters.get("part_of", {}).get("string_value", "")
            part_of = "" if whole == data["name"] else whole
            # Both are pack's own.
            network, task = (parameters.get(name, {}).get("string_value", "") for name in ("network", "task"))
            cut = parameters.get("dimensions", {}).get("string_value", "")
            sizes = tuple(sorted({int(size) for size in cut.split(",") if size.strip().isdecimal()}))
            said = parameters.get("heeds_cancellation", {}).get("string_value", "").strip().lower() == "true"
            shares = "ensemble_scheduling" in known or bool(network)
            versions = tuple(data.get("versions", ()))
            most = int(known.get("max_batch_size", 0))
            texts = config is not None and _ids(known) <= {TEXT}
            steps = tuple(map(_step, known.get("ensemble_scheduling", {}).get("step", ())))
            decoupled = bool(known.get("model_transaction_policy", {}).get("decoupled")) if config is not None else None
            heeds = said or (bool(decoupled) and "stages" in parameters)  # packed hooks that yield
            return cls(
                data["name"], versions, inputs, outputs, batched, example, part_of, shares, most, texts, steps,
                decoupled, _batcher(known, data["name"], _newest(versions)), network, task, _instances(known), sizes,
                heeds, _together(known, decoupled), _waits_s(known, decoupled),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            raise ProtocolError(f"can't read the model's metadata: {err!r}") from err


def example_request(metadata: ModelMetadata, generator: np.random.Generator | None = None) -> dict[str, Any]:
    """An infer request in JSON: the model's own example, else one made up at batch 1, varying dimensions 1.

    An input of the model's own example may hold "base64" in place of "data": the raw bytes of one BYTES element,
    which only the binary form can carry.

    Args:
        generator: draws the values; None means zeros and empty strings.
    """
    if metadata.example is not None:
        return dict(metadata.example)
    return {"inputs": [_made_up(tensor, generator) for tensor in metadata.inputs]}


def example_elements(metadata: ModelMetadata) -> int:
    """Elements of `example_request`'s inputs, without making it; 0 where it is the model's own."""
    if metadata.example is not None:
        return 0
    return sum(math.prod(max(dim, 1) for dim in tensor.shape) for tensor in metadata.inputs)


def example_json(metadata: ModelMetadata) -> bytes:
    """`example_request` of zeros, written: without a list of its elements, which would take a hundred times as long.

    Raises:
        ProtocolError: it has more than `MOST_MADE_UP` elements.
    """
    if metadata.example is not None:
        return orjson.dumps(metadata.example)
    if (elements := example_elements(metadata)) > MOST_MADE_UP:
        raise ProtocolError(f"its inputs have {elements} elements, and an example at most {MOST_MADE_UP}")
    inputs = []
    for tensor in metadata.inputs:
        shape = [max(dim, 1) for dim in tensor.shape]
        zero = orjson.dumps(_values(tensor.datatype, [1], None))[1:-1]
        data = b"[%b%b]" % ((zero + b",") * (math.prod(shape) - 1), zero)
        about = {"name": tensor.name, "datatype": tensor.datatype, "shape": shape}
        inputs.append({**about, "data": orjson.Fragment(data)})
    return orjson.dumps({"inputs": inputs})


def _ids(config: Mapping[str, Any]) -> set[str]:
    """Datatypes in which a model asks for the id of its sequence."""
    inputs = config.get("sequence_batching", {}).get("control_input", ())
    controls = [control for item in inputs for control in item.get("control", ())]
    return {control.get("data_type", "") for control in controls if control.get("kind") == CORRELATION_ID}


def _instances(config: Mapping[str, Any]) -> int:
    """Of a model, on all its GPUs; 0 for an ensemble, which has none."""
    groups = config.get("instance_group", ())
    return sum(int(group.get("count", 1)) * (len(group.get("gpus", ())) or 1) for group in groups)


_IN_ORDER = ("preferred_batch_size", "max_queue_delay_microseconds", "preserve_ordering")


def _together(config: Mapping[str, Any], decoupled: bool | None) -> int:
    """One that gives its answers when it likes may work on any number."""
    if decoupled is None or decoupled:
        return 0
    batches = "dynamic_batching" in config or "sequence_batching" in config
    return max(1, int(config.get("max_batch_size", 0))) if batches else 1


def _waits_s(config: Mapping[str, Any], decoupled: bool | None) -> float:
    batching = config.get("dynamic_batching", {})
    plain = all(name in _IN_ORDER or not value for name, value in batching.items())  # no priorities, nothing put off
    is_cached = bool(config.get("response_cache", {}).get("enable"))  # what is in it waits for no instance
    if decoupled is None or decoupled or "sequence_batching" in config or is_cached or not plain:
        return math.inf
    return int(batching.get("max_queue_delay_microseconds", 0)) / 1e6


def _newest(versions: Sequence[str]) -> str:
    """The one that Triton chooses."""
    return max((each for each in versions if each.isdigit()), key=int, default="")


def _batcher(config: Mapping[str, Any], name: str, version: str) -> Batcher | None:
    batching = config.get("sequence_batching")
    if batching is None:
        return None
    instances = _instances(config)
    each = int(batching.get("oldest", {}).get("max_candidate_sequences", 0)) or int(config.get("max_batch_size", 0))
    idle = int(batching.get("max_sequence_idle_microseconds", 0)) or DEFAULT_IDLE
    return Batcher(name, version, max(1, instances) * max(1, each), idle / 1e6)


def _step(step: Mapping[str, Any]) -> tuple[str, str | None]:
    version = int(step.get("model_version", -1))
    return step["model_name"], str(version) if version >= 0 else None


def _tensor(item: Mapping[str, Any], *, optional: bool = False) -> TensorMetadata:
    if item["datatype"] not in DATATYPES:
        raise ProtocolError(f"tensor {item['name']!r} has the unknown datatype {item['datatype']!r}")
    return TensorMetadata(item["name"], item["datatype"], tuple(int(dim) for dim in item["shape"]), optional)


def _made_up(tensor: TensorMetadata, generator: np.random.Generator | None) -> dict[str, Any]:
    shape = [max(dim, 1) for dim in tensor.shape]
    return {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": shape,
        "data": _values(tensor.datatype, shape, generator),
    }


def _values(datatype: str, shape: Sequence[int], generator: np.random.Generator | None) -> list[Any]:
    size = int(np.prod(shape))
    dtype = DATATYPES[datatype]
    if datatype == "BYTES":
        if generator is None:
            return [""] * size
        return [bytes(row).decode() for row in generator.integers(97, 123, (size, 8), dtype=np.uint8)]
    if generator is None:
        values = np.zeros(size, dtype)
    elif dtype.kind == "f":
        values = generator.random(size, dtype=np.float32).astype(dtype)
    else:
        values = generator.integers(0, 2, size).astype(dtype)  # 0 and 1 are in every vocabulary
    result: list[Any] = values.tolist()
    return result

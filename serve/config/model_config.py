"""A Triton model's configuration as data, under the field names of Triton's own protobuf schema.

Only what is used is here. A field is added by writing it into its dataclass under the schema's name: serve.config.pbtxt
reads and writes whatever the dataclasses declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "DTYPE_OF",
    "TRITON_TYPE_OF",
    "Accelerator",
    "CudaOptimization",
    "DataType",
    "EnsembleStep",
    "ExecutionAccelerators",
    "GraphOptimization",
    "InstanceKind",
    "ModelAllVersions",
    "ModelConfig",
    "ModelDynamicBatching",
    "ModelEnsembling",
    "ModelInput",
    "ModelInstanceGroup",
    "ModelLatestVersions",
    "ModelOptimizationPolicy",
    "ModelOutput",
    "ModelPinnedMemoryBuffer",
    "ModelQueuePolicy",
    "ModelRateLimiter",
    "ModelResponseCache",
    "ModelSpecificVersions",
    "ModelTensorReshape",
    "ModelTransactionPolicy",
    "ModelVersionPolicy",
    "ModelWarmup",
    "RateLimiterResource",
    "WarmupInput",
    "protocol_datatype",
]

DataType = Literal[
    "TYPE_BOOL", "TYPE_UINT8", "TYPE_UINT16", "TYPE_UINT32", "TYPE_UINT64", "TYPE_INT8", "TYPE_INT16", "TYPE_INT32",
    "TYPE_INT64", "TYPE_FP16", "TYPE_FP32", "TYPE_FP64", "TYPE_BF16", "TYPE_STRING", "TYPE_INVALID",
]  # fmt: skip
InstanceKind = Literal["KIND_AUTO", "KIND_GPU", "KIND_CPU", "KIND_MODEL"]
TimeoutAction = Literal["REJECT", "DELAY"]

TRITON_TYPE_OF: Mapping[str, DataType] = {
    "bool": "TYPE_BOOL", "uint8": "TYPE_UINT8", "uint16": "TYPE_UINT16", "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64", "int8": "TYPE_INT8", "int16": "TYPE_INT16", "int32": "TYPE_INT32", "int64": "TYPE_INT64",
    "float16": "TYPE_FP16", "float32": "TYPE_FP32", "float64": "TYPE_FP64", "string": "TYPE_STRING",
}  # fmt: skip
"""Triton's data type for each dtype of compress.artifact.TensorSpec."""

DTYPE_OF: Mapping[str, str] = {triton: dtype for dtype, triton in TRITON_TYPE_OF.items()}
"""The other way round."""


def protocol_datatype(data_type: str) -> str:
    """The Open Inference Protocol's word for a Triton data type ("TYPE_FP32" is "FP32", "TYPE_STRING" is "BYTES")."""
    return "BYTES" if data_type == "TYPE_STRING" else data_type.removeprefix("TYPE_")


@dataclass(frozen=True)
class ModelTensorReshape:
    """The shape that the backend sees where it isn't `dims`; () for a scalar for each sample."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelInput:
    """One input; `dims` leaves the batch out when max_batch_size is positive, -1 stands for a varying dimension."""

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    reshape: ModelTensorReshape | None = None
    optional: bool = False


@dataclass(frozen=True)
class ModelOutput:
    """One output; `dims` as in ModelInput."""

    name: str
    data_type: DataType
    dims: tuple[int, ...]
    reshape: ModelTensorReshape | None = None
    label_filename: str = ""


@dataclass(frozen=True)
class RateLimiterResource:
    """What an instance takes while it runs; `global` of the schema is left out, a resource is each device's own."""

    name: str
    count: int = 1


@dataclass(frozen=True)
class ModelRateLimiter:
    """Instances of all models share resources; a larger priority number waits longer."""

    resources: tuple[RateLimiterResource, ...] = ()
    priority: int = 0


@dataclass(frozen=True)
class ModelInstanceGroup:
    """How many copies of the model run, and on what."""

    count: int = 1
    kind: InstanceKind = "KIND_CPU"
    gpus: tuple[int, ...] = ()
    rate_limiter: ModelRateLimiter | None = None
    profile: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelQueuePolicy:
    """When a waiting request is given up; Triton's own defaults are no timeout (0) and no bound (0)."""

    timeout_action: TimeoutAction = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


@dataclass(frozen=True)
class ModelDynamicBatching:
    """How requests are put together; max_queue_delay_microseconds 0 takes what waits and waits for nothing."""

    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False
    priority_levels: int = 0
    default_priority_level: int = 0
    default_queue_policy: ModelQueuePolicy | None = None
    priority_queue_policy: Mapping[int, ModelQueuePolicy] = field(default_factory=dict)


@dataclass(frozen=True)
class EnsembleStep:
    """One model of an ensemble: its input names, and its output names, each mapped to a tensor of the ensemble."""

    model_name: str
    model_version: int = -1
    input_map: Mapping[str, str] = field(default_factory=dict)
    output_map: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelEnsembling:
    """The steps of an ensemble; Triton orders them by their tensors."""

    step: tuple[EnsembleStep, ...] = ()


@dataclass(frozen=True)
class ModelLatestVersions:
    """Serve the newest so many versions."""

    num_versions: int = 1


@dataclass(frozen=True)
class ModelAllVersions:
    """Serve every version."""


@dataclass(frozen=True)
class ModelSpecificVersions:
    """Serve these versions."""

    versions: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelVersionPolicy:
    """Which versions are served; exactly one of the three is set."""

    latest: ModelLatestVersions | None = None
    all: ModelAllVersions | None = None
    specific: ModelSpecificVersions | None = None


@dataclass(frozen=True)
class WarmupInput:
    """One input of a warm-up sample; `dims` without the batch; exactly one kind of data is set."""

    data_type: DataType
    dims: tuple[int, ...]
    zero_data: bool = False
    random_data: bool = False
    input_data_file: str = ""


@dataclass(frozen=True)
class ModelWarmup:
    """One request that is run before the model is ready, `count` times (0 is once)."""

    name: str
    batch_size: int = 1
    inputs: Mapping[str, WarmupInput] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True)
class GraphOptimization:
    """How far the backend may rewrite the graph; for ONNX Runtime -1 basic, 0 all, 1 extended, 2 none."""

    level: int = 0


@dataclass(frozen=True)
class Accelerator:
    """An execution provider: "tensorrt", "cuda" or "openvino", and its options."""

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ExecutionAccelerators:
    """Execution providers, the preferred one first."""

    gpu_execution_accelerator: tuple[Accelerator, ...] = ()
    cpu_execution_accelerator: tuple[Accelerator, ...] = ()


@dataclass(frozen=True)
class CudaOptimization:
    """CUDA graphs, for backends that capture them."""

    graphs: bool = False


@dataclass(frozen=True)
class ModelPinnedMemoryBuffer:
    """Whether tensors pass between CPU and GPU through pinned memory; Triton does so unless told otherwise."""

    enable: bool = False


@dataclass(frozen=True)
class ModelOptimizationPolicy:
    """What the backend does to run the model faster."""

    graph: GraphOptimization | None = None
    cuda: CudaOptimization | None = None
    execution_accelerators: ExecutionAccelerators | None = None
    input_pinned_memory: ModelPinnedMemoryBuffer | None = None
    output_pinned_memory: ModelPinnedMemoryBuffer | None = None


@dataclass(frozen=True)
class ModelResponseCache:
    """Whether equal requests are answered from the server's cache."""

    enable: bool = False


@dataclass(frozen=True)
class ModelTransactionPolicy:
    """Whether a request may have any number of answers."""

    decoupled: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """What config.pbtxt says. `backend` names who runs the model; an ensemble has `platform` "ensemble" instead."""

    name: str
    platform: str = ""
    backend: str = ""
    version_policy: ModelVersionPolicy | None = None
    max_batch_size: int = 0
    input: tuple[ModelInput, ...] = ()
    output: tuple[ModelOutput, ...] = ()
    optimization: ModelOptimizationPolicy | None = None
    instance_group: tuple[ModelInstanceGroup, ...] = ()
    default_model_filename: str = ""
    metric_tags: Mapping[str, str] = field(default_factory=dict)
    dynamic_batching: ModelDynamicBatching | None = None
    ensemble_scheduling: ModelEnsembling | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    model_warmup: tuple[ModelWarmup, ...] = ()
    model_transaction_policy: ModelTransactionPolicy | None = None
    response_cache: ModelResponseCache | None = None

"""The configuration of the model that runs the network."""

from __future__ import annotations

from compress.artifact import Signature
from compress.errors import RepositoryError
from serve.config.model_config import (
    Accelerator,
    CudaOptimization,
    ExecutionAccelerators,
    GraphOptimization,
    InstanceKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelLatestVersions,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelPinnedMemoryBuffer,
    ModelQueuePolicy,
    ModelResponseCache,
    ModelTensorReshape,
    ModelVersionPolicy,
    ModelWarmup,
    WarmupInput,
)
from serve.hooks.types import HookTensor, of_spec
from serve.pack.engine_file import Engine
from serve.pack.options import PackOptions

__all__ = ["LABELS", "batching", "input_of", "latest", "network_config", "output_of"]

LABELS = "labels.txt"


def network_config(
    name: str,
    signature: Signature,
    *,
    options: PackOptions,
    parameters: dict[str, str],
    backend: str = "onnxruntime",
    platform: str = "",
    engine: Engine | None = None,
) -> ModelConfig:
    """How Triton runs the network.

    Args:
        name: of the model.
        signature: the network's.
        options: what the user chose.
        parameters: go into the configuration as they are.
        backend: that opens the network's file.
        platform: for a backend that has several.
        engine: the profiles of a TensorRT plan, as far as they are known.

    Raises:
        RepositoryError: Triton can't serve such a signature.
    """
    batched = signature.batched
    tensors = [of_spec(spec.name, spec, batched=batched) for spec in (*signature.inputs, *signature.outputs)]
    for tensor in tensors:
        if not tensor.dims and not batched:
            raise RepositoryError(
                f"can't serve {tensor.name!r}, a scalar",
                why="Triton gives a tensor without dimensions to a model with a batch only",
                mend="export the model with a batch dimension, or with the shape [1] for that tensor",
            )
    count = len(signature.inputs)
    outputs = [output_of(tensor) for tensor in tensors[count:]]
    if options.labels is not None:
        first = outputs[0]
        outputs[0] = ModelOutput(first.name, first.data_type, first.dims, first.reshape, LABELS)
    largest = options.max_batch_size if batched else 1
    return ModelConfig(
        name=name,
        platform=platform,
        backend=backend,
        version_policy=latest(options),
        max_batch_size=options.max_batch_size if batched else 0,
        input=tuple(input_of(tensor) for tensor in tensors[:count]),
        output=tuple(outputs),
        optimization=_optimization(options),
        instance_group=(_instances(options),),
        metric_tags=options.metric_tags,
        dynamic_batching=batching(options) if batched else None,
        default_model_filename="model.onnx" if backend == "openvino" else "",
        parameters=parameters | _runtime(backend, options, batched=batched),
        model_warmup=_warmups(signature, tensors, largest, engine) if options.warmup else (),
        response_cache=ModelResponseCache(enable=True) if options.response_cache else None,
    )


def _instances(options: PackOptions) -> ModelInstanceGroup:
    kind: InstanceKind = "KIND_GPU" if options.device == "gpu" else "KIND_CPU"
    return ModelInstanceGroup(options.instances, kind, options.gpus, profile=tuple(map(str, options.profiles)))


def latest(options: PackOptions) -> ModelVersionPolicy:
    """Which versions are served."""
    return ModelVersionPolicy(latest=ModelLatestVersions(options.serve_latest))


def input_of(tensor: HookTensor) -> ModelInput:
    """A tensor as an input; a number for each item needs a reshape."""
    return ModelInput(tensor.name, tensor.data_type, tensor.dims or (1,), None if tensor.dims else ModelTensorReshape())


def output_of(tensor: HookTensor) -> ModelOutput:
    """A tensor as an output; a number for each item needs a reshape."""
    return ModelOutput(
        tensor.name, tensor.data_type, tensor.dims or (1,), None if tensor.dims else ModelTensorReshape()
    )


def batching(options: PackOptions) -> ModelDynamicBatching | None:
    """How requests are put together; None when each runs as it comes."""
    if not options.dynamic_batching:
        return None
    policy = ModelQueuePolicy(
        timeout_action="REJECT",
        default_timeout_microseconds=options.queue_timeout_microseconds,
        allow_timeout_override=options.queue_timeout_microseconds > 0,
        max_queue_size=options.max_queue_size,
    )
    bounded = options.queue_timeout_microseconds or options.max_queue_size
    return ModelDynamicBatching(
        preferred_batch_size=options.preferred_batch_size,
        max_queue_delay_microseconds=options.max_queue_delay_microseconds,
        preserve_ordering=options.preserve_ordering,
        priority_levels=options.priority_levels,
        default_priority_level=options.default_priority_level,
        default_queue_policy=policy if bounded else None,
    )


def _runtime(backend: str, options: PackOptions, *, batched: bool) -> dict[str, str]:
    """The runtime's threads. ONNX Runtime's don't spin, because instances share the cores.

    OpenVINO's are those of all instances together, each of which is a stream. Triton's own backend gives the file
    batches of one size, the largest, and has to be told to fill them up.
    """
    if backend == "openvino":
        return {
            "NUM_STREAMS": str(options.instances),
            "INFERENCE_NUM_THREADS": str(options.instances * options.threads),
            "PERFORMANCE_HINT": "LATENCY" if options.instances == 1 else "THROUGHPUT",
        } | ({"ENABLE_BATCH_PADDING": "YES"} if batched else {})
    if backend != "onnxruntime":
        return {}
    return {
        "intra_op_thread_count": str(options.threads),
        "inter_op_thread_count": "1",
        "execution_mode": "0",
        "session.intra_op.allow_spinning": "0",
        "session.inter_op.allow_spinning": "0",
    }


def _optimization(options: PackOptions) -> ModelOptimizationPolicy | None:
    accelerators = []
    if options.accelerator == "tensorrt":
        parameters = {"precision_mode": options.precision.upper()} if options.precision else {}
        if options.engine_cache:
            parameters |= {"trt_engine_cache_enable": "1", "trt_engine_cache_path": options.engine_cache}
        accelerators.append(Accelerator("tensorrt", parameters))
    elif options.accelerator == "cuda":
        accelerators.append(Accelerator("cuda"))
    # On a GPU Triton pins them unless it is told otherwise; written, so that the file says what it does.
    pinned = ModelPinnedMemoryBuffer(enable=options.pinned_memory) if options.device == "gpu" else None
    policy = ModelOptimizationPolicy(
        graph=None if options.graph_level is None else GraphOptimization(options.graph_level),
        cuda=CudaOptimization(graphs=True) if options.cuda_graphs else None,
        input_pinned_memory=pinned,
        output_pinned_memory=pinned,
        execution_accelerators=ExecutionAccelerators(tuple(accelerators)) if accelerators else None,
    )
    return policy if policy != ModelOptimizationPolicy() else None


def _warmups(
    signature: Signature, tensors: list[HookTensor], largest: int, engine: Engine | None
) -> tuple[ModelWarmup, ...]:
    """What runs before the network is ready; of a plan, each profile at its smallest, best and largest shapes."""
    specs = signature.inputs
    if engine is None:
        return _warmup(signature, tensors, largest)
    found: dict[str, ModelWarmup] = {}
    batched = all(spec.batched for spec in specs)
    for number, profile in enumerate(engine.profiles):
        for what, at in (("smallest", 0), ("best", 1), ("largest", 2)):
            shapes = {
                spec.name: profile[spec.name][at] if spec.name in profile else spec.at(signature.at(1))
                for spec in specs
            }
            size = min(shape[0] for shape in shapes.values()) if batched else 1
            if size > max(largest, 1):
                continue
            inputs = {
                spec.name: WarmupInput(tensor.data_type, _dims(shapes[spec.name], batched=batched), zero_data=True)
                for spec, tensor in zip(specs, tensors, strict=False)
            }
            found.setdefault(str(sorted(shapes.items())), ModelWarmup(f"profile_{number}_{what}", size, inputs))
    return tuple(found.values())


def _dims(shape: tuple[int, ...], *, batched: bool) -> tuple[int, ...]:
    return (shape[1:] or (1,)) if batched else shape


def _warmup(signature: Signature, tensors: list[HookTensor], largest: int) -> tuple[ModelWarmup, ...]:
    """Zeros at batch 1 and at the largest batch; what else varies is of the representative size that it ran at.

    None where the signature names no such size: no other is sure to run. Zeros, because they are an index that every
    lookup has, and no random bits are read as NaN.
    """
    specs, sizes = signature.inputs, signature.at(1)
    if signature.assumed or (not signature.batched and signature.batches):
        return ()
    inputs = {
        spec.name: WarmupInput(
            tensor.data_type, _dims(spec.at(sizes), batched=signature.batched) or (1,), zero_data=True
        )
        for spec, tensor in zip(specs, tensors[: len(specs)], strict=True)
    }
    return tuple(ModelWarmup(f"batch_{size}", size, inputs) for size in sorted({1, largest}))

"""Which Triton models a network and its hooks become, and their configurations."""

from __future__ import annotations

import json
from dataclasses import dataclass

from compress.artifact import Signature, TensorSpec
from compress.errors import RepositoryError
from serve.hook_example import EXAMPLE_PARAMETER, example_request
from serve.hook_types import HookTensor, of_spec
from serve.hooks import Hooks, Stage
from serve.model_config import (
    EnsembleStep,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelLatestVersions,
    ModelOutput,
    ModelQueuePolicy,
    ModelTensorReshape,
    ModelVersionPolicy,
    ModelWarmup,
    WarmupInput,
)

__all__ = ["PACKED_BY", "PART_OF", "SUFFIXES", "PackOptions", "configs_for"]

PACKED_BY = "packed_by"
PART_OF = "part_of"
SUFFIXES = ("_preprocess", "_network", "_postprocess")


@dataclass(frozen=True)
class PackOptions:
    """How Triton runs the models.

    instances times threads should not pass the cores of the machine that serves. Two instances with one thread each
    serve more than one instance with two threads, which answers a single request sooner.

    Attributes:
        instances: copies of the network that run side by side, each with its own memory.
        threads: ONNX Runtime threads of each instance.
        hook_instances: processes for each of preprocess and postprocess.
        max_batch_size: the most items that one run takes.
        max_queue_delay_microseconds: how long a request may wait for others to join its batch; 0 takes those that
            already wait.
        max_queue_size: the most requests that may wait for a model in Triton, beyond which it refuses them; 0 for no
            bound. The gateway bounds them anyway, and with this bound or the next, Triton's batcher takes no request
            before an instance is idle and at times oversleeps by half a second.
        queue_timeout_microseconds: how long a request may wait for a model in Triton before it is refused; 0 for no
            bound.
    """

    instances: int = 2
    threads: int = 1
    hook_instances: int = 1
    max_batch_size: int = 32
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 0
    queue_timeout_microseconds: int = 0

    def __post_init__(self) -> None:
        least = dict.fromkeys(("max_queue_delay_microseconds", "max_queue_size", "queue_timeout_microseconds"), 0)
        for name, value in vars(self).items():
            if value < least.get(name, 1):
                raise RepositoryError(
                    f"can't pack with {name.replace('_', '-')} {value}",
                    why=f"it must be {least.get(name, 1)} or more",
                    mend=f"give another number, or leave it out for {getattr(type(self), name)}",
                )


def configs_for(
    name: str, signature: Signature, sha256: str, hooks: Hooks | None, options: PackOptions
) -> tuple[ModelConfig, ...]:
    """The models that serve a network as `name`, that one first.

    Without hooks it is the network itself. With hooks it is an ensemble of NAME_preprocess, NAME_network and
    NAME_postprocess, of which the first and the last are there when the hooks have them.

    Args:
        sha256: of the network's file, kept in its parameters.

    Raises:
        RepositoryError: Triton can't serve such a signature.
    """
    if hooks is None:
        return (_network(name, name, signature, sha256, options),)
    network = _network(f"{name}_network", name, signature, sha256, options)
    before, after = hooks.preprocess, hooks.postprocess
    helpers = [network]
    if before:
        helpers.insert(0, _hook(name, "preprocess", before, hooks, network.max_batch_size, options))
    if after:
        helpers.append(_hook(name, "postprocess", after, hooks, network.max_batch_size, options))
    return (_ensemble(name, hooks, helpers[0], network, helpers[-1]), *helpers)


def _network(name: str, part_of: str, signature: Signature, sha256: str, options: PackOptions) -> ModelConfig:
    batched = signature.batched
    tensors = [of_spec(spec.name, spec, batched=batched) for spec in (*signature.inputs, *signature.outputs)]
    for tensor in tensors:
        if not tensor.dims and not batched:
            raise RepositoryError(
                f"can't serve {tensor.name!r}, a scalar",
                why="Triton gives a tensor without dimensions to a model with a batch only",
                mend="export the model with a batch dimension, or with the shape [1] for that tensor",
            )
    spinning = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}
    parameters = {
        "intra_op_thread_count": str(options.threads),
        "inter_op_thread_count": "1",
        "execution_mode": "0",
        "model_sha256": sha256,
    }
    return ModelConfig(
        name=name,
        backend="onnxruntime",
        version_policy=ModelVersionPolicy(latest=ModelLatestVersions(1)),
        max_batch_size=options.max_batch_size if batched else 0,
        input=tuple(_input(tensor) for tensor in tensors[: len(signature.inputs)]),
        output=tuple(_output(tensor) for tensor in tensors[len(signature.inputs) :]),
        instance_group=(ModelInstanceGroup(options.instances, "KIND_CPU"),),
        dynamic_batching=_batching(options) if batched else None,
        parameters=_marks(part_of) | parameters | spinning,
        model_warmup=_warmup(signature.inputs, tensors, options.max_batch_size if batched else 1),
    )


def _hook(name: str, stage: str, what: Stage, hooks: Hooks, max_batch_size: int, options: PackOptions) -> ModelConfig:
    parameters = {
        "stage": stage,
        "arguments": json.dumps({item.name: item.kind for item in what.arguments}),
        "results": json.dumps({item.name: item.kind for item in what.results}),
        "returns": what.returns,
        "requirements": json.dumps(hooks.requirements),
    }
    return ModelConfig(
        name=f"{name}_{stage}",
        backend="python",
        version_policy=ModelVersionPolicy(latest=ModelLatestVersions(1)),
        max_batch_size=max_batch_size,
        input=tuple(_input(tensor) for tensor in what.arguments),
        output=tuple(_output(tensor) for tensor in what.results),
        instance_group=(ModelInstanceGroup(options.hook_instances, "KIND_CPU"),),
        dynamic_batching=_batching(options) if max_batch_size else None,
        parameters=_marks(name) | parameters,
    )


def _ensemble(name: str, hooks: Hooks, front: ModelConfig, network: ModelConfig, back: ModelConfig) -> ModelConfig:
    """The front model; a tensor between two steps is named after the network's, with a word that no hook can use."""
    into = {
        tensor.name: tensor.name if front is network else f"network-input:{tensor.name}" for tensor in network.input
    }
    out = {
        tensor.name: tensor.name if back is network else f"network-output:{tensor.name}" for tensor in network.output
    }
    steps = []
    if front is not network:
        steps.append(EnsembleStep(front.name, input_map=_same(front.input), output_map=into))
    steps.append(EnsembleStep(network.name, input_map=into, output_map=out))
    if back is not network and hooks.postprocess is not None:
        arguments = {item.name: out[item.tensor] for item in hooks.postprocess.arguments}
        steps.append(EnsembleStep(back.name, input_map=arguments, output_map=_same(back.output)))
    # Triton reshapes for the step's own model: the ensemble itself has the outer shapes only.
    inputs = tuple(ModelInput(tensor.name, tensor.data_type, tensor.dims) for tensor in front.input)
    outputs = tuple(ModelOutput(tensor.name, tensor.data_type, tensor.dims) for tensor in back.output)
    example = example_request(hooks, inputs, batched=network.max_batch_size > 0)
    return ModelConfig(
        name=name,
        platform="ensemble",
        version_policy=ModelVersionPolicy(latest=ModelLatestVersions(1)),
        max_batch_size=network.max_batch_size,
        input=inputs,
        output=outputs,
        ensemble_scheduling=ModelEnsembling(tuple(steps)),
        parameters=_marks(name) | ({EXAMPLE_PARAMETER: example} if example else {}),
    )


def _marks(part_of: str) -> dict[str, str]:
    """How a later `serve pack` knows what it may replace."""
    return {PACKED_BY: "serve", PART_OF: part_of}


def _same(tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}


def _input(tensor: HookTensor) -> ModelInput:
    return ModelInput(tensor.name, tensor.data_type, tensor.dims or (1,), None if tensor.dims else ModelTensorReshape())


def _output(tensor: HookTensor) -> ModelOutput:
    return ModelOutput(
        tensor.name, tensor.data_type, tensor.dims or (1,), None if tensor.dims else ModelTensorReshape()
    )


def _batching(options: PackOptions) -> ModelDynamicBatching:
    policy = ModelQueuePolicy(
        timeout_action="REJECT",
        default_timeout_microseconds=options.queue_timeout_microseconds,
        allow_timeout_override=options.queue_timeout_microseconds > 0,
        max_queue_size=options.max_queue_size,
    )
    bounded = options.queue_timeout_microseconds or options.max_queue_size
    return ModelDynamicBatching(
        max_queue_delay_microseconds=options.max_queue_delay_microseconds,
        default_queue_policy=policy if bounded else None,
    )


def _warmup(specs: tuple[TensorSpec, ...], tensors: list[HookTensor], max_batch_size: int) -> tuple[ModelWarmup, ...]:
    """Zeros at batch 1 and at the largest batch; none when another dimension varies, for which no size is sure to run.

    Zeros, because they are an index that every lookup has, and no random bits are read as NaN.
    """
    inputs = {
        spec.name: WarmupInput(tensor.data_type, tensor.dims or (1,), zero_data=True)
        for spec, tensor in zip(specs, tensors[: len(specs)], strict=True)
    }
    if any(-1 in warm.dims for warm in inputs.values()):
        return ()
    return tuple(ModelWarmup(f"batch_{size}", size, inputs) for size in sorted({1, max_batch_size}))

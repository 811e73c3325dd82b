"""Which Triton models a network and its hooks become, and their configurations."""

from __future__ import annotations

import json
from dataclasses import replace

from compress.artifact import Signature
from serve.config.model_config import (
    EnsembleStep,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelTransactionPolicy,
)
from serve.hooks.example import EXAMPLE_PARAMETER, example_request
from serve.hooks.load import Hooks, Stage
from serve.pack.engine_file import Engine
from serve.pack.network_config import batching, input_of, latest, network_config, output_of
from serve.pack.options import PackOptions
from serve.repository.folders import PACKED_BY, PART_OF, SUFFIXES

__all__ = ["PACKED_BY", "PART_OF", "SUFFIXES", "TASK", "configs_for"]

TASK = "task"  # the parameter by which others know what a served model does
DIMENSIONS = "dimensions"  # and this, to how many numbers its embeddings may be cut


def configs_for(
    name: str,
    signature: Signature,
    sha256: str,
    hooks: Hooks | None,
    options: PackOptions,
    backend: str,
    platform: str = "",
    engine: Engine | None = None,
    task: str = "",
) -> dict[str, ModelConfig]:
    """The models that serve a network as `name`, that one first, by their roles.

    Without hooks it is the network itself. With hooks it is an ensemble of NAME_preprocess, NAME_network and
    NAME_postprocess, of which the first and the last are there when the hooks have them; or, as a pipeline, one Python
    model that runs the hooks and asks NAME_network. Hooks that yield are always that: a step of an ensemble is never
    told that nobody waits for its answers any more (Triton 24.10), and would go on for ever.

    Args:
        name: what clients ask for.
        signature: the network's.
        sha256: of the network's file, kept in its parameters.
        hooks: that stand around it.
        options: what the user chose.
        backend: that opens the network's file.
        platform: for a backend that has several.
        engine: the profiles of a TensorRT plan, as far as they are known.
        task: what the served model does, of `compress.processor.TASKS`, kept in its parameters; "" where nobody says.

    Raises:
        RepositoryError: Triton can't serve such a signature.
    """
    parameters = _marks(name) | {"model_sha256": sha256}
    own = name if hooks is None else f"{name}_network"
    network = network_config(
        own, signature, options=options, parameters=parameters, backend=backend, platform=platform, engine=engine
    )
    if hooks is None:
        return {"network": network}
    if options.pipeline == "bls" or hooks.streams:
        return {"pipeline": _pipeline(name, hooks, network, options, task), "network": network}
    before, after = hooks.preprocess, hooks.postprocess
    helpers = {"network": network}
    if before:
        helpers = {"preprocess": _hook(name, "preprocess", before, hooks, network, options)} | helpers
    if after:
        helpers["postprocess"] = _hook(name, "postprocess", after, hooks, network, options)
    front, *_, back = [*helpers.values(), network] if len(helpers) == 1 else helpers.values()
    return {"ensemble": _ensemble(name, hooks, front, network, back, options, task)} | helpers


def _hook(name: str, stage: str, what: Stage, hooks: Hooks, network: ModelConfig, options: PackOptions) -> ModelConfig:
    parameters = {
        "stages": json.dumps({stage: what.spec() | {"tensors": {}}}),
        "requirements": json.dumps(hooks.source.requirements),
    }
    inputs = tuple(input_of(tensor) for tensor in what.arguments)
    outputs = tuple(output_of(tensor) for tensor in what.results)
    marks = _marks(name) | parameters
    return _python(f"{name}_{stage}", inputs, outputs, marks, network.max_batch_size, options)


def _python(
    name: str,
    inputs: tuple[ModelInput, ...],
    outputs: tuple[ModelOutput, ...],
    parameters: dict[str, str],
    max_batch_size: int,
    options: PackOptions,
    *,
    streams: bool = False,
) -> ModelConfig:
    """A model that runs hooks."""
    return ModelConfig(
        name=name,
        backend="python",
        version_policy=latest(options),
        max_batch_size=max_batch_size,
        input=inputs,
        output=outputs,
        instance_group=(ModelInstanceGroup(options.hook_instances, "KIND_CPU"),),
        dynamic_batching=batching(options) if max_batch_size else None,
        parameters=parameters,
        model_transaction_policy=ModelTransactionPolicy(decoupled=True) if streams else None,
    )


def _pipeline(name: str, hooks: Hooks, network: ModelConfig, options: PackOptions, task: str) -> ModelConfig:
    """One Python model that runs the hooks, and asks the network through Triton."""
    before, after = hooks.preprocess, hooks.postprocess
    inputs = tuple(input_of(tensor) for tensor in before.arguments) if before else network.input
    outputs = tuple(output_of(tensor) for tensor in after.results) if after else network.output
    passed = before.passed if before else ()
    stages = {key: stage.spec() for key, stage in (("preprocess", before), ("postprocess", after)) if stage}
    needed = [item.tensor or item.name for item in after.arguments] if after else [item.name for item in outputs]
    parameters = {
        "stages": json.dumps(stages),
        "network": network.name,
        "network_outputs": json.dumps(needed),
        "requirements": json.dumps(hooks.source.requirements),
    }
    if passed:
        parameters["passed"] = json.dumps([item.name for item in passed])
    parameters |= _marks(name) | _task(task, options) | _example(hooks, inputs, network)
    plain = tuple(replace(output, label_filename="") for output in (*outputs, *map(output_of, passed)))
    return _python(name, inputs, plain, parameters, network.max_batch_size, options, streams=hooks.streams)


def _ensemble(
    name: str, hooks: Hooks, front: ModelConfig, network: ModelConfig, back: ModelConfig, options: PackOptions,
    task: str,
) -> ModelConfig:  # fmt: skip
    """The front model; a tensor between two steps is named after the network's, with a word that no hook can use."""
    into = {
        tensor.name: tensor.name if front is network else f"network-input:{tensor.name}" for tensor in network.input
    }
    out = {tensor.name: tensor.name for tensor in network.output}
    if back is not network and hooks.postprocess is not None:
        # Only what it takes: Triton refuses an ensemble with a tensor that goes nowhere.
        out = {item.tensor: f"network-output:{item.tensor}" for item in hooks.postprocess.arguments}
    passed = tuple(map(output_of, hooks.preprocess.passed)) if hooks.preprocess else ()
    steps = []
    if front is not network:
        steps.append(EnsembleStep(front.name, input_map=_same(front.input), output_map=into | _same(passed)))
    steps.append(EnsembleStep(network.name, input_map=into, output_map=out))
    if back is not network and hooks.postprocess is not None:
        arguments = {item.name: out[item.tensor] for item in hooks.postprocess.arguments}
        steps.append(EnsembleStep(back.name, input_map=arguments, output_map=_same(back.output)))
    # Triton reshapes for the step's own model: the ensemble itself has the outer shapes only.
    inputs = tuple(ModelInput(tensor.name, tensor.data_type, tensor.dims) for tensor in front.input)
    outputs = tuple(ModelOutput(tensor.name, tensor.data_type, tensor.dims) for tensor in (*back.output, *passed))
    return ModelConfig(
        name=name,
        platform="ensemble",
        version_policy=latest(options),
        max_batch_size=network.max_batch_size,
        input=inputs,
        output=outputs,
        ensemble_scheduling=ModelEnsembling(tuple(steps)),
        parameters=_marks(name) | _task(task, options) | _example(hooks, inputs, network),
    )


def _example(hooks: Hooks, inputs: tuple[ModelInput, ...], network: ModelConfig) -> dict[str, str]:
    """The parameter that holds a sample request, where the hooks have one."""
    example = example_request(hooks, inputs, batched=network.max_batch_size > 0)
    return {EXAMPLE_PARAMETER: example} if example else {}


def _marks(part_of: str) -> dict[str, str]:
    """How a later `serve pack` knows what it may replace."""
    return {PACKED_BY: "serve", PART_OF: part_of}


def _task(task: str, options: PackOptions) -> dict[str, str]:
    sizes = {DIMENSIONS: ",".join(map(str, sorted(set(options.dimensions))))} if options.dimensions else {}
    return ({TASK: task} if task else {}) | sizes


def _same(tensors: tuple[ModelInput, ...] | tuple[ModelOutput, ...]) -> dict[str, str]:
    return {tensor.name: tensor.name for tensor in tensors}

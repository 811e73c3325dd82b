"""What Triton refuses in an ensemble: its wiring, and what it is made of (ValidateEnsembleSchedulingConfig)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from serve.lint.finding import Findings, error
from serve.lint.model import Model

__all__ = ["ensemble_rules", "step_rules"]

ANY = -1
NOT_ITS_OWN = ("instance_group", "optimization", "model_warmup")


def ensemble_rules(model: Model) -> Findings:
    """What can be seen in the ensemble's own configuration."""
    config, name = model.config, model.name
    scheduled = config.WhichOneof("scheduling_choice") == "ensemble_scheduling"
    if scheduled != model.is_ensemble:
        mend = 'write platform: "ensemble"' if scheduled else "write ensemble_scheduling with its steps"
        yield error(name, 'platform "ensemble" and ensemble_scheduling are not both there', mend)
        return
    if not scheduled:
        return
    fields = {descriptor.name for descriptor, _ in config.ListFields()}
    for field in NOT_ITS_OWN:
        if field in fields:
            yield error(name, f"an ensemble has {field}", "write it for the models that it is made of")
    steps = config.ensemble_scheduling.step
    if not steps:
        yield error(name, "the ensemble has no step", "write one for each model")
    for number, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield error(name, f"step {number} has no {field}", "write it")
    yield from _wiring(model, steps)


def _wiring(model: Model, steps: Sequence[Any]) -> Findings:
    config, name = model.config, model.name
    inputs, outputs = {tensor.name for tensor in config.input}, {tensor.name for tensor in config.output}
    made = Counter(tensor for step in steps for tensor in step.output_map.values())
    made.update(inputs)
    used = {tensor for step in steps for tensor in step.input_map.values()}
    for tensor, count in made.items():
        if count > 1:
            yield error(name, f"the tensor {tensor!r} is made {count} times", "give each its own name")
    for tensor in sorted(used - made.keys()):
        yield error(name, f"a step takes the tensor {tensor!r}, which nothing makes", "map an input or an output to it")
    for tensor in sorted(outputs - made.keys()):
        yield error(name, f"nothing makes the output {tensor!r}", "map a step's output to it")
    for tensor in sorted(made.keys() - used - outputs):
        what = "input" if tensor in inputs else "tensor"
        yield error(name, f"nothing takes the {what} {tensor!r}", "leave it out, or map it to an input")
    ready, left = set(inputs), list(steps)
    while going := [step for step in left if set(step.input_map.values()) <= ready]:
        ready |= {tensor for step in going for tensor in step.output_map.values()}
        left = [step for step in left if step not in going]
    if left and used <= made.keys():
        waiting = ", ".join(sorted(step.model_name for step in left))
        yield error(name, f"the steps {waiting} wait for each other", "let each take what is made before it")


def step_rules(model: Model, models: Mapping[str, Model], broken: set[str]) -> Findings:
    """What the ensemble's configuration says of other models, against what these say.

    Args:
        model: an ensemble, or not.
        models: all that can be read, by name.
        broken: those that Triton will not load.
    """
    config, name = model.config, model.name
    if not model.is_ensemble:
        return
    seen = {tensor.name: (tensor.data_type, _dims(tensor), name) for tensor in (*config.input, *config.output)}
    if _reaches(model, models, name):
        yield error(name, "the ensemble is a part of itself", "take that step out")
        return
    for step in config.ensemble_scheduling.step:
        if not step.model_name:
            continue
        part = models.get(step.model_name)
        if part is None or step.model_name in broken:
            why = "can't be loaded" if step.model_name in broken else "is not in the repository"
            yield error(name, f"its step {step.model_name!r} {why}", "mend or add that model")
            continue
        if step.model_version not in (-1, *part.served):
            yield error(name, f"version {step.model_version} of {part.name!r} is not served", "write model_version: -1")
        if 0 < part.config.max_batch_size < config.max_batch_size:
            yield error(
                name,
                f"max_batch_size is {config.max_batch_size}, of its step {part.name!r} {part.config.max_batch_size}",
                "take the smallest of them",
            )
        yield from _mapped(model, step, part, seen)


def _mapped(model: Model, step: Any, part: Model, seen: dict[str, tuple[int, list[int], str]]) -> Findings:
    name = model.name
    for kind, tensors, mapped in (
        ("input", part.config.input, step.input_map),
        ("output", part.config.output, step.output_map),
    ):
        known = {tensor.name: tensor for tensor in tensors}
        for inner in sorted(set(mapped) - known.keys()):
            yield error(name, f"its step {part.name!r} has no {kind} {inner!r}", f"one of {sorted(known)}")
        if kind == "input":
            for tensor in tensors:
                if tensor.name not in mapped and not tensor.optional:
                    yield error(name, f"the input {tensor.name!r} of {part.name!r} gets no tensor", "map one to it")
        for inner, outer in mapped.items():
            if inner not in known:
                continue
            here = (known[inner].data_type, list(known[inner].dims), part.name)
            there = seen.setdefault(outer, here)
            if here[0] != there[0]:
                yield error(
                    name, f"{outer!r} has one data_type in {there[2]!r}, another in {part.name!r}", "make them one"
                )
            elif not _alike(there, here, model, part):
                yield error(
                    name, f"{outer!r} is {there[1]} in {there[2]!r} and {here[1]} in {part.name!r}", "make them one"
                )


def _alike(there: tuple[int, list[int], str], here: tuple[int, list[int], str], model: Model, part: Model) -> bool:
    """Whether the shapes fit, with the batch or without it: a model without a batch may stand in one with."""
    if _fit(there[1], here[1]):
        return True
    batched = model.config.max_batch_size > 0, part.config.max_batch_size > 0
    return _fit([ANY] * batched[0] + there[1], [ANY] * batched[1] + here[1])


def _fit(one: Sequence[int], other: Sequence[int]) -> bool:
    return len(one) == len(other) and all(a == b or ANY in (a, b) for a, b in zip(one, other, strict=True))


def _dims(tensor: Any) -> list[int]:
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def _reaches(model: Model, models: Mapping[str, Model], target: str) -> bool:
    seen: set[str] = set()
    left = [model]
    while left:
        names = {step.model_name for step in left.pop().config.ensemble_scheduling.step} - seen
        if target in names:
            return True
        seen |= names
        left += [models[name] for name in names if name in models]
    return False

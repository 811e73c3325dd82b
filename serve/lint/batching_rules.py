"""What Triton's core refuses in schedulers and the response cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

from serve.config.names import leads_out
from serve.lint.finding import Findings, error
from serve.lint.model import Model

__all__ = ["batching_rules", "cache_rules", "sequence_rules"]

DELAY = 1  # ModelQueuePolicy.TimeoutAction
CORRELATION_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
BOOLEAN = ("CONTROL_SEQUENCE_START", "CONTROL_SEQUENCE_END", "CONTROL_SEQUENCE_READY")
CHOICES = ("int32_false_true", "fp32_false_true", "bool_false_true")


def batching_rules(model: Model) -> Findings:
    """dynamic_batching: sizes, priorities, order."""
    if not model.config.HasField("dynamic_batching"):
        return
    batching, name = model.config.dynamic_batching, model.name
    yield from _preferred(model, "dynamic_batching", batching)
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield error(
            name,
            f"default_priority_level is {batching.default_priority_level}, there are {levels} priority_levels",
            f"write one from 1 (the most urgent) to {levels}",
        )
    for level in batching.priority_queue_policy if levels else ():
        if not 1 <= level <= levels:
            yield error(name, f"priority_queue_policy has the level {level}", f"write one from 1 to {levels}")
    if batching.preserve_ordering:
        if levels > 1:
            yield error(name, "preserve_ordering with several priority_levels", "leave one of them out")
        policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
        if any(policy.default_timeout_microseconds and policy.timeout_action == DELAY for policy in policies):
            yield error(name, "preserve_ordering with timeout_action DELAY", "write REJECT, or leave the order free")


def _preferred(model: Model, where: str, batching: Any) -> Findings:
    for size in batching.preferred_batch_size:
        if not 1 <= size <= model.config.max_batch_size:
            what = f"{where} has preferred_batch_size {size}, max_batch_size is {model.config.max_batch_size}"
            yield error(model.name, what, "leave preferred_batch_size out: only TensorRT's profiles need it")


def sequence_rules(model: Model) -> Findings:
    """sequence_batching: its control tensors and strategies."""
    if not model.config.HasField("sequence_batching"):
        return
    batching, name = model.config.sequence_batching, model.name
    if batching.HasField("oldest"):
        yield from _preferred(model, "sequence_batching", batching.oldest)
    slots = batching.direct.minimum_slot_utilization
    if not 0 <= slots <= 1:
        yield error(name, f"minimum_slot_utilization is {slots:g}", "write a share from 0 to 1")
    for state in batching.state:
        yield from _initial(model, state)
    tensors = Counter(control.name for control in batching.control_input)
    kinds: Counter[str] = Counter()
    for tensor, count in tensors.items():
        if not tensor:
            yield error(name, "a control_input has no name", "write the input's name")
        elif count > 1:
            yield error(name, f"control_input {tensor!r} is there {count} times", "give each control its own tensor")
    for control_input in batching.control_input:
        for control in control_input.control:
            kind = type(control).Kind.Name(control.kind)
            kinds[kind] += 1
            yield from _control(name, control_input.name, kind, control)
    for kind, count in kinds.items():
        if count > 1:
            yield error(name, f"{kind} is given to {count} tensors", "give it to one")


def _initial(model: Model, state: Any) -> Findings:
    """What a state begins with."""
    for given in state.initial_state:
        what = f"initial_state of {state.input_name!r}"
        if not given.name:
            yield error(model.name, f"{what} has no name", "write one")
        if given.WhichOneof("state_data") is None:
            yield error(model.name, f"{what} has no data", "write zero_data: true")
        elif given.data_file and leads_out(given.data_file):
            yield error(model.name, f"{what}: data_file {given.data_file!r} leads out of the folder", "put it there")
        elif given.data_file and not (model.folder / "initial_state" / given.data_file).is_file():
            yield error(model.name, f"{what}: there is no initial_state/{given.data_file}", "put the file there")
        if given.data_type != state.data_type:
            yield error(model.name, f"{what} has another data_type than the state", "write the state's")


def _control(name: str, tensor: str, kind: str, control: Any) -> Findings:
    chosen = [choice for choice in CHOICES if len(getattr(control, choice))]
    what = f"{kind} of {tensor!r}"
    if kind in BOOLEAN:
        if len(chosen) != 1:
            yield error(name, f"{what} has {len(chosen)} pairs of values", f"write one of {', '.join(CHOICES)}")
        elif len(getattr(control, chosen[0])) != 2:
            yield error(name, f"{what} has no pair in {chosen[0]}", "write two values: the false and the true one")
    elif chosen:
        yield error(name, f"{what} has {chosen[0]}", "leave it out: write data_type")
    elif kind == "CONTROL_SEQUENCE_CORRID":
        types = type(control).DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        if types[control.data_type].name not in CORRELATION_TYPES:
            yield error(
                name, f"{what} is {types[control.data_type].name}", f"write one of {', '.join(CORRELATION_TYPES)}"
            )


def cache_rules(model: Model) -> Findings:
    """Response cache: not for what remembers or streams."""
    config = model.config
    if config.response_cache.enable:
        if config.HasField("sequence_batching"):
            yield error(model.name, "response_cache with sequence_batching", "leave one of them out")
        if config.model_transaction_policy.decoupled:
            yield error(model.name, "response_cache with a decoupled model", "leave one of them out")

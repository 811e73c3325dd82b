"""What config.pbtxt says of hooks that `serve pack` wrote: the parameter stages, and the tensors beside it.

The model in Python that runs hooks (`serve/hooks/packed`) believes both: where they differ, every request fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compress.vetting.texts import parse_json
from serve.hooks.packed.values import NUMPY_TYPES
from serve.lint.finding import Findings, error
from serve.lint.model import Model

__all__ = ["STAGES", "stages_of", "tensors_of_hooks", "usable"]

STAGES = ("preprocess", "postprocess")
KINDS = ("array", "bool", "bytes", "float", "int", "scalar", "str")
TEXTS = ("bytes", "str")
STRING = 13  # of Triton's DataType


def stages_of(model: Model) -> Any:
    """What the model's parameter says; None where it is no model of hooks, "" where it can't be read."""
    parameters = model.config.parameters
    if model.backend != "python" or not {"stages", "packed_by"} & set(parameters):
        return None
    try:
        return parse_json(parameters["stages"].string_value.encode()) if "stages" in parameters else ""
    except ValueError:
        return ""


def usable(spec: Any) -> bool:
    """Whether a stage says what serve.hooks.packed.values.Hook is made of."""
    return (
        isinstance(spec, Mapping)
        and isinstance(spec.get("arguments"), dict)
        and all(kind in KINDS for kind in spec["arguments"].values())
        and isinstance(spec.get("results"), dict)
        and all(map(_is_result, spec["results"].values()))
        and spec.get("returns") in ("value", "mapping", "tuple")
        and isinstance(spec.get("tensors", {}), dict)
    )


def _is_result(told: Any) -> bool:
    return (
        isinstance(told, list)
        and len(told) == 3
        and told[0] in KINDS
        and isinstance(told[1], str)
        and told[1] in NUMPY_TYPES
        and isinstance(told[2], list)
        and all(type(dim) is int for dim in told[2])
    )


def tensors_of_hooks(model: Model, stages: Mapping[str, Any]) -> Findings:
    """Inputs that the hooks don't find, and outputs that they don't make.

    Args:
        model: of hooks.
        stages: each `usable`.
    """
    config, name, again = model.config, model.name, "write it as it was packed, or pack it again"
    inputs = {tensor.name: tensor for tensor in config.input}
    for tensor in config.input:
        if tensor.optional:
            yield error(name, f"input {tensor.name!r} is optional, and the hooks read each input", "leave optional out")
    steps = [stages[stage] for stage in STAGES if stage in stages]
    if not steps:
        return
    piped = "network" in config.parameters
    # Without a preprocess, a pipeline's first step is the network, whose outputs have other names.
    first = {} if piped and "preprocess" not in stages else steps[0]
    called = first.get("tensors", {})
    for argument, kind in first.get("arguments", {}).items():
        tensor = inputs.get(str(called.get(argument, argument)), inputs.get(argument))
        if tensor is None:
            yield error(name, f"the hooks take {argument!r}, and no input has that name: no request is answered", again)
        elif kind in TEXTS and tensor.data_type != STRING:
            what = f"the hooks take {argument!r} as {kind}, and the input {tensor.name!r} is no TYPE_STRING"
            yield error(name, what, again)
    for tensor in config.output if not piped or "postprocess" in stages else ():
        if tensor.name not in steps[-1]["results"]:
            yield error(name, f"the hooks don't make the output {tensor.name!r}: no request is answered", again)

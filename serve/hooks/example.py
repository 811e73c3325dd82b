"""One sample request, kept in a served model's config.pbtxt, so that a gateway can show how the model is asked."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from serve.config.model_config import ModelInput, protocol_datatype
from serve.hooks.load import Hooks
from serve.hooks.packed.values import Array

__all__ = ["EXAMPLE_LIMIT_BYTES", "EXAMPLE_PARAMETER", "example_request"]

EXAMPLE_PARAMETER = "example_inputs"
EXAMPLE_LIMIT_BYTES = 64 * 1024


def example_request(hooks: Hooks, inputs: tuple[ModelInput, ...], *, batched: bool) -> str | None:
    """The value of the parameter `example_inputs`: JSON, an Open Inference Protocol v2 inference request.

        {"inputs": [{"name": "image", "datatype": "BYTES", "shape": [1, 1], "base64": "iVBORw0…"},
                    {"name": "top_k", "datatype": "INT64", "shape": [1, 1], "data": [3]}]}

    It holds every input of the served model at batch 1. `data` is the protocol's flat list. An input of one BYTES
    element that is no UTF-8 text has `base64` instead of `data`: the element's raw bytes, which JSON itself can't
    carry; a client sends them in the protocol's binary form.

    A client reads it from Triton: GET /v2/models/NAME/config, ["parameters"]["example_inputs"]["string_value"].

    Returns:
        None when there is no example, when it can't be said in JSON (FP16, or NaN), or when it takes more than
        EXAMPLE_LIMIT_BYTES.
    """
    if hooks.example is None:
        return None
    entries: list[dict[str, Any]] = []
    for tensor in inputs:
        array = hooks.example[tensor.name]
        shape = [*([1] if batched else []), *(array.shape or (1,))]
        entry = {"name": tensor.name, "datatype": protocol_datatype(tensor.data_type), "shape": shape}
        value = _value(array)
        if value is None:
            return None
        entries.append(entry | value)
    try:
        text = json.dumps({"inputs": entries}, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return None
    return text if len(text) <= EXAMPLE_LIMIT_BYTES else None


def _value(array: Array) -> dict[str, Any] | None:
    if array.dtype == np.float16:
        return None  # Triton takes FP16 in the binary form only
    if array.dtype != np.object_:
        return {"data": array.ravel().tolist()}
    elements = array.ravel().tolist()
    try:
        return {"data": [element.decode("utf-8") for element in elements]}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(elements[0]).decode("ascii")} if len(elements) == 1 else None

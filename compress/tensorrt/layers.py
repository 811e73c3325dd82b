"""What TensorRT's engine inspector says of an engine's layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["precision_of", "precisions_of"]

# As the inspector's formats name them: "Row major linear FP16 format", "Thirty-two wide channel vectorized Int8".
_KINDS = {"int8": "INT8", "fp8": "FP8", "fp16": "FP16", "half": "FP16", "bf16": "BF16", "bfloat16": "BF16",
          "fp32": "FP32", "float": "FP32", "int32": "INT32", "int64": "INT64", "bool": "BOOL"}  # fmt: skip
_WORD = re.compile("|".join(rf"\b{kind}\b" for kind in _KINDS), re.IGNORECASE)
_LOWEST = ("INT8", "FP8", "FP16", "BF16", "FP32")


def precision_of(layer: Mapping[str, Any] | str) -> dict[str, str]:
    """A layer's name, kind and lowest precision of what it takes and gives; "?" where the inspector does not tell."""
    if isinstance(layer, str):  # all that an engine built without detailed profiling tells
        return {"name": layer, "kind": "?", "precision": "?"}
    tensors = [*layer.get("Inputs", ()), *layer.get("Outputs", ())]
    found = {
        _KINDS[word.lower()]
        for tensor in tensors
        for word in _WORD.findall(str(tensor.get("Format/Datatype", tensor.get("Format", ""))))
    }
    lowest = next((kind for kind in _LOWEST if kind in found), min(found, default="?"))
    return {"name": str(layer.get("Name", "?")), "kind": str(layer.get("LayerType", "?")), "precision": lowest}


def precisions_of(layers: Sequence[Mapping[str, Any] | str]) -> dict[str, int]:
    """How many layers in each precision, most often first."""
    return dict(Counter(precision_of(layer)["precision"] for layer in layers).most_common())

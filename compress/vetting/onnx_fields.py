"""The fields of an ONNX file, by message and number.

Source: onnx.proto (IR version 14).
"""

from __future__ import annotations

__all__ = ["BITS", "BYTES", "DIMENSIONS", "DTYPES", "MESSAGES", "NAMES", "STRING"]

BITS = {
    1: 32, 2: 8, 3: 8, 4: 16, 5: 16, 6: 32, 7: 64, 9: 8, 10: 16, 11: 64, 12: 32, 13: 64, 14: 64, 15: 128, 16: 16, 17: 8,
    18: 8, 19: 8, 20: 8, 21: 4, 22: 4, 23: 4, 24: 8, 25: 2, 26: 2, 27: 6, 28: 6,
}  # fmt: skip
"""Of an element, by TensorProto.DataType; strings (8) have no size."""
STRING = 8
DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64", STRING: "string", 9: "bool",
    10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 16: "bfloat16",
}  # fmt: skip
"""numpy's name of an element, and two that numpy has not, by TensorProto.DataType."""
# Kinds of fields: a message by its name, "text" (also bytes), "int", "f4", "f8"; with "*" where there may be several.
MESSAGES: dict[str, dict[int, str]] = {
    "Model": {
        1: "int", 2: "text", 3: "text", 4: "text", 5: "int", 6: "text", 7: "Graph", 8: "Opset*", 14: "Pair*",
        20: "Training*", 25: "Function*", 26: "Configuration*",
    },
    "Graph": {
        1: "Node*", 2: "text", 5: "Tensor*", 10: "text", 11: "Value*", 12: "Value*", 13: "Value*", 14: "Annotation*",
        15: "Sparse*", 16: "Pair*",
    },
    "Node": {
        1: "text*", 2: "text*", 3: "text", 4: "text", 5: "Attribute*", 6: "text", 7: "text", 8: "text", 9: "Pair*",
        10: "NodeConfiguration*",
    },
    "Attribute": {
        1: "text", 2: "f4", 3: "int", 4: "text", 5: "Tensor", 6: "Graph", 7: "f4*", 8: "int*", 9: "text*",
        10: "Tensor*", 11: "Graph*", 13: "text", 14: "Type", 15: "Type*", 20: "int", 21: "text", 22: "Sparse",
        23: "Sparse*",
    },
    "Tensor": {
        1: "int*", 2: "int", 4: "f4*", 5: "int*", 6: "text*", 7: "int*", 8: "text", 9: "text", 10: "f8*", 11: "int*",
        12: "text", 13: "Pair*", 14: "int", 16: "Pair*",
    },
    "Sparse": {1: "Tensor", 2: "Tensor", 3: "int*"},
    "Function": {
        1: "text", 4: "text*", 5: "text*", 6: "text*", 7: "Node*", 8: "text", 9: "Opset*", 10: "text",
        11: "Attribute*", 12: "Value*", 13: "text", 14: "Pair*",
    },
    "Pair": {1: "text", 2: "text"},
    "Value": {1: "text", 2: "Type", 3: "text", 4: "Pair*"},
    "Type": {
        1: "TensorType", 4: "Element", 5: "Map", 6: "text", 7: "Pair", 8: "TensorType", 9: "Element",
    },
    "TensorType": {1: "int", 2: "Shape"},
    "Shape": {1: "Dim*"},
    "Dim": {1: "int", 2: "text", 3: "text"},
    "Element": {1: "Type"},
    "Map": {1: "int", 2: "Type"},
    "Opset": {1: "text", 2: "int"},
    "Training": {1: "Graph", 2: "Graph", 3: "Pair*", 4: "Pair*"},
    "Annotation": {1: "text", 2: "Pair*"},
    "Configuration": {1: "text", 2: "int", 3: "text*"},
    "NodeConfiguration": {1: "text", 2: "Sharding*", 3: "int"},
    "Sharding": {1: "text", 2: "int*", 3: "Groups*", 4: "Sharded*"},
    "Sharded": {1: "int", 2: "Simple*"},
    "Groups": {1: "int", 2: "int*"},
    "Simple": {1: "int", 2: "text", 3: "int"},
}  # fmt: skip
# Bytes, not text: an attribute's `s` and `strings`, a tensor's strings and raw data.
BYTES = {("Attribute", 4), ("Attribute", 9), ("Tensor", 6), ("Tensor", 9)}
# Names, which are printed: a terminal obeys control characters.
NAMES = {
    ("Graph", 2), ("Node", 1), ("Node", 2), ("Node", 3), ("Node", 4), ("Node", 7), ("Tensor", 8), ("Value", 1),
    ("Dim", 2), ("Function", 1), ("Function", 10), ("Opset", 1), ("Attribute", 1), ("Model", 2), ("Model", 3),
}  # fmt: skip
DIMENSIONS = {("Tensor", 1), ("Sparse", 3)}

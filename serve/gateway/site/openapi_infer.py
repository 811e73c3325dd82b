"""The Open Inference Protocol's infer route in OpenAPI: in general, and for each model with its own tensors."""

from __future__ import annotations

from typing import Any

from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata, example_elements, example_request
from serve.gateway.oip.tensors import DATATYPES

__all__ = ["infer_of", "infer_paths"]

Schema = dict[str, Any]
LARGEST_EXAMPLE = 256
TAG = "Open Inference Protocol v2"
BINARY = (
    "Raw tensors may follow the JSON: `binary_data_size` in an input's parameters says how many bytes, the header "
    "`Inference-Header-Content-Length` how long the JSON is."
)
_PARAMETERS: Schema = {"type": "object", "additionalProperties": {"type": ["boolean", "integer", "number", "string"]}}
_SHAPE: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_DATA: Schema = {"type": "array"}
_PROBLEM: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "why": {"type": "string"}, "mend": {"type": "string"}},
}


def infer_paths() -> dict[str, Schema]:
    """The two routes, for any model."""
    path = "/v2/models/{model}"
    found = {}
    for versioned in (False, True):
        names = ["model", *(["version"] if versioned else [])]
        operation = _operation("Infer", "infer" + "_version" * versioned, _request(_tensor({"type": "string"}, None)))
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
        found[f"{path}/versions/{{version}}/infer" if versioned else f"{path}/infer"] = {"post": operation}
    return found


def infer_of(model: ModelMetadata) -> Schema:
    """The route of one model: the names, datatypes and shapes that it takes."""
    inputs = [_tensor({"const": tensor.name}, tensor) for tensor in model.inputs]
    outputs = {"name": {"enum": [tensor.name for tensor in model.outputs]}, "parameters": _PARAMETERS}
    request = _request({"anyOf": inputs}, {"type": "object", "required": ["name"], "properties": outputs})
    operation = _operation(f"Infer with {model.name}", f"infer_{model.name}", request)
    if (example := _example(model)) is not None:
        operation["requestBody"]["content"]["application/json"]["example"] = example
    return {"post": operation}


def _operation(summary: str, name: str, request: Schema) -> Schema:
    problem = {"description": "No answer", "content": {"application/json": {"schema": _PROBLEM}}}
    answered = _tensor({"type": "string"}, None)
    answer = {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string", "description": "That answered: under a release, maybe another than asked"},
            "model_version": {"type": "string", "description": "Of that model"},
            "id": {"type": "string"},
            "parameters": {"type": "object"},
            "outputs": {"type": "array", "items": answered},
        },
    }
    return {
        "tags": [TAG],
        "summary": summary,
        "description": BINARY,
        "operationId": name,
        "requestBody": {"required": True, "content": {"application/json": {"schema": request}}},
        "responses": {
            "200": {
                "description": "The outputs; raw ones where `binary_data` asks for them",
                "content": {"application/json": {"schema": answer}, "application/octet-stream": {}},
            },
            "4XX": problem,
            "5XX": problem,
        },
    }


def _request(inputs: Schema, output: Schema | None = None) -> Schema:
    output = output or {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}}
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string", "maxLength": 1024},
            "parameters": _PARAMETERS,
            "inputs": {"type": "array", "items": inputs, "minItems": 1},
            "outputs": {"type": "array", "items": output},
        },
    }


def _tensor(name: Schema, known: TensorMetadata | None) -> Schema:
    """One tensor; its data in JSON is a flat list, or one that is nested as its shape is."""
    shape, datatype = _SHAPE, {"enum": sorted(DATATYPES)}
    if known is not None:
        dims = [{"type": "integer", "minimum": 0} if dim < 0 else {"const": dim} for dim in known.shape]
        # OpenAPI 3.1 has prefixItems; a shape of so many items is what every reader of it understands.
        shape = {"type": "array", "prefixItems": dims, "minItems": len(dims), "maxItems": len(dims)}
        datatype = {"enum": [known.datatype]}
    properties = {"name": name, "datatype": datatype, "shape": shape, "parameters": _PARAMETERS, "data": _DATA}
    told = {} if known is None else {"title": str(known)}
    return {**told, "type": "object", "required": ["name", "datatype", "shape"], "properties": properties}


def _example(model: ModelMetadata) -> Schema | None:
    """One that the route takes as it stands; None where it would be long, or can't be written in JSON."""
    if example_elements(model) > len(model.inputs) * LARGEST_EXAMPLE:  # none is made to be thrown away
        return None
    example = example_request(model)
    if any("base64" in item or len(item["data"]) > LARGEST_EXAMPLE for item in example["inputs"]):
        return None
    return None if any(item["datatype"] in ("FP16", "BF16") for item in example["inputs"]) else example

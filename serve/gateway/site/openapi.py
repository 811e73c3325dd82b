"""OpenAPI of what is served now: a typed request and answer for each model that is loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np

from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata, example_elements, example_request
from serve.gateway.oip.tensors import DATATYPES
from serve.gateway.site.openapi_infer import infer_of, infer_paths

__all__ = ["example_values", "with_models"]

LARGEST_EXAMPLE = 256
BASE64 = {"type": "object", "required": ["base64"], "properties": {"base64": {"type": "string", "format": "byte"}}}
FLOATS = {"FP16": None, "BF16": None, "FP32": "float", "FP64": "double"}


def with_models(general: dict[str, Any], models: Iterable[ModelMetadata], *, keys: bool) -> dict[str, Any]:
    """The schema of the application, and a path for each model.

    Args:
        general: the application's own schema; not changed.
        models: those to show.
        keys: whether the gateway asks for keys.
    """
    schema = copy.deepcopy(general)
    schema["paths"] |= infer_paths()
    for model in models:
        if model.decoupled:
            schema["paths"][f"/predict/{model.name}/stream"] = {"post": _stream(model)}
        else:
            schema["paths"][f"/predict/{model.name}"] = {"post": _operation(model)}
            schema["paths"][f"/v2/models/{model.name}/infer"] = infer_of(model)
    if keys:
        schemes = schema.setdefault("components", {}).setdefault("securitySchemes", {})
        schemes["key"] = {"type": "http", "scheme": "bearer"}
        schema["security"] = [{"key": []}]
    return schema


def _operation(model: ModelMetadata) -> dict[str, Any]:
    inputs = {tensor.name: _value(tensor, batched=model.batched) for tensor in model.inputs}
    outputs = {tensor.name: _value(tensor, batched=model.batched, answered=True) for tensor in model.outputs}
    values: dict[str, Any] = {
        "schema": {
            "type": "object",
            "required": list(inputs),
            "properties": inputs,
            "additionalProperties": False,
        }
    }
    if (example := example_values(model)) is not None:
        values["example"] = example
    content = {"application/json": values}
    if len(model.inputs) == 1 and model.inputs[0].datatype == "BYTES":
        file = {"type": "string", "format": "binary"}
        content["multipart/form-data"] = {
            "schema": {"type": "object", "required": ["file"], "properties": {"file": file}}
        }
        content["application/octet-stream"] = {"schema": file}
    answer = {
        "type": "object",
        "required": ["model", "version", "outputs"],
        "properties": {
            "model": {"const": model.name},
            # Not of the versions that are loaded now: a release may let another model answer.
            "version": {"type": "string", "description": "Of the model that answered"},
            "served_by": {"type": "string", "description": "Under a release: the model and the version that answered"},
            "outputs": {"type": "object", "required": list(outputs), "properties": outputs},
        },
    }
    problem = {"description": "No answer", "content": {"application/json": {"schema": _PROBLEM}}}
    return {
        "tags": ["models"],
        "summary": f"Ask {model.name}",
        "description": f"Takes {', '.join(map(str, model.inputs))}; gives {', '.join(map(str, model.outputs))}.",
        "operationId": f"predict_{model.name}",
        "requestBody": {"required": True, "content": content},
        "responses": {
            "200": {"description": "The model's outputs", "content": {"application/json": {"schema": answer}}},
            "4XX": problem,
            "5XX": problem,
        },
    }


def _stream(model: ModelMetadata) -> dict[str, Any]:
    """The same for a model that gives any number of answers."""
    one = _operation(model)
    answer = one["responses"]["200"]["content"]["application/json"]["schema"]
    told = {"type": "string", "contentMediaType": "application/json", "contentSchema": answer}
    events = {"description": "An event for each answer", "content": {"text/event-stream": {"schema": told}}}
    return one | {"operationId": f"predict_stream_{model.name}", "responses": one["responses"] | {"200": events}}


_PROBLEM = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "string"}, "why": {"type": "string"}, "mend": {"type": "string"}},
}


def _value(tensor: TensorMetadata, *, batched: bool, answered: bool = False) -> dict[str, Any]:
    """One item, or a batch of items, as nested lists; in an answer, a number may be none that JSON has."""
    dims = tensor.shape[1:] if batched else tensor.shape
    item = single = _answered(tensor.datatype) if answered else _element(tensor.datatype)
    for dim in reversed(dims):
        item = {"type": "array", "items": item}
        if dim >= 0:
            item |= {"minItems": dim, "maxItems": dim}
    forms = [item]
    if dims == (1,):
        forms.append(single)
    if batched:
        forms += [{"type": "array", "items": form, "minItems": 1, "description": "a batch"} for form in list(forms)]
    shown = {"title": str(tensor)}
    return {**shown, **forms[0]} if len(forms) == 1 else {**shown, "anyOf": forms}


def _element(datatype: str) -> dict[str, Any]:
    if datatype == "BYTES":
        return {"anyOf": [{"type": "string"}, BASE64]}
    dtype = DATATYPES[datatype]
    if dtype.kind == "b":
        return {"type": "boolean"}
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return {"type": "integer", "minimum": int(limits.min), "maximum": int(limits.max)}
    form = FLOATS.get(datatype)
    return {"type": "number"} | ({"format": form} if form else {})


def _answered(datatype: str) -> dict[str, Any]:
    element = _element(datatype)
    return (
        {"anyOf": [element, {"enum": ["NaN", "Infinity", "-Infinity"]}]} if element.get("type") == "number" else element
    )


def example_values(model: ModelMetadata) -> dict[str, Any] | None:
    """Values that the model takes, in this route's form; None where they would be long."""
    if example_elements(model) > len(model.inputs) * LARGEST_EXAMPLE:  # none is made to be thrown away
        return None
    values: dict[str, Any] = {}
    for tensor in example_request(model)["inputs"]:
        if "base64" in tensor:
            value: Any = {"base64": tensor["base64"]}
            if len(tensor["base64"]) > 4 * LARGEST_EXAMPLE:
                return None
            values[tensor["name"]] = value
            continue
        if len(tensor["data"]) > LARGEST_EXAMPLE:
            return None
        data = np.array(tensor["data"], dtype=object)
        if data.size > LARGEST_EXAMPLE:
            return None
        shaped = data.reshape(tensor["shape"])
        values[tensor["name"]] = (shaped[0] if model.batched and shaped.ndim else shaped).tolist()
    return values

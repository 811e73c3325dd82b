"""What OpenAI's API says of embeddings and models: its bodies, answers and problems, for /docs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from serve.gateway.edge.json_body import json_body
from serve.gateway.edge.listed_values import MOST_SAMPLES
from serve.gateway.edge.openai_errors import OpenAIProblem

__all__ = ["ANSWERS", "BODY", "OF_MODELS", "Embeddings", "Model", "Models"]


class Embedding(BaseModel):
    """Of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers; or base64 of them, float32, little endian.")


class Usage(BaseModel):
    """Tokens that the model read, those that mark a text's beginning and end among them; 0 where it does not count."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(BaseModel):
    """The answer, in the order of the texts."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A model that gives embeddings."""

    id: str = Field(examples=["minilm"])
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "serve"


class Models(BaseModel):
    """Those that are ready, and that the key may ask."""

    object: Literal["list"] = "list"
    data: list[Model]


_TEXT = {"type": "string", "minLength": 1}
BODY = json_body(
    required=("model", "input"),
    properties={
        "model": {"type": "string", "minLength": 1},
        "input": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MOST_SAMPLES}]},
        "encoding_format": {"enum": ["float", "base64"], "default": "float"},
        "dimensions": {"type": "integer", "minimum": 1, "description": "That the model allows, or left out."},
        "user": {"type": "string", "description": "Taken, and not used."},
    },
    example={"model": "minilm", "input": ["The quick brown fox jumps over the lazy dog."]},
)
_PROBLEMS = {
    400: "A field that can't be taken: `param` names it; or a text that the model refuses.",
    401: "No key, or none that is known, where the gateway asks for one.",
    403: "The key may not ask this model.",
    404: "No such model.",
    413: "The body is over the gateway's bound.",
    415: "A content type that is not read.",
    429: "The key has sent too many requests; Retry-After says when to go on.",
    500: "The model failed.",
    502: "The model server's answer broke off, or is no embeddings.",
    503: "The model server can't be reached, or has too much to do.",
    504: "The model server took too long.",
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": OpenAIProblem, "description": told} for status, told in _PROBLEMS.items()
}
OF_MODELS: dict[int | str, dict[str, Any]] = {status: ANSWERS[status] for status in (401, 403, 404, 429, 502, 503, 504)}

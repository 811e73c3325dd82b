"""The body and the answer of /v1/rerank, for /docs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from serve.gateway.edge.embedding_schemas import Usage
from serve.gateway.edge.json_body import json_body
from serve.gateway.edge.listed_values import MOST_SAMPLES

__all__ = ["BODY", "Ranking"]


class Document(BaseModel):
    """As it was sent."""

    text: str


class Ranked(BaseModel):
    """A document's place in the ranking."""

    index: int = Field(description="Of the document in the request.")
    relevance_score: float = Field(ge=0, le=1, description="The sigmoid of what the model gives for the two texts.")
    document: Document | None = Field(None, description="Where return_documents is true.")


class Ranking(BaseModel):
    """The answer, the best first."""

    object: Literal["list"]
    model: str
    results: list[Ranked]
    usage: Usage


_TEXT = {"type": "string", "minLength": 1}
_OBJECT = {"type": "object", "required": ["text"], "additionalProperties": False, "properties": {"text": _TEXT}}
BODY = json_body(
    required=("model", "query", "documents"),
    properties={
        "model": {"type": "string", "minLength": 1},
        "query": _TEXT,
        "documents": {
            "type": "array", "items": {"anyOf": [_TEXT, _OBJECT]}, "minItems": 1, "maxItems": MOST_SAMPLES,
        },
        "top_n": {"type": "integer", "minimum": 1, "description": "All, if it is left out."},
        "return_documents": {"type": "boolean", "default": False},
    },
    example={
        "model": "judge",
        "query": "What does a fox jump over?",
        "documents": ["A fox jumps over a lazy dog.", "A dog sleeps."],
    },
)  # fmt: skip

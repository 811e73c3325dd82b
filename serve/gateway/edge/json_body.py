"""A body of JSON as the OpenAPI document tells of it, for routes that read theirs themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["json_body"]


def json_body(required: Sequence[str], properties: Mapping[str, Any], example: Mapping[str, Any]) -> dict[str, Any]:
    """A `requestBody`: an object that has no other properties than these."""
    schema = {
        "type": "object",
        "required": list(required),
        "additionalProperties": False,
        "properties": dict(properties),
    }
    return {"required": True, "content": {"application/json": {"schema": schema, "example": dict(example)}}}

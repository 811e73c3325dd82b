"""POST /feedback: what a client says of an answer that it was given."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from serve.gateway.access.memory import Memory, Share
from serve.gateway.edge.asking import CLIENT_LEFT
from serve.gateway.edge.bodies import read_body
from serve.gateway.edge.json_body import json_body
from serve.gateway.edge.routes import UPSTREAM
from serve.gateway.errors import BodyTooLargeError, ClientGoneError, Problem
from serve.gateway.release.feedback import MOST_BYTES, Feedback

__all__ = ["feedback_router"]


class Counted(BaseModel):
    """What became of it."""

    model: str = Field(description="That was asked.", examples=["digits"])
    served_by: str = Field(description="Who answered, as Served-By said.", examples=["digits/2"])
    counted: bool = Field(description="false where the answer had been spoken of before.")
    correct: bool | None = Field(None, description="What it was counted as.")


_BODY = json_body(
    required=("id",),
    properties={
        "id": {"type": "string", "description": "The header Answer-Id of the answer."},
        "correct": {"type": "boolean"},
        "label": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "output": {"type": "string", "description": "Which output has the label, where several may."},
    },
    example={"id": "4DhUO0c1mW8xGq2b", "correct": True},
)
_ANSWERS: dict[int | str, dict[str, Any]] = {
    **{status: UPSTREAM[status] for status in (401, 403)},
    400: {"model": Problem, "description": "A body that can't be read, or says more than it may."},
    404: {"model": Problem, "description": "No such answer, none of this key's, or one that is forgotten."},
    413: {"model": Problem, "description": f"The body is over {MOST_BYTES} bytes."},
    422: {"model": Problem, "description": "The answer can't be held against a label: send correct."},
}


def feedback_router(feedback: Feedback, memory: Memory) -> APIRouter:
    """The route, bound to a gateway's releases."""
    router = APIRouter(tags=["releases"])

    @router.post(
        "/feedback",
        summary="Say whether an answer was correct",
        responses=_ANSWERS,
        openapi_extra={"requestBody": _BODY},
        response_model=Counted,
        response_model_exclude_none=True,
    )
    async def say(request: Request) -> Any:
        """Of a model under release, whose answers carry `Answer-Id`; by the key that was answered, and once.

        Say `correct`, or the true `label`, which is held against the answer's: the first text or whole number, or where
        the largest score stands.
        """
        length = dict(request.scope["headers"]).get(b"content-length")
        with Share(memory, request.state.identity.id) as share:
            try:
                body = await read_body(request.scope, length, request.receive, MOST_BYTES, share)
            except BodyTooLargeError as err:
                err.mend = "send an id, and correct or a label"
                raise
            except ClientGoneError:
                return Response(status_code=CLIENT_LEFT)
            return feedback.take(request.state.identity.id, body)

    return router

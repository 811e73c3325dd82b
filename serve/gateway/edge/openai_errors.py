"""Errors of the routes under /v1, as OpenAI's API has them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import orjson
from pydantic import BaseModel, Field
from starlette.types import Scope

from serve.gateway.errors import BadRequestError, GatewayError, Refusal

__all__ = ["OpenAIProblem", "ParameterError", "refusal"]

PREFIX = b"/v1/"
TYPES = {
    401: ("authentication_error", "invalid_api_key"), 403: ("permission_error", None),
    404: ("invalid_request_error", None), 429: ("rate_limit_error", "rate_limit_exceeded"),
}  # fmt: skip


class OpenAIError(BaseModel):
    """What failed."""

    message: str = Field(description="What failed, why, and what to do about it.")
    type: str = Field(examples=["invalid_request_error"])
    param: str | None = Field(description="The field of the request that it is about.")
    code: str | None = Field(examples=["model_not_found"])


class OpenAIProblem(BaseModel):
    """Why there is no answer."""

    error: OpenAIError


class ParameterError(BadRequestError):
    """A field of the request that can't be taken.

    Args:
        param: its name.
        code: a word for programs.
    """

    def __init__(
        self, param: str, error: str, *, why: str = "", mend: str = "", code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(error, why=why, mend=mend, status=status)
        self.param, self.code = param, code


def refusal(error: GatewayError, scope: Scope) -> Refusal:
    """The answer that an error makes on the route that was asked."""
    if not scope["raw_path"].startswith(PREFIX):
        return Refusal(error)
    kind, code = TYPES.get(error.status, ("server_error" if error.status >= 500 else "invalid_request_error", None))
    why = f": {error.why}" if error.why else ""
    told = {
        "message": f"{error.error}{why}" + (f"; {error.mend}" if error.mend else ""),
        "type": kind,
        "param": getattr(error, "param", None),
        "code": getattr(error, "code", None) or code,
    }
    return Refusal(error, orjson.dumps({"error": told}))

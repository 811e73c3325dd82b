"""POST /predict/{model}: a file or plain JSON values in, plain JSON values out."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Message

from serve.gateway.contracts import Contracts
from serve.gateway.deadline import TIMEOUT_HEADER, patience_s
from serve.gateway.encoding import unpacked
from serve.gateway.errors import (
    BadRequestError,
    ClientGoneError,
    GatewayError,
    Problem,
    TooManyElementsError,
    UnsupportedMediaError,
    UpstreamBrokenError,
)
from serve.gateway.gate import Gate
from serve.gateway.identity import Identity
from serve.gateway.infer import CLIENT_LEFT, ask_model, read_body
from serve.gateway.metadata import ModelMetadata
from serve.gateway.plain import from_file, from_values, to_values
from serve.gateway.protocol import BINARY_HEADER, build_request, parse_response
from serve.gateway.released import SERVED_BY, Released
from serve.gateway.routes import UPSTREAM
from serve.gateway.settings import Settings
from serve.gateway.tensors import ProtocolError, Tensor
from serve.gateway.upstream import Upstream, triton_error
from serve.http_client import Response as UpstreamResponse
from serve.rollout.plan import Target

__all__ = ["predict_router"]

TAKES = "application/json, multipart/form-data with one file, image/*, or application/octet-stream"


class Prediction(BaseModel):
    """A model's answer in plain values."""

    model: str = Field(examples=["digits"])
    version: str = Field(examples=["1"])
    outputs: dict[str, Any] = Field(
        description="By output name; without a batch dimension when one item was sent. Bytes that are not text are "
        '{"base64": "..."}; a value that is not finite is null.',
        examples=[{"label": "seven", "probability": 0.98}],
    )


_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file"],
                "properties": {"file": {"type": "string", "format": "binary"}},
            }
        },
        "application/json": {
            "schema": {"type": "object", "additionalProperties": True, "title": "Values by input name"},
        },
        "image/*": _BINARY,
        "application/octet-stream": _BINARY,
    },
}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    **UPSTREAM,
    200: {"model": Prediction, "description": "The model's outputs."},
    400: {"model": Problem, "description": "A body that can't be read, or that the model's hooks refuse."},
    404: {"model": Problem, "description": "No such model."},
    413: {"model": Problem, "description": "The body is over the gateway's bound."},
    415: {"model": Problem, "description": "A content type that is not read, or a file for a model that takes none."},
    422: {"model": Problem, "description": "A value does not fit the model's input; the answer names it."},
    429: {"model": Problem, "description": "The key has sent too many requests; Retry-After says when to go on."},
}


def predict_router(
    settings: Settings, gate: Gate, upstream: Upstream, contracts: Contracts, released: Released
) -> APIRouter:
    """The route, bound to one upstream."""
    router = APIRouter(tags=["predict"])

    @router.post("/predict/{model}", responses=_ANSWERS, openapi_extra={"requestBody": _BODY}, summary="Ask a model")
    async def predict(model: Annotated[str, Path(examples=["digits"])], request: Request) -> Response:
        """Send one file, or values by input name.

        **A file**, as the body or as the one file of a form, for a model with a single BYTES input.

        **JSON values** by input name. An input's value is one item, or a batch of items as a list with one level
        more; all inputs must be the same. The answer to one item has no batch dimension, and what a model declares as
        one element is bare. BYTES are strings, or `{"base64": "..."}`. `GET /v2/models/{model}/example` shows a
        model's inputs.
        """
        identity: Identity = request.state.identity
        identity.take()
        headers = dict(request.scope["headers"])
        patience = patience_s(headers.get(TIMEOUT_HEADER), settings.timeout_s)
        deadline = time.monotonic() + patience
        gate.places(model).check(identity.priority, patience)
        try:
            body = await read_body(
                request.scope, headers.get(b"content-length"), request.receive, settings.max_body_bytes
            )
            if encoding := headers.get(b"content-encoding"):
                body = unpacked(body, encoding, settings.max_body_bytes)
            plain = Target(model)
            release = gate.releases.get(model)
            kept = plain if release is None else release.kept
            metadata = replace(await upstream.metadata(kept.model, kept.version), name=model)
            inputs, item = await _inputs(metadata, request, body)
            for tensor in inputs:
                if settings.max_elements and tensor.data.size > settings.max_elements:
                    raise TooManyElementsError(tensor.name, tensor.data.size, settings.max_elements)
            message = build_request(inputs)
            if settings.validate and message.header_length is not None:
                head, tail = message.body[: message.header_length], len(message.body) - message.header_length
                await contracts.read(kept, head, tail, shared_memory=False)

            async def ask() -> UpstreamResponse:
                left, came = deadline - time.monotonic(), request.scope["headers"]
                path = plain.path.encode()
                return await released.infer(release, path, identity, came, message.headers, message.body, left)

            answer = await ask_model(
                gate, identity, model, ask, request.scope, request.receive, deadline, size=len(message.body)
            )
            response = _plain(upstream, metadata, answer, item=item)
            for name, value in identity.limits():
                response.headers[name.decode()] = value.decode()
            if (served_by := answer.header(SERVED_BY)) is not None:
                response.headers[SERVED_BY.decode()] = served_by.decode()
            return response
        except ClientGoneError:
            return Response(status_code=CLIENT_LEFT)

    return router


async def _inputs(metadata: ModelMetadata, request: Request, body: bytes) -> tuple[tuple[Tensor, ...], bool]:
    """The model's inputs from a body of any content type that is read, and whether they are one item."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media.startswith("image/") or media == "application/octet-stream":
        return from_file(metadata, body), True
    if media == "multipart/form-data":
        return from_file(metadata, await _form_file(request, body)), True
    if media != "application/json":
        came = media or "none"
        raise UnsupportedMediaError(
            "the content type is not one that is read", why=f"it takes {TAKES}; {came} came", mend="set Content-Type"
        )
    try:
        values = orjson.loads(body)
    except orjson.JSONDecodeError as err:
        raise BadRequestError("the body is not JSON", why=str(err), mend='send {"input name": value, ...}') from err
    if not isinstance(values, dict):
        why = f"an object was expected, {type(values).__name__} came"
        raise BadRequestError("the body is not values by input name", why=why, mend='send {"input name": value, ...}')
    return from_values(metadata, values)


async def _form_file(request: Request, body: bytes) -> bytes:
    """The one file of a form whose bytes have been read."""

    async def replay() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    form_request = Request(request.scope, replay)
    try:
        async with form_request.form(max_files=1, max_fields=16) as form:
            files = [part for part in form.values() if isinstance(part, UploadFile)]
            if len(files) == 1:
                return await files[0].read()
            why = "it holds no file"
    except HTTPException as err:
        why = str(err.detail)
    raise BadRequestError("the form can't be read", why=why, mend="send a form with one file: curl -F file=@image.png")


def _plain(upstream: Upstream, metadata: ModelMetadata, answer: UpstreamResponse, *, item: bool) -> Response:
    if answer.status != 200:
        upstream.forget(metadata.name)
        raise GatewayError(
            f"the model {metadata.name!r} gave no answer",
            why=triton_error(answer),
            mend=f"compare the request with GET /v2/models/{metadata.name}/example",
            status=answer.status if 400 <= answer.status < 600 else 502,
        )
    length = answer.header(BINARY_HEADER)
    try:
        result = parse_response(answer.body, int(length) if length is not None else None)
    except ValueError as err:
        why = str(err) if isinstance(err, ProtocolError) else "its header length is not a number"
        raise UpstreamBrokenError("the model server's answer can't be read", why=why) from err
    values = {
        "model": metadata.name,
        "version": result.model_version,
        "outputs": to_values(metadata, result.outputs, item=item),
    }
    return Response(orjson.dumps(values, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")

"""POST /predict/{model}: a file or plain JSON values in, plain JSON values out."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request
from pydantic import BaseModel, Field
from starlette.responses import Response

from serve.gateway.access.identity import Identity
from serve.gateway.access.memory import Share
from serve.gateway.edge.asking import CLIENT_LEFT, unless_client_leaves, until_loaded
from serve.gateway.edge.bodies import read_unpacked
from serve.gateway.edge.form import file_of
from serve.gateway.edge.listed_values import tokens_of
from serve.gateway.edge.predict_values import answer_of, message_from, message_of
from serve.gateway.edge.routes import UPSTREAM
from serve.gateway.edge.tokens import Tokens
from serve.gateway.edge.way import Way
from serve.gateway.errors import (
    NO_ROOM,
    AnswerTooLargeError,
    BadRequestError,
    ClientGoneError,
    GatewayError,
    OverloadedError,
    Problem,
    UnsupportedMediaError,
)
from serve.gateway.oip.apart import NoRoomError
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.cost import CHEAP_BYTES
from serve.gateway.oip.encoding import Packed
from serve.gateway.oip.friendly import from_file
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import BINARY_HEADER, Message, parse_response
from serve.gateway.release.answering import check_down, models_of
from serve.gateway.release.answers import ANSWER_ID
from serve.gateway.release.released import SERVED_BY
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import TIMEOUT_HEADER, patience_s
from serve.gateway.upstream.upstream import Upstream, triton_error
from serve.http.client import Response as UpstreamResponse

__all__ = ["ANSWERS", "BODY", "LONG_ANSWER", "is_json", "message_asked", "predict_router"]

IN_POSTPROCESS = "hooks.py postprocess: "  # as serve.hooks.packed.values tells of it
JSON = "application/json"
LONG_ANSWER = 256 * 1024  # of tensors, raw, which takes about a millisecond to write as JSON
TAKES = "application/json, multipart/form-data with one file, image/*, or application/octet-stream"


class Prediction(BaseModel):
    """A model's answer in plain values."""

    model: str = Field(examples=["digits"], description="That was asked for.")
    version: str = Field(examples=["1"], description="Of the model that answered.")
    served_by: str | None = Field(
        None,
        examples=["digits_int8/1"],
        description="Under a release: model and version that answered, whose `version` that is.",
    )
    outputs: dict[str, Any] = Field(
        description="By output name; without a batch dimension when one item was sent. Bytes that are not text are "
        '{"base64": "..."}; a value that is not finite is null.',
        examples=[{"label": "seven", "probability": 0.98}],
    )


_BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
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
ANSWERS: dict[int | str, dict[str, Any]] = {
    **UPSTREAM,
    200: {"model": Prediction, "description": "The model's outputs."},
    400: {"model": Problem, "description": "A body that can't be read, or that the model's hooks refuse."},
    404: {"model": Problem, "description": "No such model."},
    413: {"model": Problem, "description": "The body is over the gateway's bound."},
    415: {"model": Problem, "description": "A content type that is not read, or a file for a model that takes none."},
    422: {"model": Problem, "description": "A value does not fit the model's input; the answer names it."},
    429: {"model": Problem, "description": "The key has sent too many requests; Retry-After says when to go on."},
}


def predict_router(settings: Settings, way: Way) -> APIRouter:
    """The route, bound to one upstream."""
    router = APIRouter(tags=["predict"])
    gate, contracts = way.gate, way.contracts

    @router.post("/predict/{model}", responses=ANSWERS, openapi_extra={"requestBody": BODY}, summary="Ask a model")
    async def predict(model: Annotated[str, Path(examples=["digits"])], request: Request) -> Response:
        """Send one file, or values by input name.

        **A file**, as the body or as the one file of a form, for a model with a single BYTES input.

        **JSON values** by input name. An input's value is one item, or a batch of items as a list with one level
        more; all inputs must be the same. The answer to one item has no batch dimension, and what a model declares as
        one element is bare. BYTES are strings, or `{"base64": "..."}`. `GET /v2/models/{model}/example` shows a
        model's inputs, as tensors in a list: here they are given by name.
        """
        identity: Identity = request.state.identity
        check_down(gate.incidents.outages, model, way.releases.get(model))
        headers = dict(request.scope["headers"])
        patience = patience_s(headers.get(TIMEOUT_HEADER), settings.timeout_s)
        deadline = time.monotonic() + patience
        gate.places(model).check(identity.priority, patience, identity.id)
        share, lease = Share(gate.memory, identity.id), gate.lease()
        tokens, asked = Tokens(), list[int]()
        try:
            body = await read_unpacked(
                request.scope, request.receive, settings.max_body_bytes, share, gate.long_work, as_json=is_json(request)
            )
            release = way.releases.get(model)
            models = models_of(model, release)
            await until_loaded(gate, lease, models, identity.id, deadline, request.scope, request.receive)
            metadata = await way.metadata(model, release)
            if metadata.decoupled:
                raise BadRequestError(
                    f"the model {model!r} gives a stream of answers",
                    why="this route gives one",
                    mend=f"ask POST /predict/{model}/stream",
                )
            reading = message_asked(contracts, metadata, request, body, settings.max_elements, identity, deadline)
            if isinstance(body, Packed) or len(body) > CHEAP_BYTES:  # it may have to wait
                reading = unless_client_leaves(request.scope, request.receive, reading)
            message, item = await reading
            del body
            share.resize(len(message.body))
            counts = tokens_of(metadata)
            if counts:
                size = len(message.body) - (message.header_length or 0)
                tokens.take(identity, [size], "the body", "texts")
                asked.append(size)
            answer = await way.ask(model, release, message, identity, request.scope, request.receive, deadline)
            writing = _plain(contracts, way.upstream, metadata, answer, identity, deadline, item=item)
            response = await unless_client_leaves(request.scope, request.receive, writing)
            counted = 0 if answer.held is None else len(answer.body)  # for the key already
            gate.memory.check_for(identity.id, len(response.body) - counted)
            share.resize(len(response.body))
            fields = tokens.read(request.scope, _tokens(answer, counts))
            for name, value in (*identity.limits(), *fields):
                response.headers[name.decode()] = value.decode()
            for name in (SERVED_BY, ANSWER_ID):
                if (found := answer.header(name)) is not None:
                    response.headers[name.decode()] = found.decode()
            return response
        except ClientGoneError:
            return Response(status_code=CLIENT_LEFT)
        except OverloadedError:  # the model did not get it
            asked.clear()
            raise
        finally:
            tokens.close(asked)
            lease.close()
            share.close()

    return router


async def message_asked(
    contracts: Contracts,
    metadata: ModelMetadata,
    request: Request,
    body: bytes | Packed,
    most: int,
    identity: Identity,
    deadline: float,
) -> tuple[Message, bool]:
    """The infer request that a body of any content type that is read makes, and whether it is one item."""
    media = _media(request)
    if media == JSON or isinstance(body, Packed):
        return await contracts.read_json(identity.digest, deadline, message_of, body, metadata, most)
    if media.startswith("image/") or media == "application/octet-stream":
        return message_from(from_file(metadata, body), most), True
    if media == "multipart/form-data":
        file = await file_of(request.headers["content-type"], body)
        return message_from(from_file(metadata, file), most), True
    came = media or "none"
    raise UnsupportedMediaError(
        "the content type is not one that is read", why=f"it takes {TAKES}; {came} came", mend="set Content-Type"
    )


def is_json(request: Request) -> bool:
    """Whether its content type says so."""
    return _media(request) == JSON


def _media(request: Request) -> str:
    """A request's content type, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _tokens(answer: UpstreamResponse, name: str) -> int | None:
    """How many the model has read, by its output of this name; None where it has none, or that is dear to read."""
    length = answer.header(BINARY_HEADER)
    if not name or (length is None and len(answer.body) > LONG_ANSWER):
        return None
    outputs = parse_response(answer.body, int(length) if length is not None else None).outputs
    return sum(int(tensor.data.sum()) for tensor in outputs if tensor.name == name)


async def _plain(
    contracts: Contracts,
    upstream: Upstream,
    metadata: ModelMetadata,
    answer: UpstreamResponse,
    identity: Identity,
    deadline: float,
    *,
    item: bool,
) -> Response:
    if answer.status != 200:
        upstream.forget(metadata.name)
        why = triton_error(answer)
        mend = f"compare the request with GET /v2/models/{metadata.name}/example"
        if answer.status == 500 and IN_POSTPROCESS in why:  # the network had answered: it took the request
            mend = "the request is not at fault: mend that line of the model's hooks, and pack it again"
        raise GatewayError(
            f"the model {metadata.name!r} gave no answer",
            why=why,
            mend=mend,
            status=answer.status if 400 <= answer.status < 600 else 502,
        )
    length = answer.header(BINARY_HEADER)
    arguments = answer.body, length, metadata, item
    write = partial(answer_of, released=answer.header(SERVED_BY) is not None)
    if len(answer.body) > LONG_ANSWER:
        try:
            told = await contracts.apart.call(identity.digest, deadline, write, *arguments)
        except NoRoomError:
            raise AnswerTooLargeError(NO_ROOM) from None
    else:
        told = write(*arguments)
    return Response(told, media_type="application/json")

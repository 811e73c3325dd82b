"""POST /v1/embeddings and GET /v1/models, as OpenAI's API has them: its clients work unchanged.

A request takes the way of any other; only its form is another. A list of more texts than the model takes at once is
charged as so many requests, and goes in parts of like length, so that others wait for a short while.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import Scope

from serve.gateway.access.identity import Identity
from serve.gateway.access.lists import ListPart, Turns
from serve.gateway.access.memory import Share
from serve.gateway.edge.asking import CLIENT_LEFT, unless_client_leaves
from serve.gateway.edge.bodies import read_body
from serve.gateway.edge.embedding_schemas import ANSWERS, BODY, OF_MODELS, Embeddings, Model, Models
from serve.gateway.edge.embedding_values import (
    OTHERS,
    Asked,
    Embedder,
    Part,
    asked_of,
    embedder_of,
    embeddings_of,
    held_bytes,
    parts_of,
    unknown,
)
from serve.gateway.edge.openai_errors import ParameterError
from serve.gateway.edge.together import together
from serve.gateway.edge.way import Way
from serve.gateway.errors import (
    ClientGoneError,
    GatewayError,
    OverloadedError,
    UnknownModelError,
    UnsupportedMediaError,
)
from serve.gateway.oip.contracts import LONG_JSON
from serve.gateway.oip.encoding import unpack
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.gateway.release.answers import ANSWER_ID
from serve.gateway.release.release import Release
from serve.gateway.release.released import SERVED_BY
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import TIMEOUT_HEADER, patience_s
from serve.gateway.upstream.upstream import triton_error
from serve.http.client import Response as UpstreamResponse

__all__ = ["embeddings_router"]

_COUNTED = re.compile(r"\btext (\d{1,4})\b")
AT_ONCE = 4  # parts of a request that are under way at a time
LONG_ANSWER = 256 * 1024  # of embeddings, raw


def embeddings_router(settings: Settings, way: Way) -> APIRouter:
    """The routes, bound to one upstream."""
    router = APIRouter(tags=["OpenAI"])
    gate = way.gate

    @router.post(
        "/v1/embeddings", summary="Embeddings of texts", openapi_extra={"requestBody": BODY},
        responses={**ANSWERS, 200: {"model": Embeddings, "description": "One for each text."}},
    )  # fmt: skip
    async def embeddings(request: Request) -> Response:
        """A text, or a list of them, becomes a vector each.

        A list longer than the model's largest batch counts as several requests of the key's. It goes to the model in
        parts, texts of like length together, and the answer is one. It is all or nothing: a text that is refused fails
        the request.
        """
        identity: Identity = request.state.identity
        headers = dict(request.scope["headers"])
        patience = patience_s(headers.get(TIMEOUT_HEADER), settings.timeout_s)
        deadline = time.monotonic() + patience
        share, lease = Share(gate.memory, identity.id), gate.lease()
        charged = most = 1  # requests, and texts of each
        begun: dict[int, int] = {}  # parts, and how many texts each has
        try:
            asked = await _asked(way, settings, request, headers, identity, deadline, share)
            request.scope["state"]["model"] = asked.model  # for what counts requests
            if not gate.keys.open:
                identity = gate.keys.again(identity)
            identity.check_model(asked.model)
            gate.incidents.outages.check(asked.model)
            if len(asked.texts) == 1:  # where several stand, and for how long, their parts tell
                gate.places(asked.model).check(identity.priority, patience, identity.id)
            release = way.releases.get(asked.model)
            await way.loaded(lease, asked.model, release, identity, request.scope, request.receive, deadline)
            by = await _embedder(way, asked, release)
            lists = gate.lists(asked.model)
            parts, count = parts_of(asked.texts, by, lists.budget), -(-len(asked.texts) // by.most)
            turns = Turns(lists, AT_ONCE) if len(parts) > 1 else None
            if turns is not None:
                turns.check(identity.priority, patience, identity.id)
            _charge(identity, count, by.most)
            charged, most = count, by.most
            share.resize(held_bytes(asked.texts, parts))
            draw = os.urandom(8)
            works = (
                partial(
                    _part,
                    way,
                    asked,
                    by,
                    release,
                    identity,
                    request,
                    deadline,
                    draw,
                    part,
                    ListPart(turns, part.cost) if turns is not None else None,
                    partial(begun.__setitem__, number, len(part.places)),
                )
                for number, part in enumerate(parts)
            )
            answers = await together(request.scope, request.receive, works, AT_ONCE)
            writing = _written(way, answers, by, asked, [part.places for part in parts], identity, deadline)
            response = await unless_client_leaves(request.scope, request.receive, writing)
            counted = sum(len(answer.body) for answer in answers if answer.held is not None)  # for the key already
            gate.memory.check_for(identity.id, len(response.body) - counted)
            share.resize(len(response.body))
            for name, value in identity.limits():
                response.headers[name.decode()] = value.decode()
            for name in (SERVED_BY, *([ANSWER_ID] if charged == 1 else [])):
                if (found := answers[0].header(name)) is not None:
                    response.headers[name.decode()] = found.decode()
            return response
        except ClientGoneError:
            return Response(status_code=CLIENT_LEFT)
        finally:
            identity.give_back(charged - max(1, -(-sum(begun.values()) // most)))
            lease.close()
            share.close()

    @router.get("/v1/models", summary="Models that give embeddings", responses=OF_MODELS)
    async def models(request: Request) -> Models:
        identity: Identity = request.state.identity
        found = []
        for name in await way.upstream.loaded():
            if identity.sees(name):
                with suppress(GatewayError):  # it has been unloaded meanwhile
                    if embedder_of(await way.metadata(name, way.releases.get(name))) is not None:
                        found.append(Model(id=name))
        return Models(data=found)

    @router.get("/v1/models/{model}", summary="A model that gives embeddings", responses=OF_MODELS)
    async def one_model(model: str) -> Model:
        await _embedder(way, Asked(model, (), False, None), way.releases.get(model), status=404)
        return Model(id=model)

    return router


def _charge(identity: Identity, count: int, most: int) -> None:
    """Count a list as so many requests of `most` texts, one of which was counted as it came.

    Raises:
        RateLimitedError: the key has to wait.
        ParameterError: waiting would not help.
    """
    if count > 1 and identity.bucket is not None and count > identity.bucket.burst:
        raise ParameterError(
            "input",
            f"input is too long for the key {identity.name!r}",
            why=f"it counts as {count} requests of {most} texts, and the key may send {identity.bucket.burst} at once",
            mend="send fewer texts at a time",
        )
    identity.take_more(count - 1)


async def _asked(
    way: Way,
    settings: Settings,
    request: Request,
    headers: dict[bytes, bytes],
    identity: Identity,
    deadline: float,
    share: Share,
) -> Asked:
    """What the body asks for."""
    media = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
    if media != "application/json":
        why = f"application/json is, and {media[:64] or 'none'} came"
        raise UnsupportedMediaError("the content type is not one that is read", why=why, mend="set Content-Type")
    length = headers.get(b"content-length")
    body = await read_body(request.scope, length, request.receive, settings.max_body_bytes, share)
    if encoding := headers.get(b"content-encoding"):
        body = await unpack(body, encoding, settings.max_body_bytes, share)
    reading = way.contracts.read_json(identity.digest, deadline, asked_of, body)
    if len(body) > LONG_JSON:  # it may have to wait
        reading = unless_client_leaves(request.scope, request.receive, reading)
    return await reading


async def _embedder(way: Way, asked: Asked, release: Release | None, status: int = 400) -> Embedder:
    """How the model is asked.

    Raises:
        ParameterError: it is not there, gives no embeddings, or none of so many numbers.
    """
    try:
        metadata = await way.metadata(asked.model, release)
    except UnknownModelError as err:
        raise unknown(asked.model) from err
    by = embedder_of(metadata)
    if by is None:
        told = f"the model {asked.model!r} gives no embeddings of texts"
        why = f"it takes {', '.join(map(str, metadata.inputs))}, and is not packed for the task 'embeddings'"
        raise ParameterError("model", told, why=why, mend=OTHERS, code="model_not_supported", status=status)
    if asked.dimensions not in (None, by.width):
        told = f"the model {asked.model!r} gives no embeddings of {asked.dimensions} numbers"
        raise ParameterError("dimensions", told, why=f"its own have {by.width}", mend="leave dimensions out")
    return by


async def _part(
    way: Way,
    asked: Asked,
    by: Embedder,
    release: Release | None,
    identity: Identity,
    request: Request,
    deadline: float,
    draw: bytes,
    part: Part,
    stands: ListPart | None,
    begins: Callable[[], None],
    scope: Scope,
) -> UpstreamResponse:
    """Triton's answer to some of the texts."""
    begins()
    message = part.message(asked.texts, by)
    answer = await way.ask(asked.model, release, message, identity, scope, request.receive, deadline, draw, stands)
    if answer.status == 200:
        return answer
    way.upstream.forget(asked.model)
    # What pack's hooks count within a part is counted within the request.
    places = dict(enumerate(part.places))
    why = _COUNTED.sub(lambda found: f"input {places.get(int(found[1]), found[1])}", triton_error(answer))
    status = answer.status if 400 <= answer.status < 600 else 502
    told = f"the model {asked.model!r} gave no answer"
    if status < 500:
        raise ParameterError("input", told, why=why, status=status)
    raise GatewayError(told, why=why, status=status)


async def _written(
    way: Way,
    answers: list[UpstreamResponse],
    by: Embedder,
    asked: Asked,
    places: list[tuple[int, ...]],
    identity: Identity,
    deadline: float,
) -> Response:
    if len({answer.header(SERVED_BY) for answer in answers}) > 1:
        raise OverloadedError(
            f"the model {asked.model!r} was replaced while it answered",
            why="parts of the texts were answered by another: their embeddings can't be compared",
            mend="ask again",
        )
    told = [(answer.body, answer.header(BINARY_HEADER)) for answer in answers]
    arguments = told, by, asked.model, places, asked.packed
    make: Callable[..., bytes] = embeddings_of
    if sum(len(body) for body, _ in told) > LONG_ANSWER:
        text = await way.contracts.apart.call(identity.digest, deadline, make, *arguments)
    else:
        text = make(*arguments)
    return Response(text, media_type="application/json")

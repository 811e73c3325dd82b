"""The way of a request whose body names a model and has a list of samples for it: every such route takes it.

A list of more samples than the model takes at once is charged as so many requests, and goes in parts of like length, so
that others wait for a short while. It is all or nothing: a sample that is refused fails the request.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from serve.gateway.access.identity import Identity
from serve.gateway.access.lists import ListPart, Turns
from serve.gateway.access.memory import Share
from serve.gateway.edge.asking import CLIENT_LEFT, unless_client_leaves, until_loaded
from serve.gateway.edge.bodies import read_unpacked
from serve.gateway.edge.lengths import Part, parts_of
from serve.gateway.edge.listed_values import TritonAnswer
from serve.gateway.edge.openai_errors import ParameterError
from serve.gateway.edge.together import together
from serve.gateway.edge.tokens import Tokens
from serve.gateway.edge.way import Way
from serve.gateway.errors import (
    NO_ROOM,
    AnswerTooLargeError,
    ClientGoneError,
    GatewayError,
    OverloadedError,
    UnknownModelError,
    UnsupportedMediaError,
)
from serve.gateway.oip.apart import NoRoomError
from serve.gateway.oip.cost import CHEAP_BYTES
from serve.gateway.oip.encoding import Packed
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import BINARY_HEADER, Message
from serve.gateway.release.answering import check_down, models_of
from serve.gateway.release.answers import ANSWER_ID
from serve.gateway.release.release import Release
from serve.gateway.release.released import SERVED_BY
from serve.gateway.settings import Settings
from serve.gateway.upstream.deadline import TIMEOUT_HEADER, patience_s
from serve.gateway.upstream.upstream import triton_error
from serve.http.client import Response as UpstreamResponse

__all__ = ["AT_ONCE", "Asked", "By", "Form", "Work", "answer"]

_COUNTED = re.compile(r"\btext(?:_pair)? (\d{1,4})\b")
AT_ONCE = 4  # parts of a request that are under way at a time
LONG_ANSWER = 256 * 1024  # bytes of what it is made of
SAMPLE_BYTES, PART_BYTES = 256, 2048  # that one takes beside its own, however short: objects, an answer's head


class Asked(Protocol):
    """What a request asks for."""

    @property
    def model(self) -> str:
        """The name of the model."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of each sample."""

    @property
    def held(self) -> int:
        """Bytes of all that it holds."""

    def kept(self) -> Self:
        """What the answer needs of it."""


A = TypeVar("A", bound=Asked)
A_ = TypeVar("A_", bound=Asked, contravariant=True)


class By(Protocol[A_]):
    """How a model is asked."""

    @property
    def most(self) -> int:
        """Samples that a request of Triton's may hold."""

    @property
    def tokens(self) -> str:
        """The name of the output that counts the tokens of a sample; "" for none."""

    def message(self, asked: A_, places: Sequence[int]) -> Message:
        """The infer request for some of the samples; made as its turn comes, as a list may have thousands."""


B = TypeVar("B", bound=By[Any])


@dataclass(frozen=True)
class Form(Generic[A, B]):
    """What is a route's own; its functions are a module's, as some run in another process.

    Attributes:
        param: the field that holds the samples; `samples` what they are, for people.
        read: what the JSON of a body asks for; raises BadRequestError.
        fit: how a model is asked for that; raises ParameterError, for None, too: there is no such model.
        write: the JSON of the answer, and how many tokens its usage has: of Triton's answers, of the places in the
            request that the samples of each have, and of what the answer needs; raises UpstreamBrokenError.
    """

    param: str
    samples: str
    read: Callable[[Any], A]
    fit: Callable[[A, ModelMetadata | None], B]
    write: Callable[[Sequence[TritonAnswer], Sequence[Sequence[int]], A, B], tuple[bytes, int]]


async def answer(form: Form[A, B], way: Way, settings: Settings, request: Request) -> Response:
    """The answer to a client's request; raises GatewayError."""
    one = _Listed(form, way, settings, request)
    try:
        return await one.answer()
    except ClientGoneError:
        return Response(status_code=CLIENT_LEFT)
    finally:
        one.close()


@dataclass(frozen=True)
class Work(Generic[A, B]):
    """What is sent for a request, in parts that share a draw: they are answered by one of two models under release."""

    asked: A
    by: B
    release: Release | None
    parts: Sequence[Part]
    draw: bytes = field(default_factory=lambda: os.urandom(8))

    @property
    def count(self) -> int:
        """Requests that it counts as."""
        return -(-len(self.asked.sizes) // self.by.most)

    @property
    def held(self) -> int:
        """What it makes the gateway hold until it is answered, besides its answers' numbers."""
        sizes = self.asked.sizes
        message = max(sum(sizes[at] for at in part.places) for part in self.parts)
        under_way = min(AT_ONCE, len(self.parts)) * message
        return self.asked.held + under_way + SAMPLE_BYTES * len(sizes) + PART_BYTES * len(self.parts)


class _Listed(Generic[A, B]):
    """One request."""

    def __init__(self, form: Form[A, B], way: Way, settings: Settings, request: Request) -> None:
        self._form, self._way, self._request = form, way, request
        self._most_bytes = settings.max_body_bytes
        self._identity: Identity = request.state.identity
        self._headers = dict(request.scope["headers"])
        self._patience = patience_s(self._headers.get(TIMEOUT_HEADER), settings.timeout_s)
        self._deadline = time.monotonic() + self._patience
        self._share, self._lease = Share(way.gate.memory, self._identity.id), way.gate.lease()
        self._charged = self._most = 1  # requests, and samples of each
        self._tokens, self._sizes = Tokens(), list[int]()
        self._begun: dict[Part, int] = {}  # how many samples each has

    def close(self) -> None:
        """Give back what was charged for what was not begun."""
        self._identity.give_back(self._charged - max(1, -(-sum(self._begun.values()) // self._most)))
        self._tokens.close([self._sizes[at] for part in self._begun for at in part.places])
        self._lease.close()
        self._share.close()

    async def answer(self) -> Response:
        """See `answer`."""
        gate, way = self._way.gate, self._way
        asked = await self._asked()
        self._name(asked)
        release = way.releases.get(asked.model)
        scope, receive = self._request.scope, self._request.receive
        models = models_of(asked.model, release)
        await until_loaded(gate, self._lease, models, self._identity.id, self._deadline, scope, receive)
        by = self._form.fit(asked, await self._metadata(asked.model, release))
        lists = gate.lists(asked.model)
        work = Work(asked, by, release, parts_of(asked.sizes, by.most, lists.budget))
        turns = Turns(lists, AT_ONCE) if len(work.parts) > 1 else None
        if turns is not None:
            turns.check(self._identity.priority, self._patience, self._identity.id)
        self._charge(work)
        self._share.resize(work.held)
        works = (
            partial(self._part, work, part, None if turns is None else ListPart(turns, part.cost))
            for part in work.parts
        )
        answers = await together(scope, receive, works, AT_ONCE)
        return await self._response(work, answers)

    async def _asked(self) -> A:
        """What the body asks for."""
        media = self._headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if media != "application/json":
            why = f"application/json is, and {media[:64] or 'none'} came"
            raise UnsupportedMediaError("the content type is not one that is read", why=why, mend="set Content-Type")
        scope, receive = self._request.scope, self._request.receive
        long_work = self._way.gate.long_work
        body = await read_unpacked(scope, receive, self._most_bytes, self._share, long_work, as_json=True)
        reading = self._way.contracts.read_json(self._identity.digest, self._deadline, self._form.read, body)
        if isinstance(body, Packed) or len(body) > CHEAP_BYTES:  # it may have to wait
            reading = unless_client_leaves(scope, receive, reading)
        return await reading

    def _name(self, asked: A) -> None:
        """The model is known now: whether the key may ask it, and whether one that came alone would be answered."""
        gate = self._way.gate
        self._request.scope["state"]["model"] = asked.model  # for what counts requests
        if not gate.keys.open:
            self._identity = gate.keys.again(self._identity)
        self._identity.check_model(asked.model)
        check_down(gate.incidents.outages, asked.model, self._way.releases.get(asked.model))
        if len(asked.sizes) == 1:  # where several stand, and for how long, their parts tell
            gate.places(asked.model).check(self._identity.priority, self._patience, self._identity.id)

    async def _metadata(self, model: str, release: Release | None) -> ModelMetadata | None:
        try:
            return await self._way.metadata(model, release)
        except UnknownModelError:
            return None

    def _charge(self, work: Work[A, B]) -> None:
        """Count a list as so many requests of `most` samples, one of which was counted as it came.

        Raises:
            RateLimitedError: the key has to wait.
            ParameterError: waiting would not help.
        """
        identity, count, most = self._identity, work.count, work.by.most
        if count > 1 and identity.bucket is not None and count > identity.bucket.burst:
            may, samples = f"the key may send {identity.bucket.burst} at once", self._form.samples
            raise ParameterError(
                self._form.param,
                f"{self._form.param} is too long for the key {identity.name!r}",
                why=f"it counts as {count} requests of {most} {samples}, and {may}",
                mend=f"send fewer {samples} at a time",
            )
        identity.take_more(count - 1)
        self._charged, self._most = count, most
        self._sizes = list(work.asked.sizes)
        self._tokens.take(identity, self._sizes, self._form.param, self._form.samples)

    async def _part(self, work: Work[A, B], part: Part, stands: ListPart | None, scope: Scope) -> UpstreamResponse:
        """Triton's answer to some of the samples."""
        self._begun[part] = len(part.places)
        way, model = self._way, work.asked.model
        message = work.by.message(work.asked, part.places)
        speaks = self._charged == 1 and part is work.parts[0]  # else its id is given to nobody
        try:
            answer = await way.ask(
                model, work.release, message, self._identity, scope, self._request.receive, self._deadline, work.draw,
                stands, speaks=speaks,
            )  # fmt: skip
        except OverloadedError:  # the model did not get it
            del self._begun[part]
            raise
        if answer.status == 200:
            return answer
        way.upstream.forget(model)
        # What pack's hooks count within a part is counted within the request.
        places = dict(enumerate(part.places))
        named = self._form.param
        why = _COUNTED.sub(lambda found: f"{named} {places.get(int(found[1]), found[1])}", triton_error(answer))
        status = answer.status if 400 <= answer.status < 600 else 502
        told = f"the model {model!r} gave no answer"
        if status < 500:
            raise ParameterError(named, told, why=why, status=status)
        raise GatewayError(told, why=why, status=status)

    async def _response(self, work: Work[A, B], answers: list[UpstreamResponse]) -> Response:
        request, memory, identity = self._request, self._way.gate.memory, self._identity
        if len({answer.header(SERVED_BY) for answer in answers}) > 1:
            raise OverloadedError(
                f"the model {work.asked.model!r} was replaced while it answered",
                why=f"parts of the {self._form.samples} were answered by another: their answers can't be compared",
                mend="ask again",
            )
        writing = self._written(work, answers)
        text, tokens = await unless_client_leaves(request.scope, request.receive, writing)
        fields = self._tokens.read(request.scope, tokens if work.by.tokens else None)
        counted = sum(len(answer.body) for answer in answers if answer.held is not None)  # for the key already
        memory.check_for(identity.id, len(text) - counted)
        self._share.resize(len(text))
        response = Response(text, media_type="application/json")
        for name, value in (*identity.limits(), *fields):
            response.headers[name.decode()] = value.decode()
        for name in (SERVED_BY, *([ANSWER_ID] if self._charged == 1 else [])):
            if (found := answers[0].header(name)) is not None:
                response.headers[name.decode()] = found.decode()
        return response

    async def _written(self, work: Work[A, B], answers: list[UpstreamResponse]) -> tuple[bytes, int]:
        told = [(answer.body, answer.header(BINARY_HEADER)) for answer in answers]
        kept = work.asked.kept()
        arguments = told, [part.places for part in work.parts], kept, work.by
        if kept.held + sum(len(body) for body, _ in told) > LONG_ANSWER:
            try:
                return await self._way.contracts.apart.call(
                    self._identity.digest, self._deadline, self._form.write, *arguments
                )
            except NoRoomError:
                raise AnswerTooLargeError(NO_ROOM) from None
        return self._form.write(*arguments)

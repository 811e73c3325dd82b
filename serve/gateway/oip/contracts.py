"""The contracts of the models that are served, and requests held against them off the event loop where that is dear."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar, TypeVarTuple, Unpack

import orjson

from serve.gateway.access.loop_time import LoopTime
from serve.gateway.access.memory import SMALL_BYTES
from serve.gateway.access.slots import Batcher
from serve.gateway.errors import BadRequestError, GatewayError, UnknownModelError
from serve.gateway.oip.apart import Apart
from serve.gateway.oip.bare_contract import BareContract
from serve.gateway.oip.checks import Checks
from serve.gateway.oip.contract import Contract, UnfitError
from serve.gateway.oip.cost import is_dear
from serve.gateway.oip.encoding import Packed
from serve.gateway.oip.metadata import ModelMetadata, example_json
from serve.gateway.oip.remembered import Remembered
from serve.gateway.oip.request import Request, check_json_bytes, loaded, raw_head, read_request
from serve.gateway.oip.sequence import FLAGS, SEQUENCE_ID, Named
from serve.gateway.oip.tensors import ProtocolError
from serve.http.body import GrowingBody
from serve.rollout.plan import Target

__all__ = ["JSON_AT_HAND", "Contracts", "MetadataSource"]

# A client whose requests don't fit asks for another look at the model no more often than this.
AGAIN_S = 1.0
# A contract holds so long without a look at the metadata, which is itself remembered for longer.
HOLDS_S = 0.25
# The JSON of a binary request is the same from a client's one request to the next.
REMEMBERED, SHORT_JSON = 512, 2048
MODELS = 4096  # and versions of such, whose contracts are remembered
JSON_AT_HAND = 16 * 1024
DEEPEST = 8  # ensembles within ensembles

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class MetadataSource(Protocol):
    """Tells the metadata of models, and remembers them for a while."""

    async def metadata(self, model: str, version: str | None = None) -> ModelMetadata:
        """A model's metadata; UnknownModelError where there is no such model, GatewayError where nobody can tell."""

    def forget(self, model: str, version: str | None = None) -> None:
        """Ask for a model's metadata anew next time."""


class Contracts:
    """Contracts by model, from Triton's own metadata.

    Args:
        source: tells the metadata.
        max_elements: of one input; 0 for what its dimensions allow.
        reader_bytes: that dear JSON may become where it is read.
        apart_bytes: that the process which reads it may have; 0 for any number.
        loop_time: of each key, for what is read in the event loop; by default one of its own.
        validate: whether each request is held against its model; else only what any model might die of is refused, and
            the model is looked up where that can't be told without it.

    Attributes:
        apart: the process that reads dear JSON.
        works: is told how many instances of a model work at the same time, what other models it asks, and how many
            requests an instance answers together at most (0: nobody knows), whenever it is looked at anew.
    """

    def __init__(
        self,
        source: MetadataSource,
        max_elements: int,
        reader_bytes: int = 1 << 30,
        apart_bytes: int = 0,
        *,
        loop_time: LoopTime | None = None,
        validate: bool = True,
    ) -> None:
        self._bare = None if validate else BareContract(max_elements)
        self._reader_bytes = reader_bytes
        self._source = source
        self._max_elements = max_elements
        self._made: Remembered[str, tuple[object, Contract]] = Remembered(MODELS)
        self._holding: dict[tuple[str, str | None], tuple[float, Contract]] = {}
        self._looked: dict[str, float] = {}
        self._fits: dict[tuple[bytes, int, bool], tuple[Contract, Request, bytes]] = {}
        self._loop_time = loop_time or LoopTime()
        self.apart = Apart(apart_bytes)
        self._checks = Checks()
        self.works: Callable[[str, int, Sequence[str], int, float, str], None] = _nothing

    async def of(self, target: Target) -> Contract:
        """The contract of a model, or of one version of it.

        Raises:
            UnknownModelError: Triton does not serve it, and says so.
            GatewayError: Triton can't be asked.
        """
        if (holding := self._held(target)) is not None:
            return holding
        return await self._told(target)

    async def decoupled(self, target: Target) -> bool | None:
        """Whether a model gives any number of answers to a request; None where nobody tells."""
        with contextlib.suppress(GatewayError):
            return (await self._source.metadata(target.model, target.version)).decoupled
        return None

    async def heeds_cancellation(self, target: Target) -> bool:
        """Whether a model says that it ends soon once a request is cancelled; False where nobody tells."""
        with contextlib.suppress(GatewayError):
            return (await self._source.metadata(target.model, target.version)).heeds_cancellation
        return False

    async def answers_shortly(self, target: Target) -> bool:
        """Whether a model's answers are short, whatever is asked; False where nobody tells, or is asked."""
        if self._bare is not None:
            return False
        with contextlib.suppress(GatewayError):
            return (await self._source.metadata(target.model, target.version)).answer_bytes <= SMALL_BYTES
        return False

    async def _told(self, target: Target) -> Contract:
        """The contract by the model's metadata."""
        try:
            metadata = await self._source.metadata(target.model, target.version)
        except UnknownModelError as err:
            raise UnknownModelError(err.why or err.error) from err  # in Triton's own words
        made = self._made.get(target.path)
        if made is None or made[0] is not metadata:
            texts = await self._takes_texts(metadata)
            batcher = await self._batcher(metadata)
            contract = Contract.of(metadata, self._max_elements, sequence_texts=texts, batcher=batcher)
            if made is not None and made[1] == contract:
                contract = made[1]  # what was read by it still holds
            made = metadata, contract
            self._made.put(target.path, made)
            asks: list[str] = []
            whole = metadata
            if target.version is not None:
                with contextlib.suppress(GatewayError):  # of one version, Triton tells of no other
                    whole = await self._source.metadata(target.model, None)
            instances, together, waits_s = await self._instances(whole, asks)
            self.works(target.model, instances, asks, together, waits_s, whole.latest)
        if len(self._holding) >= MODELS:
            self._holding.clear()
        self._holding[target.model, target.version] = time.monotonic() + HOLDS_S, made[1]
        return made[1]

    async def _takes_texts(self, metadata: ModelMetadata, depth: int = 0) -> bool:
        """Whether the id of a sequence may be a text for a model and, as it goes on to them, for its steps."""
        if not metadata.sequence_texts or depth > DEEPEST:
            return False
        try:
            for model, version in metadata.steps:
                if not await self._takes_texts(await self._source.metadata(model, version), depth + 1):
                    return False
        except GatewayError:  # a step that is not known
            return False
        return True

    async def _batcher(self, metadata: ModelMetadata, depth: int = 0) -> Batcher | None:
        """Of a model's sequences, or of the first of its steps' that has one."""
        if metadata.batcher is not None or depth > DEEPEST:
            return metadata.batcher
        with contextlib.suppress(GatewayError):  # a step that is not known
            for model, version in metadata.steps:
                found = await self._batcher(await self._source.metadata(model, version), depth + 1)
                if found is not None:
                    return found
        return None

    async def _instances(self, metadata: ModelMetadata, asks: list[str], depth: int = 0) -> tuple[int, int, float]:
        """That work at the same time: of the model, or of that among those that it `asks` which has fewest.

        And how many requests one of any of these answers together at most, 0 where that is not known, and how many
        seconds it waits for them.
        """
        counts = [(metadata.instances, metadata.together, metadata.waits_s)] if metadata.instances else []
        asked = metadata.steps if not metadata.network else (*metadata.steps, (metadata.network, None))
        with contextlib.suppress(GatewayError):  # a step that is not known
            for model, version in asked if depth <= DEEPEST else ():
                counts.append(await self._instances(await self._source.metadata(model, version), asks, depth + 1))
                asks.append(model)
        together = [each for _, each, _ in counts]
        most = 0 if 0 in together else max(together, default=0)
        waits_s = max((each for *_, each in counts), default=math.inf)
        return min((instances for instances, *_ in counts), default=1), most, waits_s

    async def last_request(self, target: Target, sequence: int | str) -> bytes | None:
        """A request of zeros and empty texts that ends a sequence; None where it would be too large.

        Args:
            target: the model.
            sequence: its id, as Triton knows it.

        Raises:
            GatewayError: the model is not known any more.
        """
        metadata = await self._source.metadata(target.model, target.version)
        with contextlib.suppress(ProtocolError):
            zeros = example_json(replace(metadata, example=None))
            return orjson.dumps({"parameters": {SEQUENCE_ID: sequence, FLAGS[1]: True}})[:-1] + b"," + zeros[1:]
        return None

    def _held(self, target: Target) -> Contract | None:
        """The contract, where it was looked at just now."""
        if self._bare is not None:
            return self._bare
        found = self._holding.get((target.model, target.version))
        return found[1] if found is not None and time.monotonic() < found[0] else None

    async def fitting(
        self, target: Target, check: Callable[[Contract, Callable[[], object]], None], who: str = "", size: int = 0
    ) -> None:
        """Have a request checked; what says UnfitError is asked again with the model as it is now.

        Args:
            target: the model.
            check: gets its contract, and what to call about every millisecond.
            who: a key, or an address.
            size: bytes that are looked at element by element.

        Raises:
            GatewayError: it does not fit, or the model is not known.
        """
        contract = await self.of(target)
        try:
            await self._checks.check(who, size, partial(check, contract))
        except UnfitError:
            if (fresh := await self._fresh(target, contract)) is None:
                raise
            await self._checks.check(who, size, partial(check, fresh))

    async def read(
        self,
        target: Target,
        head: bytes | Packed,
        tail_bytes: int | None,
        *,
        shared_memory: bool,
        digest: str = "",
        deadline: float | None = None,
    ) -> tuple[Request, bytes]:
        """Read the JSON of a request for a model.

        Args:
            target: the model.
            head: the JSON.
            tail_bytes: how many bytes of raw tensors follow; None where it is all JSON.
            shared_memory: whether it may name regions of shared memory.
            digest: of the client's key; "" where there are none.
            deadline: by which what is long has to be begun, on the monotonic clock; None for no such bound.

        Returns:
            The request, and its JSON as it goes on to Triton.

        Raises:
            GatewayError: it does not fit, or the model is not known.
        """
        contract = await self.of(target)
        read = partial(
            self._read, head=head, tail_bytes=tail_bytes, shared_memory=shared_memory, digest=digest, deadline=deadline
        )
        try:
            return await read(contract)
        except UnfitError:
            if (fresh := await self._fresh(target, contract)) is None:
                raise
            return await read(fresh)

    async def fitted(
        self,
        target: Target,
        body: bytes | GrowingBody | Packed,
        header_length: int | None,
        *,
        shared_memory: bool,
        seconds: float | None,
        digest: str = "",
        deadline: float | None = None,
    ) -> tuple[bytes | GrowingBody, int | None, Named | None]:
        """The request as it goes on, held against its model, the length of its JSON in the binary form, its sequence.

        Args:
            target: the model.
            body: of the client's request; packed where it is all JSON, and long.
            header_length: bytes of its JSON in the binary form; None where it is all JSON.
            shared_memory: whether it may name regions of shared memory.
            seconds: for Triton's parameter `timeout`; None for none.
            digest, deadline: as for `read`.
        """
        if isinstance(body, Packed):
            request, text = await self.read(
                target, body, None, shared_memory=shared_memory, digest=digest, deadline=deadline
            )
            return text, None, request.sequence
        size = len(body)
        if header_length and seconds is None and isinstance(body, bytes):
            found = self.at_hand(target, body, header_length, shared_memory=shared_memory)
            if found is not None:
                return *found, None
        if header_length == 0 and isinstance(body, bytes):
            head, body = raw_head(body, await self._told(target))
            size, length = len(head) + len(body), len(head)
            after = memoryview(body)
        else:
            length = size if header_length is None else header_length
            if length > size:
                raise BadRequestError("the JSON of the request is longer than its body")
            head = body.head(length) if isinstance(body, GrowingBody) else body[:length]
            if isinstance(body, bytes):
                after = memoryview(body)[length:]  # to cut it off would be a copy
        tail = None if header_length is None else size - length
        request, text = await self.read(
            target, head, tail, shared_memory=shared_memory, digest=digest, deadline=deadline
        )
        if seconds is not None:
            text = request.json_within(seconds) or text
        new = None if header_length is None else len(text)
        if isinstance(body, GrowingBody):
            if not request.texts:
                body.replace_head(length, text)
                return body, new, request.sequence
            body = await body.wait()
            after = memoryview(body)[length:]
        if request.texts:
            await self._checks.check(digest, len(after), partial(request.check_texts, after))
        return b"".join((text, after)), new, request.sequence

    def at_hand(
        self, target: Target, body: bytes, header_length: int | None, *, shared_memory: bool
    ) -> tuple[bytes, int | None] | None:
        """The same for what nearly every request is: the JSON of one before, and as many bytes after it, or short JSON.

        None for any other, for what does not fit, and where the contract has to be looked at again.
        """
        if header_length is None:
            contract = self._held(target)
            if contract is None or len(body) > JSON_AT_HAND or is_dear(body):
                return None
            try:
                request = read_request(body, None, contract, shared_memory=shared_memory)
            except GatewayError:
                return None
            return None if request.sequence is not None else (request.json(), None)
        head = body[:header_length]
        known = self._fits.get((head, len(body) - header_length, shared_memory))
        if known is None or known[0] is not self._held(target) or known[1].texts:
            return None
        text = known[2]
        return (body, header_length) if text == head else (text + body[header_length:], len(text))

    def close(self) -> None:
        """End the process that reads dear JSON."""
        self.apart.close()

    async def _read(
        self,
        contract: Contract,
        head: bytes | Packed,
        tail_bytes: int | None,
        *,
        shared_memory: bool,
        digest: str,
        deadline: float | None,
    ) -> tuple[Request, bytes]:
        if isinstance(head, Packed) or is_dear(head):
            arguments = head, self._reader_bytes, tail_bytes, contract, shared_memory, digest
            return await self.apart.call(digest, deadline, _read_in_child, *arguments)
        # What is all JSON is hardly ever the same twice: to look for it would cost a hash of it all.
        key = (head, tail_bytes, shared_memory) if tail_bytes and len(head) <= SHORT_JSON else None
        known = None if key is None else self._fits.get(key)
        if known is not None and known[0] is contract:
            return known[1], known[2]
        request, text = await self._loop_time.call(
            digest, lambda: _read(head, tail_bytes, contract, shared_memory=shared_memory, digest=digest)
        )
        if key is not None and request.sequence is None:  # whose name is its key's own
            if len(self._fits) >= REMEMBERED:
                self._fits.clear()
            self._fits[key] = contract, request, text
        return request, text

    async def read_json(
        self, digest: str, deadline: float, read: Callable[[Any, Unpack[Ts]], T], text: bytes | Packed, *arguments: *Ts
    ) -> T:
        """What a function makes of a JSON, which is not held against a contract: read apart where it is dear.

        Args:
            digest, deadline: as for `read`.
            read: a function of a module, which gets what the JSON says, and the arguments.
            text: the JSON.
            arguments: can go to another process.

        Raises:
            GatewayError: it can't be read, or `read` says so.
        """
        if isinstance(text, Packed) or is_dear(text):
            return await self.apart.call(digest, deadline, _made_in_child, read, text, self._reader_bytes, arguments)
        return await self._loop_time.call(digest, lambda: read(loaded(text), *arguments))

    async def _fresh(self, target: Target, seen: Contract) -> Contract | None:
        """The contract as Triton tells it now, if it is another."""
        if self._bare is not None:
            with contextlib.suppress(GatewayError):
                return await self._told(target)
            return None
        now = time.monotonic()
        if now - self._looked.get(target.path, -AGAIN_S) < AGAIN_S:
            return None
        if len(self._looked) >= MODELS:
            self._looked.clear()
        self._looked[target.path] = now
        self._holding.pop((target.model, target.version), None)
        self._source.forget(target.model, target.version)
        with contextlib.suppress(GatewayError):
            fresh = await self.of(target)
            if fresh != seen:
                return fresh
        return None


def _read(
    head: bytes, tail_bytes: int | None, contract: Contract, *, shared_memory: bool, digest: str
) -> tuple[Request, bytes]:
    request = read_request(head, tail_bytes, contract, shared_memory=shared_memory, digest=digest)
    return request, request.json()


def _read_in_child(
    came: bytes | Packed, most_bytes: int, tail_bytes: int | None, contract: Contract, shared_memory: bool, digest: str
) -> tuple[Request, bytes]:
    head = came if isinstance(came, bytes) else came.unpacked()
    check_json_bytes(head, most_bytes)
    request, text = _read(head, tail_bytes, contract, shared_memory=shared_memory, digest=digest)
    request.header = None  # it was dear to read, and would be to hand over
    return request, text


def _made_in_child(read: Callable[..., T], came: bytes | Packed, most_bytes: int, arguments: tuple[Any, ...]) -> T:
    text = came if isinstance(came, bytes) else came.unpacked()
    check_json_bytes(text, most_bytes)
    return read(loaded(text), *arguments)


def _nothing(_model: str, _instances: int, _asks: Sequence[str], _together: int, _waits_s: float, _latest: str) -> None:
    """Nobody is to be told."""

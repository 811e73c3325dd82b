"""The gateway's side of Triton: which paths it may ask for, and what a failed exchange means to a client."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import orjson

from serve.config.names import MODEL_NAME, VERSION
from serve.gateway.access.memory import LastingShare, Memory
from serve.gateway.errors import (
    AnswerTooLargeError,
    GatewayError,
    HasItsConnectionsError,
    SlowBodyError,
    UnknownModelError,
    UpstreamBrokenError,
    UpstreamDownError,
    UpstreamTimeoutError,
)
from serve.gateway.health.incidents import Incidents
from serve.gateway.health.outages import DEAD_STUB, ModelDownError
from serve.gateway.observe.telemetry import Telemetry
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.remembered import Remembered
from serve.gateway.oip.tensors import ProtocolError
from serve.gateway.settings import Settings
from serve.gateway.upstream.balancer import Balancer
from serve.gateway.upstream.deadline import EarlyTimeoutError
from serve.gateway.upstream.node import LONGEST, Node
from serve.http.body import GrowingBody
from serve.http.client import Address, ExchangeError, Response
from serve.repository.read import ModelInfo

__all__ = ["Upstream", "failure_of", "model_path", "triton_error", "was_refused"]

# What Triton answers where a Python model's process is gone.
DEAD = re.compile(rb"""\{"error":"(?:in ensemble '[^"\\]*', )?""" + DEAD_STUB + rb'"\}')
MOST_TOLD = 1024

INDEX = "/v2/repository/index"
LOADING = "/v2/repository/models/"  # is for whom the Triton lets do it: the gateway's word is not lent for it
CACHE_S = 5.0
UNKNOWN_S = 0.2  # that a model is not there: who asks again and again asks Triton five times a second
# What is known of models may take so much: of a few thousand, with configurations of some KB. Where JSON is read, it
# becomes up to so many times as large.
KNOWN_BYTES, BECOMES = 64 * 1024 * 1024, 8
ENTRY_BYTES = 1024
UNKNOWN_NAMES = 256
TOLD = 100  # letters of a name that none can have


def model_path(model: str, version: str | None = None) -> str:
    """The path "/v2/models/M[/versions/V]" of a model.

    Raises:
        UnknownModelError: no model of Triton's can have this name or version.
    """
    if not re.fullmatch(MODEL_NAME, model):
        raise UnknownModelError(f"Request for unknown model: {model[:TOLD]!r} is not found")
    if version is None:
        return f"/v2/models/{model}"
    if not re.fullmatch(VERSION, version):
        raise UnknownModelError(f"Request for unknown model: {model!r} version {version[:TOLD]!r} is not found")
    return f"/v2/models/{model}/versions/{version}"


class Upstream:
    """Requests to the Tritons over bounded sets of connections."""

    def __init__(self, settings: Settings, telemetry: Telemetry, memory: Memory | None = None) -> None:
        self.balancer = Balancer(
            [Address.parse(url) for url in settings.upstream],
            max_connections=settings.max_connections,
            timeout_s=settings.timeout_s,
            on_error=lambda kind: telemetry.upstream_errors.labels(kind).inc(),
            on_retry=telemetry.retries.inc,
            on_eject=lambda address, model, kind: telemetry.ejections.labels(str(address), model, kind).inc(),
            discover=settings.discover,
            hold=None if memory is None else partial(LastingShare, memory),
            max_answer_bytes=LONGEST if memory is None else memory.most_of_one,
        )

        self.outages = Incidents().outages
        self._control: list[tuple[bytes, bytes]] = []
        self.answers_for_name: Callable[[str, str], bool] = lambda *_: False  # releases know
        self.resting: Callable[[], Mapping[str, ModelInfo]] = dict  # models that would be loaded for a request
        self._known: Remembered[str, tuple[float, ModelMetadata]] = Remembered(KNOWN_BYTES)
        self._unknown: Remembered[str, tuple[float, UnknownModelError]] = Remembered(UNKNOWN_NAMES)

    @property
    def sole(self) -> Node | None:
        """The one Triton that there is; None where there is a choice."""
        return self.balancer.sole

    def follow(self, incidents: Incidents) -> None:
        """Take what is known of models that are down, and of who may list them, from there."""
        self.outages = incidents.outages
        self._control = [(name.encode(), value.encode()) for name, value in incidents.control.items()]

    async def get(self, path: str, *, timeout_s: float | None = None, administers: bool = False) -> Response:
        """GET a path of Triton's; raises GatewayError (502, 503, 504).

        Args:
            administers: it is about what Triton may let nobody but the gateway ask.
        """
        headers = self._control if administers else []
        try:
            return await self.balancer.exchange(b"GET", path.encode("ascii"), headers, timeout_s=timeout_s)
        except ExchangeError as err:
            raise failure_of(err) from err

    async def infer(
        self,
        path: bytes,
        headers: Sequence[tuple[bytes, bytes]],
        body: bytes | GrowingBody,
        timeout_s: float,
        *,
        who: bytes | None = None,
        sequence: bytes | None = None,
    ) -> Response:
        """POST an infer request; raises GatewayError (502, 503, 504).

        Args:
            who: the id of the key that asks, for which its answer counts; None for nobody's.
            sequence: what says which server has the sequence that it belongs to; None for none.
        """
        began, key = time.monotonic(), "" if who is None else who.decode()
        try:
            answer = await self.balancer.exchange(
                b"POST", path, headers, body, timeout_s=timeout_s, sequence=sequence, who=key
            )
        except ExchangeError as err:
            raise failure_of(err) from err
        self.check_alive(answer, path, began)
        return answer

    def check_alive(self, answer: Response, path: bytes, began: float) -> None:
        """Raises ModelDownError where Triton answers that the model's process is gone.

        Args:
            path: that was asked.
            began: when, on the monotonic clock.
        """
        if answer.status == 500 and (dead := DEAD.fullmatch(answer.body[:MOST_TOLD])) is not None:
            instance = dead[1].decode()
            model = path.decode().split("/")[3]
            self.outages.seen(instance, began, model)
            raise ModelDownError(model, f"its process {instance} has died", sent=True)

    async def post_all(self, path: str, body: bytes) -> Response:
        """POST a body to every Triton; the first answer that is no 200, else the last. Raises GatewayError."""
        answers = []
        headers = [] if path.startswith(LOADING) else self._control
        for node in self.balancer.nodes:
            try:
                answers.append(await node.control.request(b"POST", path.encode("ascii"), headers, body))
            except ExchangeError as err:
                raise failure_of(err) from err
        return next((answer for answer in answers if answer.status != 200), answers[-1])

    async def ready(self) -> bool:
        """Whether a Triton said, when it was last probed, that it and its models are ready."""
        return (await self.balancer.health())[1]

    async def live(self) -> bool:
        """Whether a Triton answered when it was last probed."""
        return (await self.balancer.health())[0]

    async def metadata(self, model: str, version: str | None = None) -> ModelMetadata:
        """A model's metadata, at most `CACHE_S` seconds old.

        Of a version that answered for the model's name and is served no longer: of Triton's own choice, which answers
        in its place.

        Raises:
            UnknownModelError: Triton does not serve it.
            GatewayError: Triton can't be asked, or its answer can't be read.
        """
        try:
            return await self._metadata(model, version)
        except UnknownModelError:
            if version is None or not self.answers_for_name(model, version):
                raise
            return await self._metadata(model, None)

    async def _metadata(self, model: str, version: str | None) -> ModelMetadata:
        path = _known_path(model, version)
        now = time.monotonic()
        cached = self._known.get(path)
        if cached is not None and now - cached[0] < CACHE_S:
            return cached[1]
        if (unknown := self._unknown.get(path)) is not None and now - unknown[0] < UNKNOWN_S:
            raise unknown[1]
        answer, config = await asyncio.gather(self.get(path), self.get(f"{path}/config"))
        if answer.status != 200:
            missing = UnknownModelError(
                f"there is no model {model!r} to ask",
                why=triton_error(answer),
                mend="look up the name in the model repository, and whether the model loaded",
            )
            self._unknown.put(path, (now, missing))
            raise missing
        try:
            metadata = ModelMetadata.parse(answer.body, config.body if config.status == 200 else None)
        except ProtocolError as err:
            raise UpstreamBrokenError("Triton's answer can't be read", why=str(err)) from err
        size = ENTRY_BYTES + BECOMES * (len(answer.body) + len(config.body))
        self._known.put(path, (now, metadata), size)
        return metadata

    async def loaded(self) -> list[str]:
        """Names of the models that are ready, sorted; none where Triton does not tell."""
        return sorted({name for name, state in await self.index() if state == "READY"})

    async def askable(self) -> dict[str, ModelInfo | None]:
        """The models that a request would be answered by, sorted: None for one that is loaded, else what it is."""
        found: dict[str, ModelInfo | None] = {**self.resting(), **dict.fromkeys(await self.loaded())}
        return dict(sorted(found.items()))

    async def known(self, patience_s: float) -> set[str] | None:
        """Names in the repository of any Triton, loaded or not; None where one does not tell."""
        found: set[str] = set()
        for node in self.balancer.nodes:
            try:
                answer = await node.control.request(b"POST", INDEX.encode(), (), b"{}", timeout_s=patience_s)
                if answer.status != 200:  # 403: it belongs to whoever runs the Triton
                    return None
                found |= {str(row["name"]) for row in orjson.loads(answer.body)}
            except (ExchangeError, ValueError, KeyError, TypeError):
                return None
        return found

    async def index(self) -> list[tuple[str, str]]:
        """Name and state of each model (and version); none where Triton does not tell."""
        try:
            answer = await self.balancer.exchange(b"POST", INDEX.encode(), self._control, b"{}")
            if answer.status == 403:  # it belongs to whoever runs the Triton; what is loaded has statistics
                answer = await self.balancer.exchange(b"GET", b"/v2/models/stats")
                rows = [{**row, "state": "READY"} for row in orjson.loads(answer.body)["model_stats"]]
            else:
                rows = orjson.loads(answer.body) if answer.status == 200 else []
            down = {name for name, _ in self.outages}
            names = [(row["name"], "UNAVAILABLE" if row["name"] in down else row.get("state", "")) for row in rows]
            return names + [(name, "UNAVAILABLE") for name in down.difference(name for name, _ in names)]
        except (ExchangeError, ValueError, KeyError, TypeError, AttributeError):
            return []

    def forget(self, model: str, version: str | None = None) -> None:
        """Ask for a model's metadata anew next time."""
        self._known.pop(_known_path(model, version))
        self._unknown.pop(_known_path(model, version))

    async def close(self) -> None:
        await self.balancer.close()


def _known_path(model: str, version: str | None) -> str:
    """`model_path`, the same for all ways to write a version."""
    path = model_path(model, version)
    return path if version is None else model_path(model, str(int(version)))


def failure_of(err: ExchangeError) -> GatewayError:
    """What a failed exchange means to the client."""
    if err.kind == "stalled":
        return SlowBodyError("the request's body did not come in time", why=str(err))
    if err.kind == "timeout":
        kind = EarlyTimeoutError if err.early else UpstreamTimeoutError
        return kind("the model server took too long", why=str(err))
    if err.kind == "share":
        return HasItsConnectionsError(str(err))
    if err.kind in ("refused", "busy"):
        mend = "try again in a moment; if it stays so, look whether the model server runs"
        return UpstreamDownError("the model server can't be reached", why=_public(err), mend=mend)
    if err.kind == "too_large":
        return AnswerTooLargeError(str(err))
    return UpstreamBrokenError("the model server's answer broke off", why=str(err))


def was_refused(err: GatewayError) -> bool:
    """Whether nobody listens where a server was: its process has ended."""
    return isinstance(err.__cause__, ExchangeError) and err.__cause__.kind == "refused"


def triton_error(response: Response) -> str:
    """The message in Triton's {"error": ...}, or the status where there is none."""
    try:
        return str(orjson.loads(response.body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"Triton answered with status {response.status}"


def _public(err: ExchangeError) -> str:
    """A reason without the address of a server that the client can't reach anyway."""
    return "it accepts no connections" if err.kind == "refused" else "all connections to it are in use"

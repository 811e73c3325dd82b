"""The gateway as one ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve import __version__
from serve.gateway.access.footprint import apart_bytes, reader_bytes
from serve.gateway.access.freed import Freed
from serve.gateway.access.gate import Gate
from serve.gateway.access.memory import Memory
from serve.gateway.access.metrics import PlacesCollector
from serve.gateway.access.slots import Batcher
from serve.gateway.edge.admin import admin_router
from serve.gateway.edge.direct import Direct
from serve.gateway.edge.embeddings import embeddings_router
from serve.gateway.edge.events import Streamed, events_router
from serve.gateway.edge.feedback_route import feedback_router
from serve.gateway.edge.guard import GuardMiddleware
from serve.gateway.edge.infer import InferEndpoint
from serve.gateway.edge.openai_errors import refusal
from serve.gateway.edge.predict import predict_router
from serve.gateway.edge.rerank import rerank_router
from serve.gateway.edge.rollouts_route import rollouts_router
from serve.gateway.edge.routes import health_router, protocol_router
from serve.gateway.edge.way import Way
from serve.gateway.errors import EndsError, GatewayError, UpstreamDownError
from serve.gateway.health.incidents import Incidents
from serve.gateway.observe.access_log import AccessLog
from serve.gateway.observe.history import History
from serve.gateway.observe.telemetry import Telemetry, TelemetryMiddleware
from serve.gateway.observe.tracing import Tracing
from serve.gateway.oip.contracts import Contracts
from serve.gateway.on_demand.metrics import ResidencyCollector
from serve.gateway.on_demand.residency import Residency
from serve.gateway.release.answers import Answers
from serve.gateway.release.feedback import Feedback
from serve.gateway.release.metrics import ReleasesCollector
from serve.gateway.release.released import Released, is_gone
from serve.gateway.release.releases import PATIENCE_S, Releases
from serve.gateway.release.users_rules import UsersRules
from serve.gateway.settings import Settings
from serve.gateway.site.docs import add_docs
from serve.gateway.site.page import add_page
from serve.gateway.upstream.loading import Loading
from serve.gateway.upstream.metrics import ServersCollector
from serve.gateway.upstream.upstream import Upstream, was_refused
from serve.rollout.plan import Target

__all__ = ["Parts", "create_app"]

DESCRIPTION = (
    "Models behind Triton. `POST /predict/{model}` takes files and plain values, "
    "`POST /predict/{model}/stream` the same for a stream of answers; `POST /v1/embeddings` is OpenAI's, "
    "`POST /v1/rerank` Cohere's and Jina's; "
    "`POST /v2/models/{model}[/versions/{version}]/infer` is the Open Inference Protocol v2, JSON and binary."
)


class _App(FastAPI):
    """FastAPI with one endpoint in front of its own layers, which cost more than the whole inference path."""

    infer: InferEndpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http" and await self.infer.answered(scope, receive, send):
                return
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or not self.state.draining:
                raise
            with suppress(RuntimeError):  # the answer has begun
                await refusal(EndsError(), scope)(scope, receive, send)
                return
            raise


@dataclass(frozen=True)
class Parts:
    """What another protocol's endpoint shares with this one."""

    gate: Gate
    releases: Releases
    upstream: Upstream
    telemetry: Telemetry
    contracts: Contracts
    loading: Loading
    streamed: Streamed


def create_app(
    settings: Settings,
    incidents: Incidents | None = None,
    loading: Loading | None = None,
    residency: Residency | None = None,
) -> FastAPI:
    """A gateway to `settings.upstream`.

    `incidents`, `loading` (what has to hold before a model is loaded), and `residency` (of models that are loaded on
    demand) come from whoever runs the Triton behind it, if somebody does.

    `app.state.draining` (False) says that it is about to stop: set it to True, and readiness turns false.
    `app.state.parts` are its `Parts`, and `app.state.direct` the short way of its infer requests, if there is one.
    `app.state.others_ended` is set; whoever serves the parts another way, too, clears it, and sets it when that has
    ended: until then they stay open.
    """
    access = AccessLog(settings.access_log) if settings.access_log is not None else None
    tracing = Tracing(settings.otlp_endpoint, settings.trace_ratio) if settings.otlp_endpoint else None
    telemetry = Telemetry(access, tracing)
    memory = Memory(settings.memory_bytes)
    upstream = Upstream(settings, telemetry, memory)
    rules = None if settings.agree_module is None else UsersRules(settings.agree_module)
    releases = Releases(settings.state, upstream, () if rules is None else rules.names)
    gate = Gate(settings, incidents, memory, residency, upstream.balancer.silence)
    contracts = Contracts(
        upstream,
        settings.max_elements,
        reader_bytes(settings.memory_bytes),
        apart_bytes(settings.memory_bytes, settings.max_body_bytes),
        loop_time=gate.loop_time,
        validate=settings.validate,
    )

    def works(model: str, instances: int, asks: Sequence[str], together: int, waits_s: float, latest: str) -> None:
        servers = max(1, len(upstream.balancer.nodes))
        instances *= servers
        gate.works(model, instances, asks, servers=servers, together=together, waits_s=waits_s, latest=latest)

    contracts.works = works

    async def answer_for(groups: Collection[frozenset[str]]) -> None:
        gate.answer_for(groups)
        with suppress(GatewayError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                for model in frozenset().union(
                    *groups
                ):  # nobody who asks a candidate by its release's name looks it up
                    await contracts.of(Target(model))

    releases.bound = answer_for
    loading = loading or Loading()
    nobody = settings.anonymous and settings.keys is None  # anybody who reaches it could end a release
    answers = Answers(0 if nobody else settings.feedback_answers, settings.feedback_s, memory)
    feedback = Feedback(answers, releases)
    apart = partial(contracts.apart.call, None, None)  # comparisons are nobody's: they take turns with the keys
    released = Released(gate, upstream, apart, reader_bytes(settings.memory_bytes), answers, rules, settings.timeout_s)
    history = History(telemetry, gate)
    upstream.follow(gate.incidents)

    async def end_sequence(target: Target, batcher: Batcher, sequence: int | str) -> bool:
        try:
            # Who names no version may get to another by now. An ensemble is asked itself, for its other steps' sake.
            if target.model == batcher.name or await batcher_of(target) != batcher:
                target = batcher.target
            body = await contracts.last_request(target, sequence)
            if body is None:
                return False
            path, headers = target.path.encode(), [(b"content-type", b"application/json")]
            answer = await upstream.infer(path, headers, body, settings.timeout_s, sequence=str(sequence).encode())
        except UpstreamDownError as err:
            if was_refused(err):  # with the process, what it had is gone
                return True
            raise
        # A model that fails is rid of it, too; where it must START, or is not served, there is none.
        gone = b"START" in answer.body or is_gone(answer.status, answer.body)
        return answer.status == 200 or answer.status >= 500 or gone

    async def batcher_of(target: Target) -> Batcher | None:
        with suppress(GatewayError):  # it is gone
            return (await contracts.of(target)).batcher
        return None

    gate.slots.follow(end_sequence)
    if residency is not None:
        _follow(residency, gate, releases, upstream, memory)
        telemetry.catalogued = lambda model: model in residency.known
    if incidents is None:  # nobody else tells when a Triton dies
        upstream.balancer.follow_deaths(gate.incidents)
    telemetry.follow(
        PlacesCollector(gate), ServersCollector(upstream.balancer), ReleasesCollector(releases), feedback,
        gate.incidents.outages, gate.incidents.suspects, memory, ResidencyCollector(residency),
    )  # fmt: skip

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await releases.look()  # before the first request: a restart must not change who answers
        tasks = [asyncio.create_task(gate.watch_keys()), asyncio.create_task(releases.watch())]
        tasks.append(asyncio.create_task(Freed().watch()))
        tasks.append(asyncio.create_task(history.watch()))
        if residency is not None:
            tasks.append(asyncio.create_task(residency.watch()))
        if access is not None:
            tasks.append(asyncio.create_task(access.run()))
        await upstream.balancer.look_up()
        tasks.append(asyncio.create_task(upstream.balancer.watch(settings.health_interval_s)))
        yield
        await app.state.others_ended.wait()
        if app.state.direct is not None:
            app.state.direct.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        releases.rest()
        await released.close()
        await gate.slots.close()
        contracts.close()
        if rules is not None:
            rules.close()
        await releases.close()
        await app.state.parts.streamed.close()
        await upstream.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)

    app = _App(
        title="Model gateway",
        version=__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.draining = False
    app.state.others_ended = asyncio.Event()
    app.state.others_ended.set()
    short = tracing is None and upstream.sole is not None
    app.state.direct = Direct(settings, gate, releases, contracts, upstream, telemetry) if short else None
    way = Way(gate, releases, upstream, contracts, released)
    streamed = Streamed(settings, way)
    app.state.parts = Parts(gate, releases, upstream, telemetry, contracts, loading, streamed)

    def draining() -> bool:
        return bool(app.state.draining)

    app.include_router(predict_router(settings, way))
    app.include_router(events_router(settings, way, streamed))
    app.include_router(embeddings_router(settings, way))
    app.include_router(rerank_router(settings, way))
    app.include_router(protocol_router(upstream, gate, settings.timeout_s, draining))
    app.include_router(health_router(upstream, telemetry, draining, gate.keys))
    app.include_router(rollouts_router(releases))
    app.include_router(feedback_router(feedback, memory))
    app.include_router(admin_router(settings, upstream, gate, loading))
    add_docs(app, gate, upstream)
    add_page(app, upstream, history, residency)
    # The last one added stands outermost.
    app.add_middleware(GuardMiddleware, gate=gate)
    app.add_middleware(TelemetryMiddleware, telemetry=telemetry)
    app.infer = InferEndpoint(settings, gate, releases, contracts, released, telemetry)
    _answer_errors(app)
    return app


def _follow(residency: Residency, gate: Gate, releases: Releases, upstream: Upstream, memory: Memory) -> None:
    """Tell what holds models, and have told which come."""

    def came(model: str) -> None:
        gate.known(model)
        upstream.forget(model)

    residency.stays = lambda model: model in gate.incidents.outages or model in releases.needed()
    residency.held = lambda model: gate.holds(model) or model in releases.needed()
    residency.wanted = releases.needed
    releases.outgrown = residency.in_the_way
    residency.came = came
    residency.units.passing = lambda: memory.used
    upstream.resting = residency.resting
    for model in residency.pins:
        gate.known(model)


def _answer_errors(app: FastAPI) -> None:
    """Every error is JSON with an "error"."""

    @app.exception_handler(GatewayError)
    async def refused(request: Request, err: GatewayError) -> Response:
        return refusal(err, request.scope)

    def told(request: Request, err: GatewayError, headers: Mapping[str, str] | None = None) -> Response:
        answer = refusal(err, request.scope)
        answer.headers.update(headers or {})
        return answer

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, err: HTTPException) -> Response:
        what = "Not Found" if err.status_code == 404 else str(err.detail)
        why = f"there is no {request.method} {request.url.path} here"
        return told(request, GatewayError(what, why=why, mend="see /docs", status=err.status_code), err.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, err: RequestValidationError) -> Response:
        return told(request, GatewayError("the request does not fit the route", why=str(err), status=422))

    @app.exception_handler(Exception)
    async def bug(request: Request, err: Exception) -> Response:
        return told(request, GatewayError("the gateway failed", why=type(err).__name__))

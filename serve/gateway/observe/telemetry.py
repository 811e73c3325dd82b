"""Prometheus metrics of the gateway.

Requests are counted in plain numbers, which become metrics when the page is asked for: a counter of the Prometheus
client costs some microseconds each time.

A model's name becomes a label value only after Triton answered for it with 200, or where it is in the catalogue of
models on demand: names that clients make up all count as "unknown", so that nobody can fill the memory with them.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter as Count
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.gateway.errors import EndsError
from serve.gateway.observe.access_log import AccessLog
from serve.gateway.observe.buckets import BUCKETS_S
from serve.gateway.observe.tracing import Trace, Tracing

__all__ = ["GRPC_ROUTE", "INFERENCE_ROUTES", "INFER_ROUTE", "Observed", "Telemetry", "TelemetryMiddleware"]

INFER_ROUTE = "/v2/models/{model}/infer"
PREDICT_ROUTE, EMBEDDINGS_ROUTE, RERANK_ROUTE = "/predict/{model}", "/v1/embeddings", "/v1/rerank"
GRPC_ROUTE = "ModelInfer"
INFERENCE_ROUTES = frozenset((INFER_ROUTE, PREDICT_ROUTE, EMBEDDINGS_ROUTE, RERANK_ROUTE, GRPC_ROUTE))
MAX_MODELS = 1000


class _Durations:
    """A histogram: a count for each bucket and the one beyond them."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.seconds = 0.0


class Observed:
    """A request on its way.

    Attributes:
        key: the name of the client's key; "" while none was found.
        received, sent: bytes of the bodies.
        started: when it came, on the monotonic clock.
        tokens: that its texts came to.
        trace: None unless it is sampled.
    """

    __slots__ = ("client", "key", "model", "received", "route", "sent", "started", "tokens", "trace")

    def __init__(self, route: str, model: str | None, client: str, trace: Trace | None) -> None:
        self.route = route
        self.model = model
        self.client = client
        self.trace = trace
        self.key = ""
        self.received = self.sent = self.tokens = 0
        self.started = time.monotonic()


class Telemetry:
    """One gateway's metrics, in a registry of their own.

    Args:
        access: where each request is noted; None for nowhere.
        tracing: where traces go; None for nowhere.

    Attributes:
        in_flight: requests that are being answered.
        catalogued: whether a name is one of the models that may be loaded: it counts by its name before it ever was.
    """

    def __init__(self, access: AccessLog | None = None, tracing: Tracing | None = None) -> None:
        self.access = access
        self.tracing = tracing
        self.registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads
        self.upstream_errors = Counter(
            "gateway_upstream_errors", "Requests to Triton with no whole answer.", ("kind",), registry=self.registry
        )
        self.retries = Counter("gateway_upstream_retries", "Requests asked of another Triton.", registry=self.registry)
        self.ejections = Counter(
            "gateway_upstream_ejections",
            "Ejections of a Triton, for a model or (model empty) as a whole.",
            ("upstream", "model", "type"),
            registry=self.registry,
        )
        self.in_flight = 0
        self.requests: Count[tuple[str, str, int]] = Count()
        self.by_key: Count[tuple[str, int]] = Count()
        self.tokens: Count[str] = Count()
        self.tokens_by_key: Count[str] = Count()
        self.durations: dict[str, _Durations] = {}
        self.catalogued: Callable[[str], bool] = lambda _: False
        self._models: set[str] = set()
        self.registry.register(_Requests(self))

    def observe(self, request: Observed, code: int) -> None:
        """Count one answered request, and note it where that is wanted.

        Args:
            request: what is known of it.
            code: the HTTP status; 499 for a client that left.
        """
        self.in_flight -= 1
        seconds = time.monotonic() - request.started
        model, route, key = request.model, request.route, request.key
        label = model if model in self._models else self._label(model, code)
        self.requests[label, route, code] += 1
        if key:
            self.by_key[key, code] += 1
        if request.tokens:
            self.tokens[label] += request.tokens
            self.tokens_by_key[key] += request.tokens
        if route in INFERENCE_ROUTES:
            durations = self.durations.get(label)
            if durations is None:
                durations = self.durations[label] = _Durations()
            durations.counts[bisect_left(BUCKETS_S, seconds)] += 1
            durations.seconds += seconds
        if self.access is not None:
            self.access.add(
                route=route, model=model, key=key, status=code, ms=round(1000 * seconds, 3), client=request.client,
                bytes_in=request.received, bytes_out=request.sent,
                trace=f"{request.trace.trace_id:032x}" if request.trace else None,
            )  # fmt: skip
        if request.trace is not None and self.tracing is not None:
            attributes = {"http.route": route, "serve.model": model or "", "serve.key": key}
            self.tracing.end(request.trace, f"{route} {model or ''}".strip(), code, attributes)

    def begin(self, route: str, model: str | None, client: str, parent: bytes | None = None) -> Observed:
        """A request has come; `observe` must be told how it ends.

        Args:
            route: its template, never the path.
            model: the name that the client gave, None on routes without one.
            client: its address.
            parent: its `traceparent`.
        """
        trace = self.tracing.begin(parent) if self.tracing is not None else None
        self.began()
        return Observed(route, model, client, trace)

    def began(self) -> None:
        """As `begin`, of a request whose `Observed` somebody else has made."""
        self.in_flight += 1

    def follow(self, *parts: Collector) -> None:
        """Show these with the metrics: what a part of the gateway tells of its state."""
        for part in parts:
            self.registry.register(part)

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _label(self, model: str | None, code: int) -> str:
        if model is None:
            return ""
        if (code == 200 or self.catalogued(model)) and len(self._models) < MAX_MODELS:
            self._models.add(model)
            return model
        return "unknown"


class _Requests(Collector):
    """What was counted."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry

    def collect(self) -> Iterator[Metric]:
        telemetry = self._telemetry
        yield GaugeMetricFamily("gateway_requests_in_flight", "Requests being answered.", telemetry.in_flight)
        dropped = 0 if telemetry.access is None else telemetry.access.dropped
        told = "Lines of the access log that could not be written."
        yield CounterMetricFamily("gateway_access_log_dropped", told, dropped)
        requests = CounterMetricFamily("gateway_requests", "Requests answered.", labels=["model", "route", "code"])
        for (model, route, code), count in list(telemetry.requests.items()):
            requests.add_metric([model, route, str(code)], count)
        yield requests
        by_key = CounterMetricFamily("gateway_key_requests", "Requests by key.", labels=["key", "code"])
        for (key, code), count in list(telemetry.by_key.items()):
            by_key.add_metric([key, str(code)], count)
        yield by_key
        tokens = CounterMetricFamily("gateway_model_tokens", "Tokens of texts that the model read.", labels=["model"])
        for model, count in list(telemetry.tokens.items()):
            tokens.add_metric([model], count)
        yield tokens
        of_key = CounterMetricFamily("gateway_key_tokens", "Tokens of texts by key.", labels=["key"])
        for key, count in list(telemetry.tokens_by_key.items()):
            of_key.add_metric([key], count)
        yield of_key
        histogram = HistogramMetricFamily(
            "gateway_request_duration_seconds",
            "From the request's head to the last byte of its answer, inference only.",
            labels=["model"],
        )
        bounds = [*map(str, BUCKETS_S), "+Inf"]
        for model, durations in list(telemetry.durations.items()):
            buckets = list(zip(bounds, map(float, accumulate(durations.counts)), strict=True))
            histogram.add_metric([model], buckets, durations.seconds)
        yield histogram


class TelemetryMiddleware:
    """Counts what the routes answer; inference counts for itself, in front of this."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self.app = app
        self.telemetry = telemetry

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        code = 500
        client = scope.get("client") or ("",)
        observed = self.telemetry.begin("other", None, client[0])

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            observed.sent += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, counted)
        except asyncio.CancelledError:
            code = EndsError.status if code == 500 else code
            raise
        finally:
            observed.route = getattr(scope.get("route"), "path", "other")
            state = scope.get("state", {})
            observed.model = scope.get("path_params", {}).get("model") or state.get("model")  # or in its body
            observed.tokens = state.get("tokens", 0)
            observed.received = state.get("received", 0)
            identity = state.get("identity")
            observed.key = identity.name if identity is not None else ""
            self.telemetry.observe(observed, code)

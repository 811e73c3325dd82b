"""Prometheus metrics of the gateway.

A model's name becomes a label value only after Triton answered for it with 200: names that clients make up all
count as "unknown", so that nobody can fill the memory with them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.gateway.admission import Admission
from serve.gateway.balancer import Balancer, Node
from serve.gateway.gate import Gate

__all__ = ["INFER_ROUTE", "Telemetry", "TelemetryMiddleware"]

INFER_ROUTE = "/v2/models/{model}/infer"
PREDICT_ROUTE = "/predict/{model}"
MAX_MODELS = 1000
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Telemetry:
    """One gateway's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, which nobody reads
        self.requests = Counter(
            "gateway_requests", "Requests answered.", ("model", "route", "code"), registry=self.registry
        )
        self.duration = Histogram(
            "gateway_request_duration_seconds",
            "From the request's head to the last byte of its answer, inference only.",
            ("model",),
            buckets=BUCKETS_S,
            registry=self.registry,
        )
        self.in_flight = Gauge("gateway_requests_in_flight", "Requests being answered.", registry=self.registry)
        self.upstream_errors = Counter(
            "gateway_upstream_errors", "Requests to Triton with no whole answer.", ("kind",), registry=self.registry
        )
        self.retries = Counter("gateway_upstream_retries", "Requests asked of another Triton.", registry=self.registry)
        self.by_key = Counter("gateway_key_requests", "Requests by key.", ("key", "code"), registry=self.registry)
        self._models: set[str] = set()

    def observe(self, model: str | None, route: str, code: int, seconds: float, key: str = "") -> None:
        """Count one answered request.

        Args:
            model: the name that the client gave, None on routes without one.
            route: the route's template, never the path.
            code: the HTTP status; 499 for a client that left.
            seconds: its duration; kept for inference routes.
            key: the name of the client's key; "" where none was found.
        """
        label = self._label(model, code)
        self.requests.labels(label, route, str(code)).inc()
        if key:
            self.by_key.labels(key, str(code)).inc()
        if route in (INFER_ROUTE, PREDICT_ROUTE):
            self.duration.labels(label).observe(seconds)

    def follow(self, gate: Gate, balancer: Balancer) -> None:
        """Show the state of these two with the metrics."""
        self.registry.register(_State(gate, balancer))

    def page(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _label(self, model: str | None, code: int) -> str:
        if model is None:
            return ""
        if model in self._models:
            return model
        if code == 200 and len(self._models) < MAX_MODELS:
            self._models.add(model)
            return model
        return "unknown"


class _State(Collector):
    """Read when the page is asked for, so that it costs nothing otherwise."""

    def __init__(self, gate: Gate, balancer: Balancer) -> None:
        self._gate = gate
        self._balancer = balancer

    def collect(self) -> Iterator[Metric]:
        by_model: dict[str, tuple[str, Callable[[Admission], float]]] = {
            "gateway_model_in_flight": ("Requests of the model with Triton.", lambda places: places.in_flight),
            "gateway_model_limit": ("Most of them at a time, now.", lambda places: int(places.limit)),
            "gateway_model_waiting": ("Requests of the model that wait for their turn.", lambda places: places.waiting),
        }
        for name, (told, read) in by_model.items():
            gauge = GaugeMetricFamily(name, told, labels=["model"])
            for places in self._gate:
                gauge.add_metric([places.model], read(places))
            yield gauge
        shed = CounterMetricFamily("gateway_model_shed", "Requests refused because of the load.", labels=["model"])
        for places in self._gate:
            shed.add_metric([places.model], places.shed)
        yield shed
        nodes: dict[str, tuple[str, Callable[[Node], float]]] = {
            "gateway_upstream_up": (
                "Whether this Triton is asked.",
                lambda node: node.ready and not node.ejected_until,
            ),
            "gateway_upstream_in_flight": ("Requests with this Triton.", lambda node: node.in_flight),
        }
        for name, (told, look) in nodes.items():
            gauge = GaugeMetricFamily(name, told, labels=["upstream"])
            for node in self._balancer.nodes:
                gauge.add_metric([str(node.address)], look(node))
            yield gauge


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

        async def counted(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
            await send(message)

        started = time.perf_counter()
        self.telemetry.in_flight.inc()
        try:
            await self.app(scope, receive, counted)
        finally:
            self.telemetry.in_flight.dec()
            route = getattr(scope.get("route"), "path", "other")
            model = scope.get("path_params", {}).get("model")
            identity = scope.get("state", {}).get("identity")
            key = identity.name if identity is not None else ""
            self.telemetry.observe(model, route, code, time.perf_counter() - started, key)

"""Metrics of the places that models have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.access.admission import Admission
from serve.gateway.access.gate import Gate

__all__ = ["PlacesCollector"]


class PlacesCollector(Collector):
    """The places of a gate's models as they are."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def collect(self) -> Iterator[Metric]:
        by_model: dict[str, tuple[str, Callable[[Admission], float]]] = {
            "gateway_model_in_flight": ("Requests of the model with Triton.", lambda places: places.in_flight),
            "gateway_model_limit": ("Most of them at a time, now.", lambda places: int(places.limit)),
            "gateway_model_waiting": ("Requests of the model that wait for their turn.", lambda places: places.waiting),
        }
        for name, (told, read) in by_model.items():
            gauge = GaugeMetricFamily(name, told, labels=["model"])
            for places in self._gate:
                gauge.add_metric([places.model], sum(map(read, places.kinds)))
            yield gauge
        left = GaugeMetricFamily(
            "gateway_model_left", "Messages of streams that the model is at work on, and their clients have left.",
            labels=["model"],
        )  # fmt: skip
        for places, count in self._gate.left_streams:
            left.add_metric([places.model], count)
        yield left
        stuck = CounterMetricFamily(
            "gateway_model_stuck", "Such messages that did not end within left_timeout_s.", labels=["model"]
        )
        for places, count in self._gate.left_streams.stuck.items():
            stuck.add_metric([places.model], count)
        yield stuck
        shed = CounterMetricFamily("gateway_model_shed", "Requests refused because of the load.", labels=["model"])
        for places in self._gate:
            shed.add_metric([places.model], sum(each.shed for each in places.kinds))
        yield shed

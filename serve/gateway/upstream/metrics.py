"""Metrics of the model servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.upstream.balancer import Balancer
from serve.gateway.upstream.node import Node

__all__ = ["ServersCollector"]


class ServersCollector(Collector):
    """The model servers of a balancer as they are."""

    def __init__(self, balancer: Balancer) -> None:
        self._balancer = balancer

    def collect(self) -> Iterator[Metric]:
        ejected = self._balancer.ejected()
        nodes: dict[str, tuple[str, Callable[[Node], float]]] = {
            "gateway_upstream_up": (
                "Whether this Triton is asked.",
                lambda node: node.ready and (node, "") not in ejected,
            ),
            "gateway_upstream_in_flight": ("Requests with this Triton.", lambda node: node.in_flight),
        }
        for name, (told, look) in nodes.items():
            gauge = GaugeMetricFamily(name, told, labels=["upstream"])
            for node in self._balancer.nodes:
                gauge.add_metric([str(node.address)], look(node))
            yield gauge
        gauge = GaugeMetricFamily(
            "gateway_upstream_ejected",
            "Ejections that last, of a Triton for a model or (model empty) as a whole, for all keys or some.",
            labels=["upstream", "model"],
        )
        for node, model in ejected:
            gauge.add_metric([str(node.address), model], 1)
        yield gauge

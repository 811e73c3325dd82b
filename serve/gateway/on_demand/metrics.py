"""Metrics of models that are loaded on demand."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.on_demand.residency import Residency

__all__ = ["ResidencyCollector"]

COUNTED = {
    "gateway_model_cold_requests": ("waited", "Requests that waited for the model to be loaded."),
    "gateway_model_loads": ("loaded", "Loads of the model, because it was asked for."),
    "gateway_model_load_failures": ("failed", "Such loads that failed."),
    "gateway_model_drains_called_off": ("spared", "How often it was about to make way while in use, and stayed."),
}


class ResidencyCollector(Collector):
    """The models of a gateway as they are; nothing of them where all are loaded for good."""

    def __init__(self, residency: Residency | None) -> None:
        self._residency = residency

    def collect(self) -> Iterator[Metric]:
        told = self._residency
        waiting = GaugeMetricFamily(
            "gateway_requests_waiting_for_models", "Requests that wait for a model to be loaded."
        )
        waiting.add_metric([], 0 if told is None else told.loads.waiting.total())
        yield waiting
        left = GaugeMetricFamily(
            "gateway_model_loads_left_behind", "Loads that were given up, and that Triton has not ended."
        )
        left.add_metric([], 0 if told is None else len(told.units.behind))
        yield left
        budget = GaugeMetricFamily("gateway_models_memory_limit_bytes", "What Triton and its models may have resident.")
        used = GaugeMetricFamily("gateway_models_memory_bytes", "What they have, as it was seen last.")
        each = GaugeMetricFamily("gateway_model_memory_bytes", "What the model's processes have.", labels=["model"])
        loaded = GaugeMetricFamily("gateway_model_loaded", "Whether the model is loaded.", labels=["model"])
        if told is not None:
            budget.add_metric([], told.budget)
            used.add_metric([], told.units.used.total)
            for model, size in sorted(told.units.used.by_model.items()):
                each.add_metric([model], size)
            for model in sorted(told.known):
                loaded.add_metric([model], told.state(model) == "READY")
        yield from (budget, used, each, loaded)
        for name, (kind, text) in COUNTED.items():
            counter = CounterMetricFamily(name, text, labels=["model"])
            if told is not None:
                for (what, model), count in sorted(told.counts.items()):
                    if what == kind:
                        counter.add_metric([model], count)
            yield counter
        evicted = CounterMetricFamily(
            "gateway_model_evictions",
            "How often the model has made way: idle (nobody had used it lately), share (its keys had more than the one "
            "that asked), own (its key asked for another), turn (a key with less had its turn), drained (the same, "
            "while it was in use), memory (it was over the limit).",
            labels=["model", "reason"],
        )
        if told is not None:
            for (model, why), count in sorted(told.went.items()):
                evicted.add_metric([model, why], count)
        yield evicted

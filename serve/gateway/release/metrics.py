"""Metrics of models under release."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.release.releases import Releases

__all__ = ["ReleasesCollector"]


class ReleasesCollector(Collector):
    """Releases as they are: who answers, how often, and what is known by now."""

    def __init__(self, releases: Releases) -> None:
        self._releases = releases

    def collect(self) -> Iterator[Metric]:
        weight = GaugeMetricFamily(
            "gateway_rollout_weight", "The candidate's share of the requests, 0 to 1.", labels=["model"]
        )
        running = GaugeMetricFamily("gateway_rollout_running", "Whether the rollout is being judged.", labels=["model"])
        step = GaugeMetricFamily("gateway_rollout_step", "Index of the rollout's step.", labels=["model"])
        asked = CounterMetricFamily(
            "gateway_rollout_requests", "Requests by who answered, and how.", labels=["model", "variant", "outcome"]
        )
        saved = CounterMetricFamily(
            "gateway_rollout_fallbacks",
            "Requests that the baseline answered for the candidate.",
            labels=["model"],
        )
        dropped = CounterMetricFamily(
            "gateway_rollout_copies_dropped", "Copies not made for want of a free place.", labels=["model"]
        )
        progress = GaugeMetricFamily(
            "gateway_rollout_evidence",
            "Logarithm of the evidence, by question, 1 where it decides: that the candidate is fine, or worse.",
            labels=["model", "question", "of"],
        )
        value = GaugeMetricFamily(
            "gateway_rollout_observed",
            "What was seen in this step.",
            labels=["model", "question", "of"],
        )
        for release in self._releases:
            model = release.model
            weight.add_metric([model], release.weight)
            running.add_metric([model], release.running)
            saved.add_metric([model], release.fallbacks)
            dropped.add_metric([model], release.dropped)
            for (variant, grade), count in list(release.asked.items()):
                asked.add_metric([model, variant, grade.value], count)
            if release.course is None:
                continue
            step.add_metric([model], release.course.step)
            for question, seen in release.course.analysis.evidence().items():
                progress.add_metric([model, question, "fine"], seen["proof"])
                progress.add_metric([model, question, "worse"], seen["alarm"])
                for who in ("candidate", "baseline"):
                    if seen[who] is not None:
                        value.add_metric([model, question, who], seen[who])
        yield from (weight, running, step, asked, saved, dropped, progress, value)

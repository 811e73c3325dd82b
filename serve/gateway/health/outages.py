"""Models that can't answer for now, and why: known to whoever runs Triton, told to clients at once."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.gateway.errors import OverloadedError

__all__ = ["DEAD_STUB", "ModelDownError", "Outages"]

RETRY_S = 1.0
FRESH_S = 10.0
# Triton's sentence over both protocols; its group is the instance.
DEAD_STUB = rb"Stub process '([\w.+:@=~-]{1,300})' is not healthy\."


class ModelDownError(OverloadedError):
    """The model has no process that could answer; it is being loaded again.

    Args:
        sent: whether that came of the request.
    """

    def __init__(self, model: str, why: str, *, sent: bool = False) -> None:
        mend = "try again when Retry-After says; the other models are not concerned"
        super().__init__(f"the model {model!r} is down for a moment", why=why, mend=mend, retry_after_s=RETRY_S)
        self.sent = sent


class Outages(Collector):
    """The models that are down; empty where nobody tells.

    Attributes:
        deaths: processes that were lost, by model; "" for the whole model server.
        seen: is called with the name of an instance that Triton calls unhealthy, the time on the monotonic clock when
            the request began that was told so, and the model that it asked; whoever runs Triton looks after it.
    """

    def __init__(self) -> None:
        self.deaths: Counter[str] = Counter()
        self.seen: Callable[[str, float, str], None] = lambda _instance, _began, _model: None
        self._down: dict[str, dict[str, str]] = {}
        self._since: dict[str, float] = {}

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Each model that is down, and why."""
        for model, causes in self._down.items():
            yield model, "; ".join(causes.values())

    def __contains__(self, model: object) -> bool:
        return model in self._down

    def begin(self, cause: str, models: Iterable[str], why: str) -> None:
        """These models are down from now on, because of the model `cause`."""
        for model in models:
            self._down.setdefault(model, {})[cause] = why
            self._since.setdefault(model, time.monotonic())

    def end(self, cause: str) -> None:
        """The model `cause` is sound again."""
        for model, causes in list(self._down.items()):
            causes.pop(cause, None)
            if not causes:
                del self._down[model], self._since[model]

    def clear(self) -> None:
        """All are sound: the whole model server was started anew."""
        self._down.clear()
        self._since.clear()

    def check(self, model: str) -> None:
        """Raises ModelDownError where the model is down."""
        if self._down and model in self._down:
            raise ModelDownError(model, "; ".join(self._down[model].values()))

    def fresh(self, model: str) -> bool:
        """Whether the model is down for so short a time that it may only have to be loaded again."""
        since = self._since.get(model)
        return since is not None and time.monotonic() - since < FRESH_S

    def collect(self) -> Iterator[Metric]:
        """Prometheus metrics."""
        down = GaugeMetricFamily(
            "gateway_model_down_seconds", "For how long the model has been down.", labels=["model"]
        )
        for model, since in list(self._since.items()):
            down.add_metric([model], time.monotonic() - since)
        yield down
        deaths = CounterMetricFamily(
            "gateway_model_deaths", "Processes of the model that were lost; of Triton itself without a name.",
            labels=["model"],
        )  # fmt: skip
        for model, count in list(self.deaths.items()):
            deaths.add_metric([model], count)
        yield deaths

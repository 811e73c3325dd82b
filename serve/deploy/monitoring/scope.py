"""Which series are one application's, and which of its models clients ask for."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["SERIES_LABELS", "Scope"]

SERIES_LABELS = ("namespace", "app_kubernetes_io_part_of")
"""What tells an application's series from others' in one Prometheus: where its pods are, and their label part-of."""
SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$]")


@dataclass(frozen=True)
class Scope:
    """What queries select.

    Attributes:
        labels: names and values that every series of the application has, and none of another; empty where a Prometheus
            watches one application alone.
        models: names of those that clients ask for, steps of ensembles left out; empty where that is not known.
    """

    labels: tuple[tuple[str, str], ...] = ()
    models: tuple[str, ...] = ()

    def of(self, series: str, *matchers: str) -> str:
        """The application's series of that name."""
        where = ",".join((*matchers, *(f"{name}={json.dumps(value)}" for name, value in self.labels)))
        return f"{series}{{{where}}}" if where else series

    def asked(self, series: str, *matchers: str) -> str:
        """The same, of models that clients ask for; of all models where those are not known.

        A step of an ensemble counts what the ensemble counts, once more.
        """
        names = "|".join(SPECIAL.sub(r"\\\g<0>", name) for name in self.models)
        return self.of(series, *((f"model=~{json.dumps(names, ensure_ascii=False)}",) if names else ()), *matchers)

    def sum_by(self, *labels: str) -> str:
        """`sum by (…)`, which keeps what tells the application from others."""
        return f"sum by ({', '.join((*labels, *(name for name, _ in self.labels)))})"

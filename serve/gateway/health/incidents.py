"""What went wrong with the model server's processes: shared by the gateway and by whoever runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from serve.gateway.health.outages import Outages
from serve.gateway.health.suspects import Suspects

__all__ = ["Incidents"]


@dataclass(frozen=True)
class Incidents:
    """Models that are down, and requests that may have done it.

    Attributes:
        control: HTTP headers that the Triton asks of whoever administers it.
    """

    outages: Outages = field(default_factory=Outages)
    suspects: Suspects = field(default_factory=Suspects)
    control: Mapping[str, str] = field(default_factory=dict)

"""What a service is held to, as the rules of Prometheus need it."""

from __future__ import annotations

from dataclasses import dataclass

from compress.errors import ServerError
from serve.gateway.observe.buckets import BUCKETS_S

__all__ = ["Objectives", "objectives_of"]

DEFAULT = "p99<250ms,errors<0.1%"
LEAST, WIDEST = 1e-6, 0.99  # budgets that can be watched


@dataclass(frozen=True)
class Objectives:
    """Two budgets, each a share of the requests that may miss.

    Attributes:
        slow_s: an answer that takes longer is slow; a bound of the gateway's histogram.
        slow_share: of the answers that may be slow.
        error_share: of the requests that may fail (5xx).
    """

    slow_s: float
    slow_share: float
    error_share: float


def objectives_of(text: str = DEFAULT) -> Objectives:
    """Read "p99<250ms,errors<0.1%", as `serve load --slo` takes it.

    Raises:
        ServerError: it has no percentile, or a latency that the gateway's histogram has no bound for.
    """
    from serve.load.slo import parse_objective

    terms = parse_objective(text).terms
    latencies = [term for term in terms if term.percent is not None]
    errors = [term.bound for term in terms if term.name == "errors"]
    if len(latencies) != 1 or not errors or not 0 < errors[0] < 1:
        raise ServerError(
            f"can't make rules of the objective {text!r}",
            why="they watch one percentile of the latency, and the share of errors",
            mend=f"write it as in {DEFAULT}",
        )
    (latency,) = latencies
    slow_s = latency.bound / 1000
    if slow_s not in BUCKETS_S:
        raise ServerError(
            f"can't watch a latency of {latency.bound:g} ms",
            why="the gateway counts answers by bounds, and this is none of them",
            mend="take one of " + ", ".join(f"{1000 * bound:g}ms" for bound in BUCKETS_S),
        )
    goal = Objectives(slow_s, round(1 - (latency.percent or 0) / 100, 6), errors[0])
    if not all(LEAST <= share <= WIDEST for share in (goal.slow_share, goal.error_share)):
        raise ServerError(
            f"can't make rules of the objective {text!r}",
            why=f"a budget is of {LEAST:.4%} to {WIDEST:.0%} of the requests: another is as good as none, or all",
            mend=f"write it as in {DEFAULT}",
        )
    return goal

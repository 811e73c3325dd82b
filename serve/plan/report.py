"""A plan as JSON, and in words."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np

from serve.plan.choose import Planned

__all__ = ["KIND", "advice", "outside_s", "to_dict", "verdict"]

KIND = "serve plan"
SCHEMA_VERSION = 1
POINTS = 600
BEYOND = 1.1


def verdict(planned: Planned) -> str:
    """A sentence."""
    chosen, course = planned.chosen, planned.course
    what = f"p{planned.percent:g} {chosen.slow_ms:.3g} ms, {100 * chosen.refused_share:.2g}% refused"
    if planned.kept:
        return (
            f"{planned.objective} is kept ({what}) with {course.replicas.min():.0f} to {course.replicas.max():.0f} "
            f"replicas, {chosen.replica_hours:,.4g} replica hours"
        )
    return f"{planned.objective} is not kept by any setting that was tried; the best: {what}"


def advice(planned: Planned) -> list[str]:
    """What to set, and what to know."""
    scaling, hosting = planned.chosen.scaling, planned.hosting
    share = scaling.target / planned.replica_rate
    within = f"{planned.replica_rate:,.4g} that keep the objective; it answers {planned.curve.peak:,.4g} at most"
    lines = [
        f"scale at {scaling.target:,.4g} requests/s a replica ({share:.0%} of the {within})",
        f"{scaling.least} to {scaling.most} replicas; scale down only after {scaling.down_window_s:g} s",
    ]
    number, hours = planned.fixed
    saved = 1 - planned.chosen.replica_hours / hours
    if saved > 0:
        lines.append(f"without an autoscaler the highest rate takes {number} replicas: this is {saved:.0%} less")
    else:
        lines.append(f"{number} replicas without an autoscaler take {hours:,.4g} replica hours: it saves nothing here")
    if (outside := outside_s(planned)) > 0:
        whole = planned.course.step_s * len(planned.course.rates)
        lines.append(f"taken by themselves, {outside:,.0f} s of the {whole:,.0f} do not keep it")
    if planned.course.refusals >= 1 or not planned.kept:
        lines.append(
            f"what is missed is missed while replicas start ({hosting.start_s:g} s): more replicas beforehand "
            "(--min-replicas), a smaller image, or models on the node already"
        )
    if planned.curve.simulated_peak > BEYOND * planned.curve.peak:
        lines.append(
            f"the simulation would answer {planned.curve.simulated_peak:,.4g} a second with larger batches than were "
            "measured: measure with more clients to count on them"
        )
    how = (
        "each request was simulated"
        if planned.course.exact
        else "too many requests to simulate each: one replica was simulated, the fleet is a fluid shared evenly by them"
    )
    return [*lines, how, *planned.service.warnings]


def outside_s(planned: Planned) -> float:
    """Seconds of the steps whose own percentile is over its bound, or that refuse more than may fail."""
    course = planned.course
    bounds = {term.name: term.bound for term in planned.objective.terms}
    slow = course.slow_ms > bounds.get(f"p{planned.percent:g}", np.inf)
    refusing = course.refused > bounds.get("errors", 1.0) * np.maximum(course.rates, 1e-9)
    return float((slow | refusing).sum() * course.step_s)


def to_dict(planned: Planned) -> dict[str, Any]:
    """JSON values by stable names."""
    course, curve = planned.course, planned.curve
    number, hours = planned.fixed
    every = max(len(course.rates) // POINTS, 1)
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "model": planned.service.model,
        "objective": str(planned.objective),
        "kept": planned.kept,
        "verdict": verdict(planned),
        "advice": advice(planned),
        "scaling": asdict(planned.chosen.scaling),
        "hosting": asdict(planned.hosting),
        "replica": {
            "peak": curve.peak,
            "rate_within_objective": planned.replica_rate,
            "rates": curve.rates.tolist(),
            "p50_ms": [curve.percentile_ms(rate, 50) for rate in curve.rates],
            "percent": planned.percent,
            "slow_ms": [curve.percentile_ms(rate, planned.percent) for rate in curve.rates],
        },
        "requests": course.requests,
        "refused_share": course.refused_share,
        "slow_ms": planned.chosen.slow_ms,
        "outside_s": outside_s(planned),
        "replica_hours": planned.chosen.replica_hours,
        "cost": planned.cost(planned.chosen.replica_hours),
        "fixed": {"replicas": number, "replica_hours": hours, "cost": planned.cost(hours)},
        "candidates": [asdict(each) for each in planned.candidates],
        "exact": course.exact,
        "step_s": course.step_s * every,
        "course": {
            "rates": course.rates[::every].tolist(),
            "replicas": course.replicas[::every].tolist(),
            "ready": course.ready[::every].tolist(),
            "slow_ms": course.slow_ms[::every].tolist(),
        },
    }  # fmt: skip

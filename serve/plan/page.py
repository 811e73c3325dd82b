"""A plan on one page that needs nothing else: verdict, plots, settings."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from serve.load.figures.result import LoadResult
from serve.load.report.page_style import STYLE
from serve.load.report.plot_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    RED,
    figure_of,
    legend_of,
    own_settings,
    plain_log,
    svg_of,
)
from serve.plan.choose import Planned
from serve.plan.report import advice, verdict

__all__ = ["page"]


@own_settings()
def page(planned: Planned, runs: Sequence[LoadResult]) -> str:
    """The page, as HTML.

    Args:
        planned: what was found.
        runs: the load test that it stands on.
    """
    title = html.escape(f"Plan: {planned.service.model}")
    figures = [
        ("Traffic, replicas, and what they give", _course_plot(planned)),
        ("One replica: latency against its rate, simulated and measured", _replica_plot(planned, runs)),
        ("Targets that were tried", _targets_plot(planned)),
    ]
    kind = "good" if planned.kept else "bad"
    course, chosen = planned.course, planned.chosen
    tiles = [
        ("replicas", f"{course.replicas.min():.0f} to {course.replicas.max():.0f}"),
        ("replica hours", f"{chosen.replica_hours:,.4g}"),
        ("cost", f"{planned.cost(chosen.replica_hours):,.2f}" if planned.hosting.hourly_cost else "not given"),
        (f"p{planned.percent:g}", f"{chosen.slow_ms:.3g} ms"),
        ("refused", f"{100 * chosen.refused_share:.2g}%"),
        ("requests", f"{course.requests:,.0f}"),
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>{title}</h1><p class="verdict"><span class="{kind}">{html.escape(verdict(planned))}</span></p>'
        f'<div class="tiles">{"".join(f"<div>{name}<b>{value}</b></div>" for name, value in tiles)}</div>'
        f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in advice(planned))}</ul>"
        + "".join(f"<figure><figcaption>{name}</figcaption>{svg}</figure>" for name, svg in figures)
        + "</body></html>\n"
    )


def _course_plot(planned: Planned) -> str:
    course = planned.course
    figure, (top, middle, bottom) = figure_of(7.2, rows=3)
    unit, name = next((one, word) for one, word in ((3600, "hours"), (60, "minutes"), (1, "seconds"))
                      if course.step_s * len(course.rates) >= 3 * one or one == 1)  # fmt: skip
    at = np.arange(len(course.rates)) * course.step_s / unit
    top.plot(at, course.rates, color=BLUE, label="requests/s")
    top.plot(at, course.ready * planned.replica_rate, color=GREEN, lw=1, label="what the ready replicas take")
    if course.refused.any():
        top.fill_between(at, course.refused, color=RED, alpha=0.5, label="refused")
    top.set_ylabel("requests/s")
    middle.step(at, course.replicas, where="post", color=INK, label="paid for")
    middle.step(at, course.ready, where="post", color=GREEN, lw=1, label="ready")
    middle.set_ylabel("replicas")
    shown = np.where(course.slow_ms > 0, course.slow_ms, np.nan)
    bottom.plot(at, shown, color=ORANGE, label=f"p{planned.percent:g} of each step")
    for term in planned.objective.terms:
        if term.percent == planned.percent:
            bottom.axhline(term.bound, color=RED, ls="--", lw=1, label=str(term))
    bottom.set_ylabel("ms")
    bottom.set_xlabel(name)
    for axes in (top, middle, bottom):
        axes.set_ylim(bottom=0)
        legend_of(axes, loc="upper right")
        axes.set_ylim(top=1.25 * axes.get_ylim()[1])
    return svg_of(figure)


def _replica_plot(planned: Planned, runs: Sequence[LoadResult]) -> str:
    curve = planned.curve
    figure, axes = figure_of(3.8)
    for percent, colour in ((50.0, GREY), (planned.percent, BLUE)):
        line = [curve.percentile_ms(rate, percent) for rate in curve.rates]
        axes.plot(curve.rates, line, color=colour, marker=".", label=f"p{percent:g}, simulated")
        points = [(run.rate, value) for run in runs if run.rate and (value := run.latency.at(f"p{percent:g}"))]
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, marker="x", label=f"p{percent:g}, measured")
    for term in planned.objective.terms:
        if term.percent == planned.percent:
            axes.axhline(term.bound, color=RED, ls="--", lw=1, label=str(term))
    axes.axvline(planned.replica_rate, color=GREEN, lw=1, label="within the objective")
    axes.axvline(planned.chosen.scaling.target, color=ORANGE, lw=1, label="target of the autoscaler")
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_xlabel("requests/s of one replica")
    axes.set_ylabel("ms")
    legend_of(axes, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return svg_of(figure)


def _targets_plot(planned: Planned) -> str:
    figure, axes = figure_of(3.4)
    money = bool(planned.hosting.hourly_cost)
    for kept, colour, word in ((True, GREEN, "kept"), (False, RED, "not kept")):
        mine = [each for each in planned.candidates if each.kept is kept]
        cost: list[Any] = [planned.cost(each.replica_hours) if money else each.replica_hours for each in mine]
        if mine:
            axes.scatter([each.scaling.target for each in mine], cost, color=colour, label=word)
    hours = planned.fixed[1]
    axes.axhline(planned.cost(hours) if money else hours, color=GREY, ls="--", lw=1, label="no autoscaler")
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("target, requests/s a replica")
    axes.set_ylabel("cost" if money else "replica hours")
    legend_of(axes)
    return svg_of(figure)

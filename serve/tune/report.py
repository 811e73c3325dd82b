"""What a search found, for people: plots and tables on one page that needs nothing else; and as JSON."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compress.vetting.replace import replace_file
from serve.load.report.page_style import STYLE as PAGE_STYLE
from serve.load.report.plot_style import INK, own_settings, svg_of
from serve.tune.final import Duel, Final
from serve.tune.run import Tuned
from serve.tune.trial import Point, Trial

__all__ = ["to_dict", "write_report"]

PRESENT, BEST, OTHER = "#d95f0e", "#2ca25f", "#3b8bc4"
STYLE = (
    PAGE_STYLE
    + """
.verdict b { color: var(--good); } .verdict b.missed { color: var(--bad); }
tr.best td { font-weight: 600; color: var(--good); }
"""
)


def to_dict(tuned: Tuned) -> dict[str, Any]:
    """The result as plain values; the names are those of the dataclasses."""
    return {
        "model": tuned.subject.name,
        "p99_ms_bound": tuned.bound_ms,
        "present": tuned.present.to_dict(),
        "best": tuned.best.candidate.to_dict() if tuned.best else None,
        "finals": [
            {"candidate": final.candidate.to_dict(), "per_s": final.per_s(), "p99_ms": final.p99_ms(),
             "concurrency": final.concurrency, "within": final.within(tuned.bound_ms),
             "rounds": [dataclasses.asdict(point) for point in final.points]}
            for final in tuned.finals
        ],
        "duel": _duel(tuned),
        "rungs": [[dataclasses.asdict(trial) for trial in rung] for rung in tuned.trials],
        "failures": [{"candidate": each.to_dict(), "why": why} for each, why in tuned.failures],
    }  # fmt: skip


def _duel(tuned: Tuned) -> dict[str, Any] | None:
    held = tuned.duel
    if held is None:
        return None
    return {
        "candidate": held.winner.candidate.to_dict(), "concurrency": held.winner.concurrency,
        "gain": held.gain if math.isfinite(held.gain) else None, "low": held.low,
        "high": held.high if math.isfinite(held.high) else None, "better": held.better,
        "rounds": [[dataclasses.asdict(point) for point in final.points] for final in (held.winner, held.present)],
    }  # fmt: skip


def verdict(tuned: Tuned) -> str:
    """One or two sentences."""
    bound = f"{tuned.bound_ms:g} ms"
    if tuned.best is None:
        least = min((final.p99_ms() or float("inf") for final in tuned.finals), default=float("inf"))
        return f"No configuration keeps p99 within {bound}; the nearest has {least:.3g} ms."
    held = tuned.duel
    if held is None or tuned.best.candidate == tuned.present:
        found = f"The present configuration is the best found within {bound}: {tuned.best.per_s():,.0f} answers/s."
        if held is None:
            return found
        return (
            f"{found} No gain beyond noise: {held.winner.candidate.label()} gave {_gain(held)} "
            f"with {held.winner.concurrency} in flight."
        )
    there = "" if held.present.within(tuned.bound_ms) else ", which does not keep the bound"
    return (
        f"Best within {bound}: {held.winner.candidate.label()}, {held.winner.per_s():,.0f} answers/s, "
        f"{_gain(held)} the present {held.present.per_s():,.0f}{there}; both with {held.winner.concurrency} in flight."
    )


def _gain(held: Duel) -> str:
    if not math.isfinite(held.high):
        return "too uneven a throughput to compare with"
    return f"{held.gain:.2f} times (95%: {held.low:.2f} to {held.high:.2f})"


def write_report(tuned: Tuned, folder: Path) -> Path:
    """Write NAME.html and NAME.json; the page's path.

    Raises:
        MissingExtraError: there is no matplotlib.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = tuned.subject.name
    replace_file(folder / f"{name}.json", json.dumps(to_dict(tuned), indent=1) + "\n")
    page = folder / f"{name}.html"
    replace_file(page, _page(tuned))
    return page


@own_settings(extra="tune")
def _page(tuned: Tuned) -> str:
    plots = [
        (f"Throughput against latency; the line is the bound of {tuned.bound_ms:g} ms", _scatter(tuned)),
        ("The final: medians, and each round as a dot", _bars(tuned)),
        ("More requests in flight: throughput and latency", _curves(tuned)),
    ]
    figures = "".join(
        f"<figure><figcaption>{html.escape(title)}</figcaption>{svg}</figure>" for title, svg in plots if svg
    )
    finals = [_final_row(final, tuned) for final in tuned.finals]
    trials = [
        (None, [trial.candidate.label(), str(number + 1), f"{trial.seconds:g} s", *_cells(trial.best(tuned.bound_ms))])
        for number, rung in enumerate(tuned.trials)
        for trial in sorted(rung, key=lambda trial: trial.score(tuned.bound_ms), reverse=True)
    ]
    count = sum(map(len, tuned.trials))
    failed = "".join(f"<li>{html.escape(f'{each.label()}: {why}')}</li>" for each, why in tuned.failures)
    missed = "" if tuned.best else ' class="missed"'
    title = html.escape(f"Tuning {tuned.subject.name}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head><body>'
        f'<h1>{title}</h1><p class="soft">{count} trials in {len(tuned.trials)} rungs of successive halving, then a '
        f"final in turns, then the winner against the present one again, all in closed loops on this machine; p99 "
        f"within {tuned.bound_ms:g} ms</p>"
        f'<p class="verdict"><b{missed}>{html.escape(verdict(tuned))}</b></p>{figures}'
        + _table(["final", "in flight", "answers/s", "p50 ms", "p99 ms", ""], finals)
        + "<h2>All trials</h2>"
        + _table(["configuration", "rung", "load", "in flight", "answers/s", "p50 ms", "p99 ms"], trials)
        + (f"<h2>Did not run</h2><ul>{failed}</ul>" if failed else "")
        + '<p class="soft">A dash: no load kept the bound, or there were too few answers for that percentile (ten must '
        "lie beyond it); a lower percentile then stands in for p99. The generator works on the same cores.</p>"
        "</body></html>\n"
    )


def _table(columns: Sequence[str], rows: Iterable[tuple[str | None, Sequence[str]]]) -> str:
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(
        f"<tr{f' class={kind}' if kind else ''}>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for kind, cells in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cells(point: Point | None) -> list[str]:
    if point is None:
        return ["–"] * 4
    return [str(point.concurrency), f"{point.per_s:,.0f}", _ms(point.p50_ms), _ms(point.p99_ms)]


def _final_row(final: Final, tuned: Tuned) -> tuple[str | None, list[str]]:
    best = tuned.best is not None and (final.candidate, final.concurrency) == (
        tuned.best.candidate, tuned.best.concurrency,
    )  # fmt: skip
    words = ["present"] if final.candidate == tuned.present else []
    words += ["best"] if best else [] if final.within(tuned.bound_ms) else ["too slow"]
    p50 = [point.p50_ms for point in final.points if point.p50_ms is not None]
    cells = [
        final.candidate.label(), str(final.concurrency), f"{final.per_s():,.0f}",
        _ms(sorted(p50)[len(p50) // 2] if p50 else None), _ms(final.p99_ms()), ", ".join(words),
    ]  # fmt: skip
    return ("best" if best else None, cells)


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _figure(height: float, columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots(1, columns)
    for each in axes if columns > 1 else [axes]:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _colour(trial: Trial | Final, tuned: Tuned) -> tuple[str, str, int]:
    """Colour, name for the legend, and order of drawing."""
    if tuned.best is not None and trial.candidate == tuned.best.candidate:
        return BEST, "best" if trial.candidate != tuned.present else "best, the present one", 3
    return (PRESENT, "present", 2) if trial.candidate == tuned.present else (OTHER, "others", 1)


def _scatter(tuned: Tuned) -> str:
    figure, axes = _figure(3.6)
    from matplotlib.ticker import LogLocator

    named: set[str] = set()
    for trial in (trial for rung in tuned.trials for trial in rung):
        colour, name, order = _colour(trial, tuned)
        xs = [(point.latency_ms, point.per_s) for point in trial.points if point.latency_ms is not None]
        if not xs:
            continue
        label = None if name in named else name
        named.add(name)
        axes.plot([x for x, _ in xs], [y for _, y in xs], "o", color=colour, ms=5 if order > 1 else 3.5,
                  alpha=0.95 if order > 1 else 0.45, zorder=order, label=label)  # fmt: skip
    axes.axvline(tuned.bound_ms, color=INK, lw=1, ls="--")
    axes.set(
        xscale="log" if named else "linear",
        xlabel="latency, p99 (or less), ms",
        ylabel="answers/s",
        ylim=(0, None),
    )
    if named:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.xaxis.set_minor_formatter("")
    if named:
        axes.legend(frameon=False, loc="upper left")
    return svg_of(figure)


def _bars(tuned: Tuned) -> str:
    figure, axes = _figure(0.5 * len(tuned.finals) + 0.9)
    for row, final in enumerate(tuned.finals):
        axes.barh(row, final.per_s(), color=_colour(final, tuned)[0], height=0.55)
        axes.plot([point.per_s for point in final.points], [row] * len(final.points), "o", color=INK, ms=3)
    labels = [f"{final.candidate.label().replace(', batch', f',{chr(10)}batch', 1)}; {final.concurrency} in flight"
              for final in tuned.finals]  # fmt: skip
    axes.set_yticks(range(len(tuned.finals)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("answers/s")
    return svg_of(figure)


def _curves(tuned: Tuned) -> str:
    figure, both = _figure(3.2, 2)
    ticks: set[int] = set()
    wanted = [tuned.present, *([tuned.best.candidate] if tuned.best else [])]
    for candidate in dict.fromkeys(wanted):
        trial = next(trial for rung in reversed(tuned.trials) for trial in rung if trial.candidate == candidate)
        colour, name, _ = _colour(trial, tuned)
        at = [point.concurrency for point in trial.points]
        ticks |= set(at)
        both[0].plot(at, [point.per_s for point in trial.points], "o-", color=colour, ms=4, label=name)
        known = [(point.concurrency, point.latency_ms) for point in trial.points if point.latency_ms is not None]
        both[1].plot([x for x, _ in known], [y for _, y in known], "o-", color=colour, ms=4, label=name)
    both[1].axhline(tuned.bound_ms, color=INK, lw=1, ls="--")
    for axes, title in zip(both, ("answers/s", "p99 (or less), ms"), strict=True):
        axes.set(xscale="log", xlabel="in flight", ylabel=title, ylim=(0, None))
        axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
        axes.minorticks_off()
    both[0].legend(frameon=False)
    return svg_of(figure)

"""Several reports as one, to be laid over each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve.load.report.report import LoadReport

__all__ = ["overlaid"]


def overlaid(reports: Sequence[tuple[str, LoadReport]]) -> LoadReport:
    """All runs in one; a run's model is its report's name.

    Args:
        reports: with a name each.
    """
    if len(reports) == 1:
        return reports[0][1]
    runs = tuple(replace(run, model=name) for name, report in reports for run in report.runs)
    broken = tuple(words for _, report in reports for words in report.broken)
    return LoadReport(
        runs,
        " and ".join(dict.fromkeys(report.title for _, report in reports)),
        objective=reports[0][1].objective,
        broken=broken,
        hourly_cost=reports[0][1].hourly_cost,
        machine=reports[0][1].machine,
        ended="; ".join(dict.fromkeys(report.ended for _, report in reports if report.ended)),
    )

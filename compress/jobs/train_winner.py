"""The winner of a search is trained, once all candidates are compared as they were repaired: a training takes minutes.

Which of them wins is then open still: how much a training brings back is not known before. So the best by the goal is
trained of those that have lost no more than that may be, and the next one where it turns out to be less.
"""

from __future__ import annotations

import dataclasses

from compress.evaluate.judge import Judge
from compress.evaluate.search_result import SearchResult
from compress.jobs.branch import Setting
from compress.jobs.branches import branches
from compress.jobs.candidate_runtime import Bench
from compress.jobs.on_ray import OnRay
from compress.jobs.on_runtimes import Clocks, as_timed
from compress.options import OptimizeOptions
from compress.options.asked import trains_last
from compress.pipeline import Watcher

__all__ = ["allowance_of", "with_training"]

MOST = 3  # trainings
# What one may bring back, at most: a share of what an answer that is always the same loses, which is known of each
# metric of the project's own, and, where it is not, so many times the largest drop.
REGAINED, TIMES = 0.25, 10.0


def allowance_of(options: OptimizeOptions, judge: Judge) -> float:
    """Points beyond the largest drop that a candidate may have lost to be worth a training; 0 where none waits."""
    if not trains_last(options):
        return 0.0
    return TIMES * options.max_drop if judge.constant is None else max(0.0, REGAINED * judge.constant)


def with_training(
    found: SearchResult, clocks: Clocks, setting: Setting, bench: Bench, watcher: Watcher, cluster: OnRay | None
) -> SearchResult:
    """A search's result with the trials of those that were trained, each behind itself as it was repaired.

    The best by the goal is trained, of those inside the largest drop and the allowance. Where that does not bring it
    inside the largest drop, the next best is, of those that had lost more, or that what it did bring would be enough
    for: three in all. What is judged by are the samples that choose.

    Args:
        found: no candidate is trained.
        clocks: what its candidates took on each runtime.
        setting: of the search.
        bench: that its candidates were held against.
        watcher: is told how it goes on.
        cluster: makes candidates; this machine does by default.
    """
    for _ in range(MOST):
        best = found.to_train
        if best is None:
            break
        candidate = dataclasses.replace(best.candidate, trained=True)
        # Whether two runtimes compute it alike is held against what it is made of, which makes no training more.
        alone = candidate.in_float32 or len(found.runtimes) < 2
        *others, made = branches(setting, [candidate] if alone else [candidate.floating, candidate], watcher, cluster)
        trial = as_timed(made, best, others[0] if others else None, clocks, bench)
        found = found.with_trained(best, trial)
        if found.inside(trial):
            break
    return found

"""The pruning ratios of a search, each with its candidates: one after the other, in processes, or on a cluster.

However they are made, what comes of them is the same: a ratio above one whose float model is out counts as not tried,
whether it was made meanwhile or not. What channels are chosen by is part of a ratio: one way says nothing of another.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from compress.console.wording import counted
from compress.evaluate.candidates import Candidate
from compress.evaluate.search_result import Trial
from compress.jobs.branch import Setting, Silent, lost, made, skipped
from compress.jobs.on_ray import OnRay
from compress.pipeline import Watcher
from compress.runtime.measure import cores
from compress.storage.steady import known, steady

__all__ = ["branches"]

Group = Sequence[Candidate]


def branches(setting: Setting, plan: Group, watcher: Watcher, cluster: OnRay | None = None) -> list[Trial]:
    """All trials, those of lightly pruned candidates first.

    Args:
        setting: of the search.
        plan: its candidates.
        watcher: is told of stages, or, where several ratios are made at the same time, of ratios.
        cluster: where they are made; on this machine by default.
    """
    ratios: dict[tuple[Any, ...], list[Candidate]] = {}
    for candidate in sorted(plan, key=lambda candidate: candidate.prune):
        ratios.setdefault((candidate.prune, candidate.ladder), []).append(candidate)
    found = _Found(list(ratios.values()))
    workers = min(setting.options.workers, len(found.groups))
    if cluster is None and workers == 1:
        for place, group in enumerate(found.groups):
            if place in found.wanted():
                found.add(place, made(setting, group, watcher))
        return found.trials()
    tick = watcher.started("candidates")
    total = len(found.groups)
    tick(0, total, "pruning ratios")
    coming = (
        _in_processes(setting, found, workers) if cluster is None else cluster.made(setting, found.groups, found.wanted)
    )
    for place, trials in coming:
        found.add(place, trials)
        last = counted(len(found.groups[place]), "candidates")
        tick(total - len(found.wanted()), total, f"pruning ratios, {last} in the last")
    return found.trials()


class _Found:
    """Trials by ratio, in whatever order they come."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups = groups
        self._by_place: dict[int, list[Trial]] = {}

    def add(self, place: int, trials: list[Trial]) -> None:
        self._by_place[place] = trials

    def wanted(self) -> frozenset[int]:
        """Places that are still to be made: none above one that is out."""
        return frozenset(
            place for place in range(len(self.groups)) if place not in self._by_place and self._out(place) is None
        )

    def trials(self) -> list[Trial]:
        found: list[Trial] = []
        for place, group in enumerate(self.groups):
            out = self._out(place)
            found += skipped(group, out) if out else self._by_place[place]
        return found

    def _out(self, place: int) -> Trial | None:
        """The float model of the lightest ratio on the way to this one that is out."""
        ladder = self.groups[place][0].ladder
        before = [at for at in sorted(self._by_place) if at < place and self.groups[at][0].ladder == ladder]
        return next(filter(None, (lost(self._by_place[at]) for at in before)), None)


def _in_processes(setting: Setting, found: _Found, workers: int) -> Iterator[tuple[int, list[Trial]]]:
    share = max(1, cores() // workers)
    places = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=places) as pool:
        waiting = {
            pool.submit(_alone, setting, group, place % workers, share, known()): place
            for place, group in enumerate(found.groups)
        }
        for future in concurrent.futures.as_completed(waiting):
            if future.cancelled() or waiting[future] not in found.wanted():
                continue
            yield waiting[future], future.result()
            for each, place in waiting.items():
                if place not in found.wanted():
                    each.cancel()


def _alone(setting: Setting, group: Group, place: int, share: int, read: Mapping[str, Any]) -> list[Trial]:
    """A ratio in a process of its own, on its own cores."""
    if hasattr(os, "sched_setaffinity"):
        mine = sorted(os.sched_getaffinity(0))[place * share : (place + 1) * share]
        os.sched_setaffinity(0, mine or os.sched_getaffinity(0))
    with steady(read):
        return made(setting, group, Silent())

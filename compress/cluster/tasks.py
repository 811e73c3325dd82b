"""Tasks of a run: given to the cluster all at once, answered in any order, and ended with the run, whatever ends it."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.cluster.connect import answers_at
from compress.cluster.gpus import see_gpus
from compress.cluster.leftovers import RAY, tidy
from compress.cluster.nodes import Needs, alive
from compress.errors import ResourceError, first_line
from compress.host.cores import SHARE
from compress.vetting.memory import bound_memory
from compress.vetting.scratch import scratch

__all__ = ["answers", "as_task", "settings_here"]

AGAIN = 3  # times that a task is begun again where its node dies; what fails by itself is not
SILENT = 20.0  # seconds that a head may not answer; after a minute Ray ends this process without a word
ENDS = 5.0  # seconds that a task may take to end by itself


def answers(
    ray: Any, work: Callable[..., Any], given: Sequence[tuple[Any, ...]], needs: Needs,
    wanted: Callable[[], Collection[int]],
) -> Generator[tuple[int, Any], None, None]:  # fmt: skip
    """What tasks give, by place, as they come; what is not wanted any more is cancelled.

    Args:
        ray: connected.
        work: importable on each node.
        given: its arguments, for each task.
        needs: of one task.
        wanted: places whose answers are still looked for.

    Raises:
        ResourceError: a task's nodes died each time.
        Exception: what `work` raises.
    """
    task = ray.remote(
        num_cpus=needs.cpus, num_gpus=needs.gpus, max_retries=AGAIN, retry_exceptions=False,
        scheduling_strategy="SPREAD",
    )(work)  # fmt: skip
    sent = {task.remote(*each): place for place, each in enumerate(given)}
    waiting = dict(sent)
    answered_at = time.monotonic()
    try:
        while waiting:
            done = _done(ray, list(waiting))
            if done or answers_at(ray.get_runtime_context().gcs_address):
                answered_at = time.monotonic()
            elif time.monotonic() - answered_at > SILENT:
                raise _gone("its head does not answer any more")
            for each in done:
                place = waiting.pop(each)
                if place in wanted():
                    yield place, _answer(ray, each)
            _cancel(ray, [each for each, place in waiting.items() if place not in wanted()], waiting)
    finally:
        _cancel(ray, list(waiting), waiting)
        _tidy(ray)


def _done(ray: Any, some: Sequence[Any]) -> list[Any]:
    try:
        done: list[Any] = ray.wait(some, num_returns=1, timeout=1.0)[0]
    except ray.exceptions.RayError as err:
        raise _gone(first_line(err)[:400]) from err
    return done


def _gone(why: str) -> ResourceError:
    mend = "start Ray anew, and give the same command again, which keeps what is done"
    return ResourceError("the Ray cluster is gone", why=why, mend=mend)


def _answer(ray: Any, each: Any) -> Any:
    gone = ray.exceptions
    try:
        return ray.get(each)
    except gone.RayTaskError:  # what the work itself raised
        raise
    except gone.RayError as err:
        why = first_line(err)
        if isinstance(err, gone.WorkerCrashedError | gone.NodeDiedError):
            why = f"the process or the node that it ran on died {AGAIN + 1} times, usually for want of memory: {why}"
        raise ResourceError(
            "a task on the cluster did not come to its end",
            why=why[:400],
            mend="give the same command again, which keeps what is done; fewer tasks for a node leave more memory for "
            "each (`ray start --num-cpus`)",
        ) from err


def _cancel(ray: Any, some: Sequence[Any], waiting: dict[Any, int]) -> None:
    """End tasks: asked first, so that they clear up behind them, then at once."""
    for each in some:
        waiting.pop(each)
    with contextlib.suppress(ray.exceptions.RayError):  # the cluster may be gone, and they with it
        for each in some:
            ray.cancel(each, force=False)
        if some:
            _, left = ray.wait(list(some), num_returns=len(some), timeout=ENDS)
            for each in left:
                ray.cancel(each, force=True)
            if left:
                ray.wait(left, num_returns=len(left), timeout=ENDS)


def _tidy(ray: Any) -> None:
    """On each node, remove what tasks have left that were killed; Ray tells nobody which they were."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with contextlib.suppress(ray.exceptions.RayError):
        if not answers_at(ray.get_runtime_context().gcs_address):
            return
        tidies = ray.remote(num_cpus=0, max_retries=0)(tidy)
        there = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in alive(ray)]
        sent = [tidies.options(scheduling_strategy=each).remote() for each in there]
        ray.wait(sent, num_returns=len(sent), timeout=ENDS)


def settings_here() -> dict[str, str]:
    """Variables of this project's, which hold for its tasks, too."""
    return {name: value for name, value in os.environ.items() if name.startswith("COMPRESS_")}


@contextmanager
def as_task(needs: Needs, settings: dict[str, str]) -> Iterator[Path]:
    """On a node, a folder to work in, within the cores and GPUs that the task was given and the memory that is left."""
    os.environ.update(settings | {SHARE: str(needs.cpus)})
    see_gpus(needs.gpus)
    _begin()
    with scratch(RAY) as folder:
        work = folder / "work"
        work.mkdir()
        yield work


@functools.cache
def _begin() -> None:
    """Once in a process, which may have one task after the other: what its memory is bounded by does not grow again."""
    bound_memory()
    tidy()

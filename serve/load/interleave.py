"""Two servers under the same load, in turns, so that what the machine does meanwhile happens to both."""

from __future__ import annotations

from collections.abc import Sequence

import uvloop

from compress.errors import ServerError
from serve.load.figures.compare import Comparison, compare_rounds
from serve.load.figures.result import LoadResult
from serve.load.options import LoadOptions
from serve.load.report.report import LoadReport, describe_machine
from serve.load.run import OnProgress, Session

__all__ = ["interleave"]


def interleave(
    sides: Sequence[LoadOptions], *, rounds: int, allowed: float, on_progress: OnProgress | None = None
) -> tuple[tuple[LoadReport, LoadReport], Comparison]:
    """Measure two targets in turns: A B, B A, A B, …; each round of both has arrivals of its own.

    Args:
        sides: the two; the second is the one that may not be worse.
        rounds: of each.
        allowed: how much worse is no regression, as a share.

    Raises:
        ServerError: a target can't be used, or it was interrupted before both had a round.
    """
    if rounds < 1:
        raise ServerError("can't take turns", why=f"rounds is {rounds}", mend="give --rounds 5 or more")

    async def main() -> tuple[list[LoadResult], list[LoadResult], str]:
        runs: tuple[list[LoadResult], list[LoadResult]] = ([], [])
        session = Session(sides[0], on_progress)
        await session.target(sides[1])  # before there are generators, which end if nothing is heard for long
        async with session:
            for number in range(rounds):
                for which in (0, 1) if number % 2 == 0 else (1, 0):
                    if session.stopped:
                        break
                    options = sides[which]
                    try:
                        runs[which].append(await session.run(options.with_(seed=options.seed + number)))
                    except ServerError:  # `ended` has its words, and no more is sent
                        if min(map(len, runs)) < 2:
                            raise
            whole = min(len(runs[0]), len(runs[1])) - (1 if session.stopped else 0)
            return runs[0][:whole], runs[1][:whole], session.ended

    before, after, ended = uvloop.run(main())
    if not before:
        why = ended or "it was stopped in the first round"
        raise ServerError("nothing was compared", why=why, mend="start it again")
    machine = describe_machine()
    reports = [
        LoadReport(tuple(runs), options.url, broken=((),) * len(runs), machine=machine, ended=ended)
        for options, runs in zip(sides, (before, after), strict=True)
    ]
    return (reports[0], reports[1]), compare_rounds(before, after, allowed=allowed)

"""What a first answer under release is evidence of: the grade that it has, and what that says of its model, as a table.

Both protocols grade by this, and a `Release` counts by `says`. A model's first answer counts alone, and alike for both:
by what its client could see in its own time, and by what the other model did with the same request in that time.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from serve.gateway.upstream.deadline import SHORT_OF, tells

__all__ = [
    "AWAIT_THE_OTHER",
    "BLAMED",
    "ROWS",
    "UNASKED",
    "Grade",
    "Other",
    "Row",
    "Says",
    "is_late",
    "of_copy",
    "says",
]


class Grade(Enum):
    """What an answer says of the model that gave it."""

    GOOD = "good"
    CLIENT = "client"
    """The request can't be answered, whoever is asked."""
    FAILED = "failed"
    GONE = "gone"
    """Triton does not serve what was asked for."""
    DOWN = "down"
    """It was not asked: its process has died a moment ago, of which the requests that were with it have told."""
    REFUSED = "refused"
    """The gateway had no room for it, or its key has as much there as it may: that says nothing of the model."""
    LATE = "late"
    """There is no time left to ask another."""
    CUT = "cut"
    """The client's own deadline came first, or it left: that says how long it waited, and nothing else of the model."""

    @classmethod
    def no_room(cls, *, candidate: bool) -> Grade:
        """Of what the gateway refused: the baseline is asked in a candidate's place, and nobody in the baseline's."""
        return cls.DOWN if candidate else cls.REFUSED

    @classmethod
    def timed_out(cls, given_s: float, timeout_s: float) -> Grade:
        """Of what was not answered in the seconds that it was given, less what it waited in line before.

        Args:
            given_s: from when it was sent until its client's time was over, or the gateway's.
            timeout_s: the gateway's own.
        """
        return cls.LATE if tells(given_s, timeout_s) else cls.CUT


class Other(Enum):
    """Why there is no answer of the other model's."""

    UNNEEDED = "it was not to be asked"
    SILENT = "the client left before it said anything, or it could not be asked"


BLAMED = (Grade.CLIENT, Grade.FAILED, Grade.GONE, Grade.DOWN)  # the other model is asked who is to blame
AWAIT_THE_OTHER = (Grade.FAILED, Grade.GONE, Grade.DOWN, Grade.REFUSED)  # the other, which is slow, may yet answer
UNASKED = frozenset((Grade.DOWN, Grade.REFUSED))  # it was not asked, or its answer found no room


class Says(Enum):
    """What a first answer says.

    Attributes:
        fails: whether it is a failure; None where it is not among the answers of which a share fails.
        timed: whether its time counts as an answer's.
        waited: whether the time does that its client waited in vain.
    """

    NOTHING = None, False, False
    ANSWERED = False, True, False
    ANSWERED_LATE = False, False, True
    RIGHT = False, False, False
    FAILED = True, False, False
    WAITED = None, False, True

    def __init__(self, fails: bool | None, timed: bool, waited: bool) -> None:
        self.fails = fails
        self.timed = timed
        self.waited = waited


Second = Grade | Other
ANY: tuple[Second, ...] = (*Grade, *Other)
SAID = (Grade.GOOD, Grade.CLIENT, Grade.FAILED, Grade.GONE)
UNSAID = tuple(each for each in ANY if each not in SAID)
IN_TIME, LATE, ALWAYS = (False,), (True,), (False, True)


@dataclass(frozen=True)
class Row:
    """What `firsts` say beside `seconds`, where the first came in its client's time or `lates`; and why that."""

    firsts: Collection[Grade]
    seconds: Collection[Second]
    lates: Collection[bool]
    says: Says
    why: str


G, C, F, X, D, R, L, U = Grade  # in their order: good, client, failed, gone, down, refused, late, cut
ROWS = (
    Row((G,), ANY, IN_TIME, Says.ANSWERED, "what its client gets"),
    Row((G,), ANY, LATE, Says.ANSWERED_LATE, "it fails nobody, and its client waited as one waits for the baseline"),
    Row((U,), ANY, ALWAYS, Says.WAITED, "nobody knows what would have come of it"),
    Row((D, R), ANY, IN_TIME, Says.NOTHING, "it was not asked, or there was no room for its answer"),
    Row((D, R), ANY, LATE, Says.WAITED, "there was no room for an answer that its client did not wait for"),
    Row((L,), ANY, IN_TIME, Says.FAILED, "it had the gateway's own time, and so had its client"),
    Row((F, X), (G, C, L, U, Other.UNNEEDED), IN_TIME, Says.FAILED, "the other does not fail the same request so"),
    Row((F,), (X,), IN_TIME, Says.FAILED, "the other is not served at all, which says nothing of the request"),
    Row((X,), (F,), IN_TIME, Says.FAILED, "it is not served, whatever the other makes of the request"),
    Row((F,), (F,), ALWAYS, Says.NOTHING, "both fail: it is the request, or what both stand on"),
    Row((X,), (X,), ALWAYS, Says.NOTHING, "neither is served"),
    Row((F, X), (D, R, Other.SILENT), IN_TIME, Says.NOTHING, "nobody could say whether the other fails it, too"),
    Row((C,), (G,), ALWAYS, Says.FAILED, "it blames a client whom the other answers"),
    Row((C,), (F,), ALWAYS, Says.RIGHT, "to say 400 of bad input is better than to fail at it"),
    Row((C,), (C, X), ALWAYS, Says.NOTHING, "it is the client's fault, or nobody says otherwise"),
    Row((C,), UNSAID, IN_TIME, Says.NOTHING, "nobody says whether it is the client's fault"),
    Row((F, X, L), (G, C), LATE, Says.FAILED, "the other answers it: who hangs where clients don't wait must not pass"),
    Row((F, L), (X,), LATE, Says.FAILED, "as above: the other is not served at all"),
    Row((X, L), (F,), LATE, Says.FAILED, "as above: the other fails otherwise"),
    Row((C, F, X, L), UNSAID, LATE, Says.WAITED, "neither answers in the client's time: so long it waited"),
)
_SAYS = {
    (first, second, late): row.says
    for row in ROWS
    for first in row.firsts
    for second in row.seconds
    for late in row.lates
}


def says(first: Grade, second: Second = Other.UNNEEDED, *, late: bool = False) -> Says:
    """What a first answer says of its model.

    Args:
        second: what the other model did with the same request in its client's time.
        late: whether the first came after that (see `is_late`).
    """
    return _SAYS[first, second, late]


def is_late(grade: Grade, seconds: float, left_s: float) -> bool:
    """Whether an answer that took so long came after its client's time; a time-out of the gateway's own is in that."""
    return seconds > left_s and not (grade is Grade.LATE and SHORT_OF * seconds <= left_s)


def of_copy(candidate: Grade, baseline: Grade) -> tuple[bool, bool] | None:
    """Whether each fails of two that were asked the same in any case; None where they are no pair.

    They are none where both blame the client, one was not asked, or its time was the client's own.
    """
    grades = candidate, baseline
    if {Grade.CUT, *UNASKED} & {*grades} or grades == (Grade.CLIENT, Grade.CLIENT):
        return None
    mine, theirs = (
        grade not in (Grade.GOOD, Grade.CLIENT) or (grade is Grade.CLIENT and other is Grade.GOOD)
        for grade, other in (grades, grades[::-1])
    )
    return mine, theirs

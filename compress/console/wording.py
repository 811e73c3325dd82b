"""How messages are put: a number agrees with its noun, and a note is no warning."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

__all__ = [
    "Assumed",
    "AssumedWarning",
    "Note",
    "as_notes",
    "assumed_of",
    "counted",
    "in_words",
    "notes_in",
    "with_error",
]

_SAID = "; torch says: "

_PLURAL = re.compile(r"\b[A-Za-z]+(?<![suiSUI])s\b")  # but class, status, axis
# "epochs" loses one letter; these lose two, or end in another.
_ENDINGS = (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("s", ""))
_ODD = {"processes": "process", "axes": "axis", "matrices": "matrix"}


class AssumedWarning(UserWarning):
    """Something was assumed of a user's file that the user should know."""


class Note(str):
    """Words that a reader may want to know, and that warn of nothing."""

    __slots__ = ()


class Assumed(Note):
    """What was assumed of a user's file, for a report; at the terminal, an AssumedWarning has said it before."""

    __slots__ = ()


def notes_in(words: Sequence[str]) -> list[int]:
    """The places of those that warn of nothing: text that is written loses its kind (`as_notes`)."""
    return [place for place, each in enumerate(words) if isinstance(each, Note)]


def as_notes(words: Sequence[str], places: Collection[int]) -> tuple[str, ...]:
    """Words that were written, those at some places as notes."""
    return tuple(Note(each) if place in places else each for place, each in enumerate(words))


def assumed_of(*words: str) -> tuple[Assumed, ...]:
    """Notes of what was assumed of each of some files; of "" there is none."""
    return tuple(map(Assumed, filter(None, words)))


def with_error(words: str, said: str) -> str:
    """A reason with what torch said of it, for a report's figures and for errors; `in_words` gives the words alone."""
    return f"{words}{_SAID}{said}"


def in_words(reason: str) -> str:
    """A reason without what torch said, for a page."""
    return reason.partition(_SAID)[0]


def counted(number: float, things: str) -> str:
    """A number with what it counts: 1 epoch, 2 epochs, 0.5 points, 1,000 models loaded alone.

    Args:
        number: 0 or more.
        things: in the plural; of several words, the first that ends like a plural is the one that is counted.
    """
    figure = f"{number:,}" if isinstance(number, int) else f"{number:g}"
    return f"{figure} {_PLURAL.sub(_singular, things, count=1) if number == 1 else things}"


def _singular(found: re.Match[str]) -> str:
    word = found.group()
    if word in _ODD:
        return _ODD[word]
    ending, instead = next(pair for pair in _ENDINGS if word.endswith(pair[0]))
    return word.removesuffix(ending) + instead

"""A list of texts in parts of like length: a network takes each text of a part for as long as the longest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LONGEST", "Part", "parts_of"]

LONGEST = 4096  # bytes that tell texts apart: hardly any model of embeddings reads more of one
ALIKE = 256  # bytes that are not worth a part of its own


class Part(NamedTuple):
    """Some of a request's texts.

    Attributes:
        places: of each in the request.
        cost: bytes, each taken for as long as the longest, as far as the model may read.
    """

    places: tuple[int, ...]
    cost: int


def parts_of(sizes: Sequence[int], most: int, budget: int) -> list[Part]:
    """The texts in parts: the longest first, as what is refused for its length is among them.

    Bytes stand for tokens, which only the model's tokenizer knows.

    Args:
        sizes: of the texts, in bytes of UTF-8.
        most: texts of a part.
        budget: bytes of a part, each text taken for as long as the part's longest; a text alone may have more.
    """
    sizes = [min(size, LONGEST) for size in sizes]
    parts: list[list[int]] = []
    longest = 0
    for at in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):
        size = sizes[at]
        fits = bool(parts) and len(parts[-1]) < most and (len(parts[-1]) + 1) * longest <= budget
        if fits and (2 * size > longest or longest - size <= ALIKE):
            parts[-1].append(at)
        else:
            parts.append([at])
            longest = size
    return [Part(tuple(part), len(part) * sizes[part[0]]) for part in parts]

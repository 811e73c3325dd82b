"""A list of texts in parts of like length: a network takes each text of a part for as long as the longest."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LONGEST", "by_length"]

LONGEST = 4096  # bytes that tell texts apart: hardly any model of embeddings reads more of one
ALIKE = 256  # bytes that are not worth a part of its own


def by_length(texts: Sequence[bytes], most: int, budget: int) -> list[list[int]]:
    """Places of the texts in the list, by part: the longest first, as what is refused for its length is among them.

    Bytes stand for tokens, which only the model's tokenizer knows.

    Args:
        texts: in UTF-8.
        most: texts of a part.
        budget: bytes of a part, each text taken for as long as the part's longest; a text alone may have more.
    """
    sizes = [min(len(text), LONGEST) for text in texts]
    parts: list[list[int]] = []
    longest = 0
    for at in sorted(range(len(texts)), key=sizes.__getitem__, reverse=True):
        size = sizes[at]
        fits = bool(parts) and len(parts[-1]) < most and (len(parts[-1]) + 1) * longest <= budget
        if fits and (2 * size > longest or longest - size <= ALIKE):
            parts[-1].append(at)
        else:
            parts.append([at])
            longest = size
    return parts

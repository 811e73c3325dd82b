"""What a JSON costs to read, told from its bytes before it is parsed.

The length does not tell: 60 KB of one text are read in 50 µs, as many bytes of empty lists in 30 ms. What is dear is
each list, object, text and number of its own; their marks are counted, in C.
"""

from __future__ import annotations

__all__ = ["CHEAP_BYTES", "LONG_JSON", "is_dear", "micros"]

# JSON of this size is dear whatever it holds: it is copied, and written anew.
LONG_JSON = 64 * 1024
# JSON of this size is not, whatever it holds: it is not looked at.
CHEAP_BYTES = 2048
# Microseconds for a list or object, a text's quote, what a comma divides, and any byte: measured over kinds of JSON,
# for all that is read here (docs/decisions/0035).
BRACKET, QUOTE, COMMA, BYTE = 1.0, 0.4, 0.1, 0.005
DEAR = 1000.0

_OTHERS = bytes(set(range(256)) - set(b'[{",'))


def is_dear(text: bytes) -> bool:
    """Whether to read a JSON, and to hold it against a model, may take a millisecond."""
    size = len(text)
    return size > CHEAP_BYTES and (size > LONG_JSON or micros(text) > DEAR)


def micros(text: bytes) -> float:
    """Microseconds that a JSON may take to read."""
    marks = text.translate(None, _OTHERS)
    commas, quotes = marks.count(b","), marks.count(b'"')
    return BYTE * len(text) + COMMA * commas + QUOTE * quotes + BRACKET * (len(marks) - commas - quotes)

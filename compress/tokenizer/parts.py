"""What the parts of a tokenizer.json may do to a text: a list of those that are known, with bounds on each.

A few lines of JSON can make millions of letters of one, or take a square of a text's letters in time; and `tokenizers`
ends the process where memory ends.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["LARGEST_GROWTH", "dropped", "gives_types", "growth_of", "refuse_parts", "spread_of"]

LARGEST_GROWTH = 64  # letters that a normalizer's own texts make of one; usual are 1 and 2
# What goes through each text one after the other, or is looked for at each of its letters; usual are under ten parts,
# seven pieces, a pattern of 1,000 letters (those that list an alphabet), and Unigram's words of 16.
MOST_PARTS, MOST_PIECES, LONGEST_PATTERN, LONGEST_PIECE = 64, 64, 10_000, 256
LONGEST_WORD = 1000  # letters of a word that WordPiece looks up, in a time that is their square; usual is 100
IN_UNICODE = 18  # letters that Unicode's own forms make of one, which charsmaps follow
# What else each makes of a letter of some texts, whatever it is given: Unicode says so, or it is a byte's letters.
SPREAD = {
    "NFC": 3, "NFD": 4, "NFKC": IN_UNICODE, "NFKD": IN_UNICODE, "Precompiled": IN_UNICODE, "Lowercase": 3,
    "ByteLevel": 4, "BertNormalizer": 12,
}  # fmt: skip
KNOWN: dict[str, set[str | None]] = {
    "normalizer": {
        "Sequence", "BertNormalizer", "Strip", "StripAccents", "NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Nmt",
        "Precompiled", "Replace", "Prepend", "ByteLevel",
    },
    "pre_tokenizer": {
        "Sequence", "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Metaspace", "Whitespace", "Split",
        "Punctuation", "WhitespaceSplit", "Digits", "UnicodeScripts", "FixedLength",
    },
    "model": {"BPE", "WordPiece", "WordLevel", "Unigram", None},  # files of 2020 name none
    "post_processor": {"Sequence", "BertProcessing", "RobertaProcessing", "ByteLevel", "TemplateProcessing"},
    "decoder": {
        "Sequence", "BPEDecoder", "ByteLevel", "WordPiece", "Metaspace", "CTC", "Replace", "Fuse", "Strip",
        "ByteFallback",
    },
}  # fmt: skip
MEMBERS = {
    "normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors",
    "decoder": "decoders",
}  # fmt: skip


def refuse_parts(told: Mapping[str, Any]) -> None:
    """Look at all parts before the library does.

    Args:
        told: tokenizer.json.

    Raises:
        ValueError: a part that is not known, would make too much of a text, or there are too many of them.
    """
    count = 0
    for where in KNOWN:
        for part in _parts(told.get(where), where):
            count += 1
            if count > MOST_PARTS:
                raise ValueError(
                    f"it has over {MOST_PARTS} parts (normalizers, pre-tokenizers and the like), which each text goes "
                    "through one after the other: usual are under ten"
                )
            if part.get("type") not in KNOWN[where]:
                raise ValueError(f"its {where} has the type {str(part.get('type'))[:40]!r}, which is not known")
            if part.get("type") == "TemplateProcessing":
                _refuse_template(part)
            _refuse_pattern(part, where)
    growth = growth_of(told)
    if growth > LARGEST_GROWTH:
        raise ValueError(f"its normalizer makes up to {growth:,.0f} letters of one, and {LARGEST_GROWTH} are allowed")
    model = told.get("model")
    longest = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    if isinstance(longest, int | float) and longest > LONGEST_WORD:
        raise ValueError(
            f"its max_input_chars_per_word is {longest:,}, which takes a square of that in time: usual is 100, and "
            f"{LONGEST_WORD:,} are allowed"
        )
    if isinstance(model, dict) and isinstance(model.get("vocab"), list):  # Unigram's, of words and their scores
        words = (each[0] for each in model["vocab"] if isinstance(each, list) and each)
        longest = max(map(_letters, words), default=0)
        if longest > LONGEST_PIECE:
            raise ValueError(
                f"a word of its vocabulary has {longest:,} letters: as many are looked at from each letter of a text, "
                f"usual are 16, and {LONGEST_PIECE} are allowed"
            )


def growth_of(told: Mapping[str, Any]) -> float:
    """How many letters the normalizer's own texts may make of one."""
    return math.prod(map(_growth, _parts(told.get("normalizer"), "normalizer")))


def spread_of(told: Mapping[str, Any]) -> float:
    """How many letters, or bytes taken for some, all of the normalizer may make of one at the very most."""
    kinds = {str(part.get("type")) for part in _parts(told.get("normalizer"), "normalizer")}
    return growth_of(told) * math.prod(SPREAD.get(kind, 1) for kind in kinds)


def gives_types(told: Mapping[str, Any]) -> bool:
    """Whether a template gives a token of a single text another type than 0.

    Raises:
        ValueError: its post_processor is no table.
    """
    for part in _parts(told.get("post_processor"), "post_processor"):
        pieces = part.get("single")
        for piece in pieces if isinstance(pieces, list) else ():
            held = list(piece.values()) if isinstance(piece, dict) else []
            if any(isinstance(each, dict) and each.get("type_id") not in (None, 0) for each in held):
                return True
    return False


def dropped(told: Mapping[str, Any]) -> float:
    """The share of merges that BPE leaves out at random."""
    model = told.get("model")
    share = model.get("dropout") if isinstance(model, dict) else None
    return float(share) if isinstance(share, int | float) else 0.0


def _parts(part: Any, where: str) -> Iterator[dict[str, Any]]:
    """A part and, of a sequence, its members.

    Raises:
        ValueError: one is no table.
    """
    if part is None:
        return
    left = [part]
    while left:
        part = left.pop()
        if not isinstance(part, dict):
            raise ValueError(f"its {where} is no table of keys")
        yield part
        members = part.get(MEMBERS[where]) if where in MEMBERS and part.get("type") == "Sequence" else None
        left += members[::-1] if isinstance(members, list) else []


def _growth(part: Mapping[str, Any]) -> float:
    kind = part.get("type")
    if kind == "Prepend":  # to each part of a text between added tokens
        return 1.0 + _letters(part.get("prepend"))
    if kind == "Precompiled":
        return _growth_of_charsmap(part.get("precompiled_charsmap"))
    if kind != "Replace":
        return 1.0
    pattern = part.get("pattern")
    found, made = _letters(pattern.get("String") if isinstance(pattern, dict) else None), _letters(part.get("content"))
    return max(1.0, made / found) if found else 1.0 + made  # an expression may match between two letters


def _letters(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0


def _growth_of_charsmap(data: Any) -> float:
    """By the longest text of a charsmap: the size of its index, the index, and texts that each end in a zero byte."""
    if not isinstance(data, str):
        return 1.0
    held = base64.b64decode(data, validate=True)
    if not held:
        return 1.0
    (index,) = struct.unpack_from("<I", held)
    if index > len(held) - 4:
        raise ValueError("its precompiled_charsmap is shorter than it says")
    longest = max(map(len, held[4 + index :].decode("utf-8", errors="replace").split("\0")))
    return max(1.0, longest / IN_UNICODE)


def _refuse_template(part: Mapping[str, Any]) -> None:
    """Each of the texts goes in once: truncation leaves room for special tokens alone."""
    tokens = part.get("special_tokens")
    for special in tokens.values() if isinstance(tokens, dict) else ():
        made = special.get("ids") if isinstance(special, dict) else None
        if isinstance(made, list) and len(made) > MOST_PIECES:
            raise ValueError(f"a special token of its template is made of {len(made):,}, and {MOST_PIECES} are allowed")
    for name, texts in (("single", ["A"]), ("pair", ["A", "B"])):
        pieces = part.get(name)
        if isinstance(pieces, list) and len(pieces) > MOST_PIECES:
            raise ValueError(f"the pieces of its template are {len(pieces):,}, and {MOST_PIECES} are allowed")
        held = (
            [piece.get("Sequence") for piece in pieces if isinstance(piece, dict)] if isinstance(pieces, list) else []
        )
        found = sorted(str(each.get("id")) for each in held if isinstance(each, dict))
        if held and found != texts:
            raise ValueError(
                f"its template for {'two texts' if name == 'pair' else 'a text'} has {', '.join(found)[:60] or 'none'} "
                f"where {' and '.join(texts)} should stand once"
            )


def _refuse_pattern(part: Mapping[str, Any], where: str) -> None:
    """An expression's choices are tried at each letter of a text."""
    pattern = part.get("pattern")
    longest = max(map(_letters, pattern.values()), default=0) if isinstance(pattern, dict) else _letters(pattern)
    if longest > LONGEST_PATTERN:
        raise ValueError(f"a pattern of its {where} has {longest:,} letters, and {LONGEST_PATTERN:,} are allowed")

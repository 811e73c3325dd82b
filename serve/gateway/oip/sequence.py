"""A sequence's id: as its client says it, and as Triton hears it.

Triton's ids are the same for all who ask it: what a key calls a sequence goes on under a name that no other key's can
have.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from serve.gateway.oip.protocol import BINARY_HEADER
from serve.http.client import Response

__all__ = ["FLAGS", "SEQUENCE_ID", "Named", "in_answer", "named"]

SEQUENCE_ID = "sequence_id"
FLAGS = "sequence_start", "sequence_end"
INT64 = 2**63


@dataclass(frozen=True, slots=True)
class Named:
    """A sequence.

    Attributes:
        asked: its id, as its client says it.
        sent: as Triton hears it.
        start, end: whether the request at hand is its first, or its last.
        owner: the digest of its client's key; "" where there are none.
    """

    asked: int | str
    sent: int | str
    start: bool = False
    end: bool = False
    owner: str = ""

    @property
    def place(self) -> bytes:
        """What says which server has it."""
        return str(self.sent).encode()

    @property
    def renamed(self) -> bool:
        return self.asked != self.sent

    def told(self, text: str) -> str:
        """What Triton says of it, with its client's id."""
        return text.replace(str(self.sent), str(self.asked)) if self.renamed else text


def named(parameters: Mapping[str, Any], digest: str) -> Named | None:
    """A request's sequence by its client's id and its client's key; None where there is none, as the ids 0 and "" say.

    Numbers stay numbers (63 bits of a hash) and texts texts (128 bits): a model says which of them it takes. The hash
    (BLAKE2b) is keyed with what is stored of the client's key, so that each gateway gives the same, and nobody finds an
    id that becomes what another key's does.

    Args:
        parameters: of the request.
        digest: SHA-256 of the key, in hexadecimal; "" where there are no keys, and so nobody to tell from another.
    """
    sequence = parameters.get(SEQUENCE_ID)
    if not isinstance(sequence, int | str) or not sequence:
        return None
    start, end = (bool(parameters.get(flag)) for flag in FLAGS)
    if not digest:
        return Named(sequence, sequence, start, end)
    kind = b"n" if isinstance(sequence, int) else b"t"
    found = blake2b(kind + str(sequence).encode(), digest_size=16, key=bytes.fromhex(digest)).digest()
    sent = int.from_bytes(found[:8]) % (INT64 - 1) + 1 if isinstance(sequence, int) else found.hex()
    return Named(sequence, sent, start, end, digest)


def in_answer(sequence: Named, answer: Response) -> Response:
    """An answer over HTTP with its client's id, where Triton says its own: in errors, and in answers of ensembles."""
    if not sequence.renamed or answer.header(b"content-encoding"):
        return answer
    if answer.status != 200:
        asked = json.dumps(str(sequence.asked))[1:-1].encode()
        return replace(answer, body=answer.body.replace(str(sequence.sent).encode(), asked))
    # No text of a tensor has it: there, its quotes would be escaped.
    ours, theirs = (b'"%b":%b' % (SEQUENCE_ID.encode(), json.dumps(each).encode())
                    for each in (sequence.sent, sequence.asked))  # fmt: skip
    length = answer.header(BINARY_HEADER)
    size = int(length) if length is not None else len(answer.body)
    at = answer.body.find(ours, 0, size)
    if at < 0:
        return answer
    body = b"".join((answer.body[:at], theirs, answer.body[at + len(ours) :]))
    new = b"%d" % (size + len(theirs) - len(ours))
    headers = [(name, new if name == BINARY_HEADER else value) for name, value in answer.headers]
    return replace(answer, headers=headers, body=body)

"""What the head of an infer request asks for, where it asks for nothing special."""

from __future__ import annotations

from typing import Self

from serve.gateway.access.identity import KeyRing
from serve.gateway.access.keys import digest_of
from serve.gateway.access.memory import SMALL_BYTES
from serve.gateway.edge.infer_head import PATH, split_headers
from serve.gateway.errors import GatewayError
from serve.gateway.oip.protocol import BINARY_HEADER, SEQUENCE
from serve.gateway.upstream.deadline import TIMEOUT_HEADER
from serve.http.client import Pool
from serve.http.message import encode_head
from serve.rollout.plan import Target

__all__ = ["Asked"]

ESCAPE = b"\\u"  # may hide a name
KNOWN_JSON_BYTES = 1024

Header = tuple[bytes, bytes]


class Asked:
    """What the head of a request says, worked out once for all requests that begin with the same bytes.

    Attributes:
        length: of the body.
        header_length: bytes of its JSON in the binary form; None where it is all JSON.
        digest: of the key; None where it carries none.
    """

    __slots__ = ("_head", "_head_of", "_plain", "digest", "forwarded", "header_length", "length", "path", "target")

    def __init__(
        self,
        path: bytes,
        target: Target,
        digest: bytes | None,
        forwarded: list[Header],
        length: int,
        header_length: int | None,
    ) -> None:
        self.path = path
        self.target = target
        self.digest = digest
        self.forwarded = forwarded
        self.length = length
        self.header_length = header_length
        self._head = b""
        self._head_of: tuple[int, int | None, Pool] | None = None
        self._plain = b""

    def is_plain(self, json: bytes) -> bool:
        """Whether the JSON of such a request names no sequence, as far as can be told without parsing it.

        In the binary form it is mostly the same each time: it is then compared, not searched.
        """
        if json == self._plain:
            return True
        if SEQUENCE in json or ESCAPE in json:
            return False
        if self.header_length is not None and len(json) <= KNOWN_JSON_BYTES:
            self._plain = json
        return True

    def head_for(self, pool: Pool, length: int, header_length: int | None) -> bytes:
        """The head that goes to Triton, for a body that may have been written anew; raises ValueError."""
        of = length, header_length, pool
        if self._head_of != of:
            headers = self.forwarded
            if header_length != self.header_length:
                headers = [header for header in headers if header[0] != BINARY_HEADER]
                headers.append((BINARY_HEADER, b"%d" % (header_length or 0)))
            self._head = encode_head(b"POST", self.path, pool.address, headers, length)
            self._head_of = of
        return self._head

    @classmethod
    def read(cls, path: bytes, headers: list[Header], keys: KeyRing, json_bytes: int) -> Self | None:
        """What a POST request asks for; None for one that goes the long way.

        Args:
            path: as it came, with what follows it.
            headers: their names in lower case.
            keys: know where a key stands.
            json_bytes: the longest that is all JSON.
        """
        match = PATH.fullmatch(path)
        if match is None:
            return None
        try:
            forwarded, read = split_headers(headers)
            key = keys.key_of(read)
        except GatewayError:
            return None
        if TIMEOUT_HEADER in read or b"content-encoding" in read:
            return None
        length = _number(read.get(b"content-length"))
        header_length = _number(read.get(BINARY_HEADER))
        if length is None or (header_length is None and BINARY_HEADER in read):
            return None
        if not 0 < (length if header_length is None else header_length) <= length <= SMALL_BYTES:
            return None
        if header_length is None and length > json_bytes:
            return None
        target = Target(match[1].decode(), match[2].decode() if match[2] is not None else None)
        digest = digest_of(key) if key else None
        return cls(path, target, digest, forwarded, length, header_length)


def _number(value: bytes | None) -> int | None:
    return int(value) if value is not None and value.isdigit() and len(value) < 8 else None

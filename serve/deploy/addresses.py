"""Where a model repository is stored, as --storage names it: each kind by the rules of what will read it."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Bucket", "bucket_of", "is_claim", "is_url"]

_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")  # of Kubernetes' objects: a name of DNS
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_NUMBERS = re.compile(r"\d+(?:\.\d+){3}")
_PATH = re.compile(r"[A-Za-z0-9!_.*'()/=+@,-]*")
_ENDPOINT = re.compile(r"(?P<scheme>https?)://(?P<host>[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::(?P<port>\d{1,5}))?")
_URL = re.compile(r"[A-Za-z0-9!_.*'()/=+@,~%:&?;-]*")
_PORTS = {"https": 443, "http": 80}
LONGEST = 253


@dataclass(frozen=True)
class Bucket:
    """A repository in a bucket.

    Attributes:
        url: s3://BUCKET/PATH.
        endpoint: SCHEME://HOST[:PORT] of who is asked for it; "" where that is AWS.
        port: that this is reached at.
    """

    url: str
    endpoint: str
    port: int


def is_claim(name: str) -> bool:
    """Whether Kubernetes takes a name for a claim."""
    return len(name) <= LONGEST and _NAME.fullmatch(name) is not None


def is_url(text: str) -> bool:
    """Whether it is the address of a server, and maybe a path there, without what may be a password."""
    endpoint, _, path = text.partition("://")[2].partition("/")
    found = _ENDPOINT.fullmatch(f"{text.partition('://')[0]}://{endpoint}")
    return (
        found is not None and 0 < int(found["port"] or _PORTS[found["scheme"]]) < 65536 and bool(_URL.fullmatch(path))
    )


def bucket_of(storage: str) -> Bucket:
    """Of s3://BUCKET/PATH, or s3://https://HOST:PORT/BUCKET/PATH as Triton writes it.

    Raises:
        ValueError: it is neither; says why, without what may be a password.
    """
    if not storage.startswith("s3://"):
        raise ValueError("a bucket's address begins with s3://")
    where, endpoint, port = storage.removeprefix("s3://"), "", _PORTS["https"]
    if "@" in where.partition("://")[2].partition("/")[0] or "@" in where.partition("/")[0]:
        raise ValueError("a key does not belong into an address, which everybody may read")
    if "://" in where:
        scheme, _, rest = where.partition("://")
        host, _, where = rest.partition("/")
        endpoint = f"{scheme}://{host}"
        found = _ENDPOINT.fullmatch(endpoint)
        if found is None:
            raise ValueError("its endpoint is none such as https://HOST:PORT")
        port = int(found["port"] or _PORTS[found["scheme"]])
        if not 0 < port < 65536:
            raise ValueError(f"{port} is no port")
    bucket, _, path = where.partition("/")
    if ":" in bucket:
        raise ValueError("its endpoint says neither http:// nor https://")
    if not _BUCKET.fullmatch(bucket) or ".." in bucket or _NUMBERS.fullmatch(bucket):
        raise ValueError(f"{bucket!r} is no bucket's name: 3 to 63 small letters, digits, dots and -")
    if not _PATH.fullmatch(path) or any(part in (".", "..") for part in path.split("/")):
        raise ValueError(f"{path!r} is no path in a bucket of letters that need no escape")
    return Bucket(f"s3://{where}", endpoint, port)

"""What a gateway may need of a machine's memory, from what its clients may make it hold."""

from __future__ import annotations

__all__ = ["GATEWAY_BODY", "GATEWAY_HOLDS", "KEPT_BYTES", "MIB", "apart_bytes", "footprint_bytes", "reader_bytes"]

MIB = 1024 * 1024
# What clients may make a gateway of the rendered manifests hold, and send in one request.
GATEWAY_HOLDS, GATEWAY_BODY = 384 * MIB, 64 * MIB
# A gateway that does nothing, and its process that reads long JSON.
BASE_BYTES, READER_BASE_BYTES = 160 * MIB, 96 * MIB
KEPT_BYTES = 96 * MIB  # freed and not given back, for the bodies that come next: each page given back costs a fault
# Copies of the longest body, of one request at a time, while it is put together and written anew, or its own two while
# gRPC's library makes one piece of it, and that which it has of one while it is sent.
PASSING = 4
RESERVED = 12  # bytes that the parser asks for, for each of a JSON's; it touches those that it needs


def reader_bytes(bound: int) -> int:
    """What the process that reads long JSON may make of one request."""
    return bound // 2


def apart_bytes(bound: int, max_body_bytes: int) -> int:
    """What that process may ask for before it is refused: twice what is planned for, as it writes answers, too.

    Args:
        bound, max_body_bytes: as for `footprint_bytes`.
    """
    return 2 * reader_bytes(bound) + (PASSING + RESERVED) * max_body_bytes


def footprint_bytes(bound: int, max_body_bytes: int) -> int:
    """What a gateway may need in all: a pod's memory limit has to be as high.

    Args:
        bound: its memory_bytes.
        max_body_bytes: of one request.
    """
    return BASE_BYTES + READER_BASE_BYTES + KEPT_BYTES + bound + reader_bytes(bound) + PASSING * max_body_bytes

"""A message on its way to Triton, held by nobody once it is sent.

What iterates over a stream's messages (the library's own task, too) keeps the last of them until the next one comes,
which may be never: so it is given parcels, and each is empty once the library has what was in it.
"""

from __future__ import annotations

__all__ = ["Parcel", "contents"]


class Parcel:
    """One.

    Args:
        body: of the message.
    """

    __slots__ = ("_body",)

    def __init__(self, body: bytes) -> None:
        self._body = body

    def take(self) -> bytes:
        """The message, once."""
        body, self._body = self._body, b""
        return body


def contents(parcel: Parcel) -> bytes:
    """What the library sends: its `request_serializer`."""
    return parcel.take()

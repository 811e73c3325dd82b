"""One request without an event loop, over a connection of its own: for commands, and where a thread waits anyway."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from types import MappingProxyType

from serve.http.message import Address

__all__ = ["ask_once"]


def ask_once(
    address: Address,
    method: str,
    path: str,
    content: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
    *,
    timeout_s: float,
) -> tuple[int, bytes]:
    """Status and body.

    Args:
        content: None sends no body.
        timeout_s: for each step of the exchange, in seconds.

    Raises:
        OSError: nobody is there, or what came back is no HTTP.
    """
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)
    try:
        connection.request(method, path, content, dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read()
    except http.client.HTTPException as err:
        raise ConnectionError(str(err) or type(err).__name__) from err
    finally:
        connection.close()

"""Loopback ports: given ones are checked, 0 becomes a free one."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import dataclass

from compress.errors import ServerError

__all__ = ["HOST", "Ports", "claim"]

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Ports:
    """Where Triton listens, on loopback only; 0 takes a free port.

    Attributes:
        http_port: the Open Inference Protocol over HTTP.
        grpc_port: the same over gRPC.
        metrics_port: Prometheus metrics.
    """

    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002


def claim(ports: Ports) -> Ports:
    """The ports, each checked to be free, with a free one for each 0.

    Raises:
        ServerError: one is in use, is not allowed, or is named twice.
    """
    taken: dict[str, int] = {}
    with ExitStack() as stack:  # all are held until all are known, so that no two are the same
        for name, port in sorted(vars(ports).items(), key=lambda item: item[1] == 0):
            flag = f"--triton-{name.replace('_', '-')}"  # as `serve up` calls it
            listener = stack.enter_context(socket.socket())
            # As Triton does; a port is then free although connections of its last owner are still dying down.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
                listener.listen(1)
            except (OSError, OverflowError) as err:
                twice = port in taken.values()
                raise ServerError(
                    f"can't listen on port {port}",
                    why=f"{flag} and another flag name it" if twice else f"{HOST}:{port} can't be had: {err}",
                    mend=f"stop what listens there, or give another port with {flag} (0 takes a free one)",
                ) from err
            taken[name] = listener.getsockname()[1]
    return Ports(**taken)

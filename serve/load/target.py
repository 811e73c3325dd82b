"""What is sent to whom: one request's bytes, made once from what the server says of its model."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from dataclasses import dataclass

import numpy as np
import orjson

from compress.errors import ServerError
from serve.gateway.errors import UnknownModelError
from serve.gateway.metadata import EXAMPLE_SOURCE, ModelMetadata, example_request
from serve.gateway.protocol import build_request, parse_request
from serve.gateway.tensors import ProtocolError
from serve.gateway.upstream import model_path
from serve.http_client import Address, ExchangeError, Pool, Response, encode_head
from serve.load.options import LoadOptions

__all__ = ["Target", "find_target"]


@dataclass(frozen=True)
class Target:
    """A server's address and the request to send to it, again and again.

    Attributes:
        head: the HTTP request up to its body.
        body: tensors in the binary form.
    """

    address: Address
    head: bytes
    body: bytes

    @property
    def request_bytes(self) -> int:
        return len(self.head) + len(self.body)


async def find_target(options: LoadOptions) -> Target:
    """Ask the server for the model's example and make the request.

    The example is the gateway's; a Triton gives the one in its model's configuration; where there is none, values
    are drawn with the seed.

    Raises:
        ServerError: the URL is not one, is of another machine, nothing answers there, or it has no such model.
    """
    try:
        address = Address.parse(options.url)
    except ValueError as err:
        raise ServerError("can't send load", why=str(err), mend="name the server as http://host:port") from err
    if not options.allow_remote and not await _is_loopback(address.host):
        raise ServerError(
            f"won't send load to {address.host}",
            why="it is not this machine, and a load test of a server that is not yours is an attack",
            mend="add --allow-remote if you may",
        )
    pool = Pool(address, max_connections=1, timeout_s=options.timeout)
    try:
        path = model_path(options.model)
        message = build_request(parse_request(await _example(pool, path, options)))
        head = encode_head(
            b"POST", f"{path}/infer".encode(), address, [*message.headers, *options.headers], len(message.body)
        )
    except UnknownModelError as err:
        raise ServerError(
            f"there is no model {options.model!r}",
            why="its name has characters that no model's name can have",
            mend="look up the name in the model repository",
        ) from err
    except ProtocolError as err:
        raise ServerError(
            f"can't make a request for the model {options.model!r}",
            why=str(err),
            mend="pack the model with an example input that fits it",
        ) from err
    finally:
        await pool.close()
    return Target(address, head, message.body)


async def _example(pool: Pool, path: str, options: LoadOptions) -> bytes:
    """The JSON of an infer request for the model."""
    metadata = await _get(pool, path, options)
    if metadata.status != 200:
        raise ServerError(
            f"there is no model {options.model!r} at {options.url}",
            why=f"it answers with status {metadata.status}: {metadata.body[:200].decode(errors='replace')}",
            mend="look up the name in the model repository, and whether the model loaded",
        )
    answer = await _get(pool, f"{path}/example", options)
    if answer.status == 200 and answer.header(EXAMPLE_SOURCE) == b"model":
        return answer.body
    config = await _get(pool, f"{path}/config", options)
    parsed = ModelMetadata.parse(metadata.body, config.body if config.status == 200 else None)
    return orjson.dumps(example_request(parsed, np.random.default_rng(options.seed)))


async def _get(pool: Pool, path: str, options: LoadOptions) -> Response:
    try:
        return await pool.request(b"GET", path.encode(), options.headers)
    except ExchangeError as err:
        raise ServerError(
            f"can't reach {options.url}",
            why=str(err),
            mend="start it (`serve up`), or name the right one with --url",
        ) from err


async def _is_loopback(host: str) -> bool:
    """Whether every address of a host is this machine's own."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found)

"""What is sent to whom: the bytes of each request, made once from what the server says of its model."""

from __future__ import annotations

import asyncio
import ipaddress
import mimetypes
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import orjson

from compress.errors import ServerError
from serve.gateway.errors import UnknownModelError
from serve.gateway.oip.metadata import EXAMPLE_SOURCE, ModelMetadata, example_request
from serve.gateway.oip.protocol import build_request, parse_request
from serve.gateway.oip.tensors import ProtocolError, Tensor
from serve.gateway.upstream.upstream import model_path
from serve.http.client import Address, ExchangeError, Pool, Response, encode_head
from serve.load.ask.check import Check, Form, outputs_of_plain
from serve.load.ask.inputs import Item, bodies, items_of_data
from serve.load.ask.refused import refused
from serve.load.ask.synthetic import synthetic
from serve.load.options import LoadOptions
from serve.load.send.job import Protocol, Request

__all__ = ["Endpoint", "Target", "find_target", "is_loopback"]

MOST_OF_ERROR = 10_000  # bytes of an error that are looked at
REFUSED = (400, 422, 500)  # not what is about keys, rates or a server that is busy


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and how it is spoken to.

    Attributes:
        path: of what is asked, where it is no model; "" otherwise.
    """

    protocol: Protocol
    address: Address
    path: str = ""

    @classmethod
    def parse(cls, url: str) -> Endpoint:
        """Read http://host:port, grpc://host:port or http://host:port/path.

        Raises:
            ServerError: it is something else.
        """
        scheme, _, rest = url.partition("://")
        host, slash, path = rest.partition("/")
        try:
            address = Address.parse(f"http://{host}")
            if scheme not in ("http", "grpc") or (scheme == "grpc" and path) or urlsplit(url).fragment:
                raise ValueError(f"{url!r} does not start with http:// or grpc://")
        except ValueError as err:
            raise ServerError(
                "can't send load",
                why=str(err),
                mend="name the server as http://host:port or grpc://host:port, or one address of it as http://host:port/path",
            ) from err
        return cls("grpc" if scheme == "grpc" else "http", address, slash + path)


@dataclass(frozen=True)
class Target:
    """A server and the requests to send to it.

    Attributes:
        requests: sent in turn, or drawn by `weights` where there are any.
        check: how answers are judged; None where their status says enough.
        metadata: of gRPC calls.
        headers: of questions about the server.
        versions: of the model; empty where nothing is known.
    """

    endpoint: Endpoint
    requests: tuple[Request, ...]
    weights: tuple[float, ...] = ()
    check: Check | None = None
    metadata: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[bytes, bytes], ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def request_bytes(self) -> int:
        """One request's, on average over what is sent."""
        sizes = np.array([len(request.wire) for request in self.requests], np.float64)
        return round(float(np.average(sizes, weights=self.weights or None)))


async def find_target(options: LoadOptions) -> Target:
    """Ask the server for the model's inputs and make the requests.

    Without data, the model's example is sent: the gateway's; a Triton gives the one in its model's configuration; where
    there is none, values are drawn with the seed.

    Raises:
        ServerError: the URL is not one, is of another machine, nothing answers there, it has no such model, or what is
            to be sent does not fit it.
    """
    endpoint = Endpoint.parse(options.url)
    if not options.allow_remote and not await is_loopback(endpoint.address.host):
        raise ServerError(
            f"won't send load to {endpoint.address.host}",
            why="it is not this machine, and a load test of a server that is not yours is an attack",
            mend="add --allow-remote if you may",
        )
    if endpoint.path not in ("", "/") or (endpoint.path and not options.model):
        return await _plain(endpoint, options)
    if not options.model:
        raise ServerError(
            "can't send load",
            why=f"{options.url} names a server, and no model of it",
            mend="name one with --model, or an address of the server with a path",
        )
    try:
        return await _of_model(endpoint, options)
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
            mend=_fitting_mend(options, err),
        ) from err


def _fitting_mend(options: LoadOptions, err: ProtocolError) -> str:
    if options.form == "json" and "binary form" in str(err):
        return "leave --form json out: tensors are sent raw then"
    if options.data is not None:
        return "give --data that fits the model's inputs"
    return "pack the model with an example input that fits it, or send --data"


async def _of_model(endpoint: Endpoint, options: LoadOptions) -> Target:
    path = model_path(options.model)
    if endpoint.protocol == "grpc":
        from serve.load.send.grpc_questions import ask_metadata

        metadata = await ask_metadata(endpoint.address, options)
        example: tuple[Tensor, ...] = ()
        if options.data is None:
            generator = np.random.default_rng(options.seed)
            example = parse_request(orjson.dumps(example_request(metadata, generator)))
    else:
        pool = Pool(endpoint.address, max_connections=1, timeout_s=options.timeout)
        try:
            metadata, example = await _ask(pool, path, options)
        finally:
            await pool.close()
    if metadata.decoupled:
        raise ServerError(
            f"can't load-test the model {options.model!r}",
            why="it gives any number of answers to a request, and load is of requests with one",
            mend=f"name its stream, http://…/predict/{options.model}/stream, with --body: each is one answer then",
        )
    label = _judged(options, [each.name for each in metadata.outputs])
    items = items_of_data(metadata, options) if options.data is not None else synthetic(metadata, example, options)
    requests: list[Request] = []
    for item in items:
        if endpoint.protocol == "grpc":
            from serve.load.send.grpc_form import request_of

            requests.append(Request(request_of(options.model, item.inputs), item.rows))
            continue
        message = build_request(item.inputs, binary=options.form == "binary")
        headers = [*message.headers, *options.headers]
        head = encode_head(b"POST", f"{path}/infer".encode(), endpoint.address, headers, len(message.body))
        requests.append(Request(head + message.body, item.rows))
    # Drawn numbers are as good as any to a network; drawn texts are no pictures and no sentences to a hook.
    drawn = options.data is None and not metadata.example
    if drawn and any(each.datatype == "BYTES" for each in metadata.inputs):
        await _try(endpoint, requests[0], options)
    form: Form = "grpc" if endpoint.protocol == "grpc" else options.form
    return Target(
        endpoint,
        tuple(requests),
        _weights(items),
        _check(items, form, options, label),
        tuple((name.decode(), value.decode()) for name, value in options.headers),
        tuple(options.headers),
        metadata.versions,
    )


async def _try(endpoint: Endpoint, request: Request, options: LoadOptions) -> None:
    """Send a request of drawn values once: what a model refuses measures nothing.

    Raises:
        ServerError: the server has refused it, or failed on it.
    """
    if endpoint.protocol == "grpc":
        from serve.load.send.grpc_questions import refusal

        why = await refusal(endpoint.address, request.wire, options)
    else:
        pool = Pool(endpoint.address, max_connections=1, timeout_s=options.timeout)
        try:
            answer = await pool.exchange(request.wire)
        except ExchangeError as err:
            raise _unreachable(options, err) from err
        finally:
            await pool.close()
        why = f"{answer.status}: {answer.body[:500].decode(errors='replace')}" if answer.status in REFUSED else ""
    if why:
        raise ServerError(
            f"can't make a request that the model {options.model!r} answers",
            why=f"it has no example, and to drawn values the server says {why}",
            mend="send your own inputs with --data, name sizes with --shape, or pack the model with an example (hooks: "
            "example())",
        )


async def _plain(endpoint: Endpoint, options: LoadOptions) -> Target:
    """Any HTTP address with a path."""
    items = bodies(options)
    headers = options.headers
    if not any(name == b"content-type" for name, _ in headers) and any(item.body for item in items):
        headers = [*headers, (b"content-type", _media(options, items[0].body))]
    try:
        requests = tuple(
            Request(
                encode_head(
                    options.method.upper().encode(),
                    endpoint.path.encode(),
                    endpoint.address,
                    headers,
                    len(item.body),
                )
                + item.body,
                item.rows,
            )
            for item in items
        )
    except ValueError as err:
        raise ServerError(
            f"can't ask {options.url}", why=str(err), mend="write --method, --header and the path as HTTP has them"
        ) from err
    pool = Pool(endpoint.address, max_connections=1, timeout_s=options.timeout)
    try:
        outputs = await _outputs_behind(pool, endpoint.path, options)
        label = _judged(options, outputs)
        answer = await pool.exchange(requests[0].wire)
    except ExchangeError as err:
        raise _unreachable(options, err) from err
    finally:
        await pool.close()
    if not outputs and answer.status == 200:
        label = _judged(options, outputs_of_plain(answer.body))
    return Target(endpoint, requests, (), _check(items, "plain", options, label), (), tuple(options.headers))


async def _outputs_behind(pool: Pool, path: str, options: LoadOptions) -> list[str]:
    """The outputs of the model that a gateway's /predict/MODEL asks; none where it is another address."""
    _, predict, name = urlsplit(path).path.rpartition("/predict/")
    if not predict or not name or "/" in name:
        return []
    answer = await pool.request(b"GET", f"/v2/models/{name}".encode(), options.headers)
    try:
        return [each.name for each in ModelMetadata.parse(answer.body, None).outputs] if answer.status == 200 else []
    except ProtocolError:  # of another kind of server
        return []


def _judged(options: LoadOptions, outputs: Sequence[str]) -> str:
    """The output that names the label: the model's first, as `serve verify` has it; "" where nothing is known.

    Raises:
        ServerError: there is none of the name that was asked for.
    """
    wanted = options.label_output
    if wanted and outputs and wanted not in outputs:
        raise ServerError(
            f"there is no output {wanted!r}",
            why=f"the model gives {', '.join(outputs)}",
            mend="name one of them with --label-output, or leave it out for the first",
        )
    return wanted or next(iter(outputs), "")


def _media(options: LoadOptions, body: bytes) -> bytes:
    """A body's content type, by its file's name or its first byte."""
    path = options.body or options.data
    guessed = mimetypes.guess_type(path.name)[0] if path is not None and path.is_file() else None
    if guessed is None:
        guessed = "application/json" if body[:1] in (b"{", b"[") else "application/octet-stream"
    return guessed.encode()


def _weights(items: Sequence[Item]) -> tuple[float, ...]:
    return tuple(item.weight for item in items) if any(item.weight for item in items) else ()


def _check(items: Sequence[Item], form: Form, options: LoadOptions, label: str) -> Check | None:
    expect = options.expect
    contains = expect.removeprefix("contains:") if expect.startswith("contains:") else ""
    if expect and not contains and expect != "same" and not expect.endswith(".npz"):
        raise ServerError(
            f"can't expect {expect!r}", why="there is no such check", mend="give same, contains:TEXT or an .npz"
        )
    values = tuple(item.expected for item in items if item.expected is not None)
    labels = tuple(item.labels for item in items) if all(item.labels for item in items) else ()
    if expect.endswith(".npz") and len(values) != len(items):
        raise ServerError(
            f"can't expect {expect}", why="its rows are for those of --data, and there is none", mend="give --data, too"
        )
    if not (expect or labels):
        return None
    return Check(form, contains, expect == "same", values, options.tolerance, labels, label)


async def _ask(pool: Pool, path: str, options: LoadOptions) -> tuple[ModelMetadata, tuple[Tensor, ...]]:
    """The model's metadata and an example request for it; no example where data is sent."""
    metadata = await _get(pool, path, options)
    if metadata.status != 200:
        said = metadata.body[:MOST_OF_ERROR].decode(errors="replace")
        wait = (metadata.header(b"retry-after") or b"").decode(errors="replace")
        raise refused(options, metadata.status, f"status {metadata.status}", said, wait)
    config = await _get(pool, f"{path}/config", options)
    parsed = ModelMetadata.parse(metadata.body, config.body if config.status == 200 else None)
    if options.data is not None:
        return parsed, ()
    answer = await _get(pool, f"{path}/example", options)
    if answer.status == 200 and answer.header(EXAMPLE_SOURCE) == b"model":
        return parsed, parse_request(answer.body)
    return parsed, parse_request(orjson.dumps(example_request(parsed, np.random.default_rng(options.seed))))


async def _get(pool: Pool, path: str, options: LoadOptions) -> Response:
    try:
        return await pool.request(b"GET", path.encode(), options.headers)
    except ExchangeError as err:
        raise _unreachable(options, err) from err


def _unreachable(options: LoadOptions, err: ExchangeError) -> ServerError:
    return ServerError(f"can't reach {options.url}", why=str(err), mend="start it (`serve up`), or name the right one")


async def is_loopback(host: str, *, unspecified: bool = False) -> bool:
    """Whether every address of a host is this machine's own; with `unspecified` also 0.0.0.0, which ends up there."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [ipaddress.ip_address(entry[4][0]) for entry in found]
    return all(each.is_loopback or (unspecified and each.is_unspecified) for each in addresses)

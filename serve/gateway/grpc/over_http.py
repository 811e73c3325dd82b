"""A stream of one message for a client that speaks HTTP, on the way and within the bounds of streams over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
import orjson
from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.gate import Gate
from serve.gateway.errors import GatewayError, UpstreamBrokenError, UpstreamDownError
from serve.gateway.grpc.channels import channels_to
from serve.gateway.grpc.clients import Clients
from serve.gateway.grpc.message import Incoming
from serve.gateway.grpc.status import STATUSES, EndedCallError
from serve.gateway.grpc.stream import Streams
from serve.gateway.oip.contracts import Contracts
from serve.gateway.oip.protocol import Message
from serve.gateway.release.releases import Releases
from serve.gateway.settings import Settings
from serve.gateway.upstream.balancer import Balancer

__all__ = ["OverHttp", "answer_parts", "infer_request"]

Parameters = Mapping[str, bool | int | float | str]


class OverHttp:
    """Asks models for streams of answers.

    Args:
        settings: of the gateway; with gRPC endpoints of its Tritons.
        gate, releases: as for HTTP.
        balancer: says which Triton is asked.
        contracts: of the models, which each message is held against.
        beside: the streams over gRPC of the same keys, whose bounds are these, too; None where there are none.
    """

    def __init__(
        self,
        settings: Settings,
        gate: Gate,
        releases: Releases,
        balancer: Balancer,
        contracts: Contracts,
        beside: Streams | None,
    ) -> None:
        self._calls = channels_to(
            balancer, settings.grpc_upstream, gate.memory, gate.long_work, settings.left_timeout_s
        )
        clients = _Clients(settings.max_clients, max(1, settings.max_clients // 4))
        incoming = Incoming(settings, gate, releases, contracts, clients)
        self._streams = Streams(settings, gate, self._calls, incoming, beside)

    async def answers(
        self, headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int] | None, body: bytes
    ) -> AsyncGenerator[bytes]:
        """Each inference.ModelStreamInferResponse to one inference.ModelInferRequest, as it comes; its key has paid.

        Args:
            headers: of the request, among them its key.
            client: address and port.
            body: the message.

        Raises:
            GatewayError: it is refused, or its answers end before their last.
        """
        call = _Call(headers, client, body)
        del body
        try:
            async with aclosing(self._streams.answer(call, paid=True)) as found:
                async for answer in found:
                    yield answer
        except EndedCallError as err:
            raise _told(err) from None
        finally:
            call.over()

    async def close(self) -> None:
        await self._calls.close()


class _Clients(Clients):
    """Calls whose connections are HTTP's: who does not read is cut there."""

    def give_up(self, peer: str) -> None:
        """Leave it to the connection."""


class _Call:
    """What is asked of a call's context: `grpc.aio.ServicerContext`."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]], client: tuple[str, int] | None, body: bytes) -> None:
        self._headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]
        self._peer = "" if client is None else f"ipv{6 if ':' in client[0] else 4}:[{client[0]}]:{client[1]}"
        self._messages = [body]
        self._after: list[Callable[[object], object]] = []

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._headers

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        return self._messages.pop() if self._messages else grpc.aio.EOF

    def add_done_callback(self, ended: Callable[[object], object]) -> None:
        self._after.append(ended)

    def over(self) -> None:
        for ended in self._after:
            ended(self)


def _told(err: EndedCallError) -> GatewayError:
    """What ended a call, as HTTP says it."""
    if err.refused is not None:
        return err.refused
    code, told, _ = err.status
    if code is grpc.StatusCode.UNAVAILABLE:
        return UpstreamDownError("the model server can't be reached", why=told)
    return GatewayError("the model gave no answer", why=told, status=STATUSES.get(code, 502))


def infer_request(
    model: str, version: str | None, message: Message, name: str = "", parameters: Parameters | None = None
) -> bytes:
    """An inference.ModelInferRequest of what is an infer request over HTTP, all of whose tensors are raw.

    Args:
        name: its id.
        parameters: of the request.
    """
    request = messages.ModelInferRequest(model_name=model, model_version=version or "", id=name)
    at = message.header_length or 0
    for each in orjson.loads(message.body[:at])["inputs"]:
        request.inputs.add(name=each["name"], datatype=each["datatype"], shape=each["shape"])
        size = each["parameters"]["binary_data_size"]
        request.raw_input_contents.append(message.body[at : at + size])
        at += size
    for key, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        request.parameters[key].CopyFrom(messages.InferParameter(**{kind: value}))
    body: bytes = request.SerializeToString()
    return body


def answer_parts(answer: bytes) -> tuple[str, bytes, int]:
    """What an inference.ModelStreamInferResponse says: its error, or ""; and its answer as over HTTP, with the length
    of the JSON that this begins with.

    Raises:
        UpstreamBrokenError: it can't be read.
    """
    response = messages.ModelStreamInferResponse.FromString(answer)
    inner = response.infer_response
    if response.error_message:
        return response.error_message, b"", 0
    raws = inner.raw_output_contents
    if len(raws) != len(inner.outputs):
        why = f"{len(inner.outputs)} outputs with {len(raws)} contents"
        raise UpstreamBrokenError("the model server's answer can't be read", why=why)
    outputs = [
        {
            "name": each.name, "datatype": each.datatype, "shape": list(each.shape),
            "parameters": {"binary_data_size": len(raw)},
        }
        for each, raw in zip(inner.outputs, raws, strict=True)
    ]  # fmt: skip
    head = orjson.dumps({"model_name": inner.model_name, "model_version": inner.model_version, "outputs": outputs})
    return "", b"".join((head, *raws)), len(head)

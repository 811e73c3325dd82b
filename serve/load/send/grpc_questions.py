"""What a server says of its model over gRPC: metadata, configuration, statistics."""

from __future__ import annotations

from typing import Any

import grpc
import orjson
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc as services

from compress.errors import ServerError
from serve.gateway.grpc.status import STATUSES
from serve.gateway.oip.metadata import ModelMetadata
from serve.http.message import Address
from serve.load.ask.refused import refused
from serve.load.options import LoadOptions

__all__ = ["ask_metadata", "ask_statistics", "refusal"]

METHOD = "/inference.GRPCInferenceService/ModelInfer"
MOST_OF_ERROR = 10_000  # letters of an error that are looked at
OF_NO_SUCH_CALL = {grpc.StatusCode.UNIMPLEMENTED: 405}
REFUSED = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}


async def refusal(address: Address, request: bytes, options: LoadOptions) -> str:
    """What the server says against a ModelInfer request; "" where it answers, or can't just now."""
    metadata = tuple((name.decode(), value.decode()) for name, value in options.headers)
    async with grpc.aio.insecure_channel(str(address)) as channel:
        try:
            await channel.unary_unary(METHOD)(request, timeout=options.timeout, metadata=metadata)
        except grpc.aio.AioRpcError as err:
            return f"{err.code().name}: {str(err.details())[:500]}" if err.code() in REFUSED else ""
    return ""


async def ask_metadata(address: Address, options: LoadOptions) -> ModelMetadata:
    """The model's metadata.

    Raises:
        ServerError: nothing answers, or it has no such model.
    """
    metadata = tuple((name.decode(), value.decode()) for name, value in options.headers)
    async with grpc.aio.insecure_channel(str(address)) as channel:
        stub = services.GRPCInferenceServiceStub(channel)
        try:
            found = await stub.ModelMetadata(
                messages.ModelMetadataRequest(name=options.model), timeout=options.timeout, metadata=metadata
            )
        except grpc.aio.AioRpcError as err:
            # A server that answers leaves its connection ready, or at rest.
            apart = channel.get_state() not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE)
            if err.code() is grpc.StatusCode.UNAVAILABLE and apart:
                raise ServerError(
                    f"can't reach {options.url}", why=str(err.details()), mend="start it, or name its gRPC port"
                ) from err
            trailing = {str(key): str(value) for key, value in err.trailing_metadata() or ()}
            said, wait = str(err.details())[:MOST_OF_ERROR], trailing.get("retry-after", "")
            # Of a model that it does not have, Triton says that it is unavailable.
            status = 404 if "unknown model" in said else (STATUSES | OF_NO_SUCH_CALL).get(err.code(), 500)
            raise refused(options, status, err.code().name, said, wait) from err
        try:
            config = await stub.ModelConfig(
                messages.ModelConfigRequest(name=options.model), timeout=options.timeout, metadata=metadata
            )
        except grpc.aio.AioRpcError:
            return ModelMetadata.parse(orjson.dumps(_plain(found)), None)
    return ModelMetadata.parse(orjson.dumps(_plain(found)), orjson.dumps(_plain(config.config)))


async def ask_statistics(
    address: Address, model: str, metadata: tuple[tuple[str, str], ...], timeout_s: float
) -> dict[str, Any] | None:
    """Triton's statistics of a model, as over HTTP; None where there are none."""
    async with grpc.aio.insecure_channel(str(address)) as channel:
        stub = services.GRPCInferenceServiceStub(channel)
        try:
            found = await stub.ModelStatistics(
                messages.ModelStatisticsRequest(name=model), timeout=timeout_s, metadata=metadata
            )
        except grpc.aio.AioRpcError:
            return None
    return _plain(found)


def _plain(message: Any) -> dict[str, Any]:
    """A message as the JSON of the HTTP side has it: names as they stand, 64-bit numbers as numbers."""

    def numbers(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: numbers(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [numbers(item, key) for item in value]
        if (
            isinstance(value, str)
            and value.lstrip("-").isdecimal()
            and key not in ("name", "version", "versions", "string_value")
        ):
            return int(value)
        return value

    data = json_format.MessageToDict(message, preserving_proto_field_name=True)
    found: dict[str, Any] = numbers(data)
    return found

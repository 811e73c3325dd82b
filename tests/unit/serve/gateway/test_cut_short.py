"""A model server that ends a stream, in order, before its last answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc import service_pb2_grpc

from serve.gateway.settings import Settings
from tests.integration.test_gateway_grpc import free_port
from tests.serve_http import gateway, in_loop, scripted_server
from tests.unit.serve.gateway.test_upstream import echo

FINAL = "triton_final_response"


@pytest.mark.parametrize(("numbers", "whole"), [((), False), ((0, 1), False), ((0, 1, 2), True)])
@in_loop
async def test_is_no_end_like_others(numbers: tuple[int, ...], whole: bool) -> None:
    async def answer(requests: AsyncIterator[bytes], _: Any) -> AsyncGenerator[bytes]:
        async for _request in requests:
            for number in numbers:
                response = messages.ModelStreamInferResponse()
                response.infer_response.model_name, response.infer_response.id = "m", str(number)
                response.infer_response.outputs.add(name="y", datatype="FP32", shape=[0])
                response.infer_response.parameters[FINAL].bool_param = number == 2
                yield response.SerializeToString()

    server = grpc.aio.server()
    handlers = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    told = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    port = free_port()
    async with scripted_server(echo) as triton:
        settings = Settings(
            upstream=(triton.url,), port=0, validate=False, grpc_upstream=(told,), grpc_port=port
        )  # fmt: skip
        async with gateway(settings), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            call = stub.ModelStreamInfer(iter([messages.ModelInferRequest(model_name="m")]), timeout=60)
            came: list[int] = []
            ended: grpc.aio.AioRpcError | None = None
            try:
                async for each in call:
                    came += [int(each.infer_response.id)]
            except grpc.aio.AioRpcError as err:
                ended = err
            assert came == list(numbers)
            assert (ended is None) == whole
            if ended is not None:
                assert ended.code() is grpc.StatusCode.INTERNAL
                assert "before its last answer" in str(ended.details())
    await server.stop(0)

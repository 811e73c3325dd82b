"""Infer requests over gRPC that no model takes: good ones with fields changed, and their bytes."""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections import Counter

import grpc
from hostile_common import Servers
from tritonclient.grpc import service_pb2 as messages

__all__ = ["attack_grpc", "good_grpc", "hostile_message"]

METHOD = "/inference.GRPCInferenceService/ModelInfer"
NUMBERS = (0, -1, 1, 4, 8, 2**31, 2**32, 2**40, 2**62, 2**63 - 1)
PARAMETERS = (
    "classification", "shared_memory_region", "binary_data_size", "sequence_id", "priority", "timeout", "x",
)  # fmt: skip
TYPES = ("FP32", "BYTES", "INT64", "BOOL", "FP16", "BF16", "", "x", "\0")


def good_message() -> messages.ModelInferRequest:
    """What "tiny" takes."""
    request = messages.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 4])
    request.raw_input_contents.append(struct.pack("<4f", 1, 2, 3, 4))
    return request


def text_message() -> messages.ModelInferRequest:
    """What "files" takes."""
    request = messages.ModelInferRequest(model_name="files")
    request.inputs.add(name="file", datatype="BYTES", shape=[1, 1])
    request.raw_input_contents.append(struct.pack("<I", 4) + b"abcd")
    return request


def hostile_message(draw: random.Random) -> bytes:
    """One to three changes to a good request; at times to its bytes, too."""
    request = draw.choice([good_message, text_message])()
    for _ in range(draw.randint(1, 3)):
        draw.choice(CHANGES)(request, draw)
    body = bytearray(request.SerializeToString())
    for _ in range(draw.choice([0, 0, 0, 1, 4])):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return bytes(body)


def _shape(request: messages.ModelInferRequest, draw: random.Random) -> None:
    del request.inputs[0].shape[:]
    request.inputs[0].shape.extend(draw.choices(NUMBERS, k=draw.choice([0, 1, 2, 3, 1000])))


def _type(request: messages.ModelInferRequest, draw: random.Random) -> None:
    request.inputs[0].datatype = draw.choice(TYPES)


def _raw(request: messages.ModelInferRequest, draw: random.Random) -> None:
    del request.raw_input_contents[:]
    for _ in range(draw.choice([0, 1, 1, 2])):
        prefix = struct.pack("<I", draw.choice([0, 3, 4, 5, 2**31, 2**32 - 1]))
        request.raw_input_contents.append(prefix + draw.randbytes(draw.randrange(16)))


def _contents(request: messages.ModelInferRequest, draw: random.Random) -> None:
    contents = request.inputs[0].contents
    contents.fp32_contents.extend([1.0] * draw.choice([0, 4, 5, 1000]))
    contents.bytes_contents.extend([b"abcd"] * draw.choice([0, 1, 2]))


def _parameter(request: messages.ModelInferRequest, draw: random.Random) -> None:
    name = draw.choice(
        ["classification", "shared_memory_region", "binary_data_size", "sequence_id", "priority", "timeout", "x"]
    )
    where = draw.choice([request.parameters, request.inputs[0].parameters])
    if draw.random() < 0.5:
        where[name].int64_param = draw.choice(NUMBERS)
    else:
        where[name].string_param = "x"


def _output(request: messages.ModelInferRequest, draw: random.Random) -> None:
    output = request.outputs.add(name=draw.choice(["logits", "head", "bytes", "nobody", ""]))
    if draw.random() < 0.5:
        output.parameters["classification"].int64_param = draw.choice(NUMBERS)


def _again(request: messages.ModelInferRequest, draw: random.Random) -> None:
    request.inputs.add().CopyFrom(request.inputs[0])
    request.inputs[-1].name = draw.choice([request.inputs[0].name, "y", ""])


CHANGES = (_shape, _type, _raw, _contents, _parameter, _output, _again)


async def attack_grpc(servers: Servers, key: bytes, seed: int, until: float) -> Counter[str]:
    """One hostile client; how it was answered."""
    draw, seen = random.Random(seed), Counter[str]()  # noqa: S311  a sample, not a secret
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        ask = channel.unary_unary(METHOD)
        while time.monotonic() < until:
            try:
                await ask(hostile_message(draw), metadata=(("x-api-key", key.decode()),), timeout=10)
                seen["OK"] += 1
            except grpc.aio.AioRpcError as err:
                seen[err.code().name] += 1
    return seen


async def good_grpc(servers: Servers, key: bytes, until: float) -> Counter[str]:
    """One good client; how it was answered."""
    seen, body = Counter[str](), good_message().SerializeToString()
    async with grpc.aio.insecure_channel(servers.grpc) as channel:
        ask = channel.unary_unary(METHOD)
        while time.monotonic() < until:
            try:
                answer = messages.ModelInferResponse.FromString(
                    await ask(body, metadata=(("x-api-key", key.decode()),), timeout=30)
                )
                right = answer.raw_output_contents[0] == struct.pack("<3f", 5, 6, 7)
                seen["OK" if right else "wrong"] += 1
            except grpc.aio.AioRpcError as err:
                seen[err.code().name] += 1
            await asyncio.sleep(0.02)
    return seen

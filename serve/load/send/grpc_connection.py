"""The generator's requests over gRPC: messages that were made before, sent and received as bytes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc

from serve.load.ask.check import Answer
from serve.load.send.connection import Connection, Flight
from serve.load.send.job import Job

__all__ = ["Channels", "GrpcConnection"]

METHOD = "/inference.GRPCInferenceService/ModelInfer"
MOST_CHANNELS = 8
"""Streams of one channel share a connection, and its flow control."""


class Channels:
    """A few channels that the connections share."""

    def __init__(self, job: Job) -> None:
        wanted = job.concurrency if job.arrivals is None else job.connections
        host = f"[{job.host}]" if ":" in job.host else job.host
        options = [
            ("grpc.max_receive_message_length", -1),
            ("grpc.max_send_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),  # also those that gRPC makes unseen
        ]
        self._channels = [
            grpc.aio.insecure_channel(f"{host}:{job.port}", options=options) for _ in range(min(wanted, MOST_CHANNELS))
        ]
        self._stubs = [channel.unary_unary(METHOD) for channel in self._channels]
        self._next = 0
        self._job = job

    def connection(self, ended: Callable[[Connection], None]) -> GrpcConnection:
        self._next += 1
        return GrpcConnection(self._stubs[self._next % len(self._stubs)], self._job, ended)

    async def close(self) -> None:
        await asyncio.gather(*(channel.close() for channel in self._channels))


class GrpcConnection:
    """One call at a time, on a channel that others share."""

    def __init__(self, stub: Any, job: Job, ended: Callable[[Connection], None]) -> None:
        self.flight: Flight | None = None
        self.kind = ""
        self.wire_bytes = 0
        self.answer: Answer | None = None
        self.retry_after_s: float | None = None
        self.refusals = 0
        self._stub = stub
        self._metadata = job.metadata
        self._timeout_s = job.timeout_s
        self._keep = job.check is not None
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    def send(self, flight: Flight, wire: bytes) -> None:
        self.flight = flight
        self.kind = ""
        self.wire_bytes = 0
        self.answer = None
        flight.sent_ns = time.perf_counter_ns()
        self._task = self._loop.create_task(self._ask(wire))

    def fail(self, kind: str) -> None:
        self.close()
        if self.flight is not None:
            self.kind = kind
            self._ended(self)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _ask(self, wire: bytes) -> None:
        try:
            body = await self._stub(wire, timeout=self._timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as err:
            self.kind = _kind(err)
        else:
            self.wire_bytes = len(body)
            if self._keep:
                self.answer = Answer(body)
        self._task = None
        self._ended(self)


def _kind(err: grpc.aio.AioRpcError) -> str:
    code = err.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "timeout"
    if code is grpc.StatusCode.UNAVAILABLE and "connect" in (err.details() or "").lower():
        return "refused"
    return f"grpc {code.name.lower()}"

"""OpenTelemetry traces, in W3C context, over OTLP.

A request's times are noted in plain numbers; spans are made of them when it is over, and only for requests that are
sampled: by whoever called, where its `traceparent` says so, else by chance.
"""

from __future__ import annotations

import os
import random
import re
import time
from typing import Any

from compress.errors import MissingExtraError
from serve import __version__

__all__ = ["Trace", "Tracing"]

# https://www.w3.org/TR/trace-context/#traceparent-header, of any version from 00 on
PARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
SAMPLED = 1


class Trace:
    """One sampled request: identifiers, and the times of its parts in nanoseconds of the epoch."""

    __slots__ = ("_at", "parent_id", "parts", "span_id", "started", "trace_id")

    def __init__(self, trace_id: int, parent_id: int | None) -> None:
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = random.getrandbits(64) or 1
        self.parts: list[tuple[str, int, int]] = []
        self.started = self._at = time.time_ns()

    def done(self, part: str) -> None:
        """The part that began when the one before was done has ended."""
        now = time.time_ns()
        self.parts.append((part, self._at, now))
        self._at = now

    @property
    def header(self) -> bytes:
        """`traceparent` for whoever is called from here."""
        return b"00-%032x-%016x-01" % (self.trace_id, self.span_id)


class Tracing:
    """Traces of one gateway.

    Args:
        endpoint: of a collector that speaks OTLP over HTTP, as http://127.0.0.1:4318.
        ratio: of requests that come without a decision of their caller's, 0 to 1.

    Raises:
        MissingExtraError: OpenTelemetry's SDK is not installed.
    """

    def __init__(self, endpoint: str, ratio: float) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as err:
            raise MissingExtraError("can't send traces", module="opentelemetry.sdk", extra="otel") from err
        self._ratio = ratio
        self._resource = Resource.create({"service.name": "gateway", "service.version": __version__})
        self._processor = BatchSpanProcessor(OTLPSpanExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=5))

    def begin(self, parent: bytes | None) -> Trace | None:
        """The trace of a request that is sampled.

        Args:
            parent: its `traceparent`.
        """
        if parent is not None and (match := PARENT.fullmatch(parent)):
            return Trace(int(match[1], 16), int(match[2], 16)) if int(match[3], 16) & SAMPLED else None
        if self._ratio < 1.0 and random.random() >= self._ratio:  # noqa: S311
            return None
        return Trace(int.from_bytes(os.urandom(16), "big") or 1, None)

    def end(self, trace: Trace, name: str, status: int, attributes: dict[str, Any]) -> None:
        """Send the spans of a request that is over.

        Args:
            name: of its span.
            status: HTTP's.
            attributes: of its span.
        """
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        def context(span_id: int, *, remote: bool = False) -> SpanContext:
            return SpanContext(trace.trace_id, span_id, remote, TraceFlags(TraceFlags.SAMPLED))

        own = context(trace.span_id)
        parent = None if trace.parent_id is None else context(trace.parent_id, remote=True)
        code = StatusCode.ERROR if status >= 500 else StatusCode.UNSET
        attributes = {**attributes, "http.response.status_code": status}
        spans = [
            ReadableSpan(
                name, own, parent, self._resource, attributes, kind=SpanKind.SERVER, status=Status(code),
                start_time=trace.started, end_time=time.time_ns(),
            )
        ]  # fmt: skip
        for part, begun, ended in trace.parts:
            kind = SpanKind.CLIENT if part == "upstream" else SpanKind.INTERNAL
            child = context(random.getrandbits(64) or 1)
            spans.append(ReadableSpan(part, child, own, self._resource, kind=kind, start_time=begun, end_time=ended))
        for span in spans:
            self._processor.on_end(span)

    def close(self) -> None:
        """Send what is left; takes a few seconds where the collector does not answer."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]

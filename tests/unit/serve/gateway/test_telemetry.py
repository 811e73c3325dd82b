"""Traces and the access log: what is told of a request, and what never is."""

from __future__ import annotations

import asyncio
import errno
import gzip
import io
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from compress.errors import ServerError
from serve.gateway.access.keys import add_key
from serve.gateway.observe.access_log import AccessLog
from serve.gateway.observe.telemetry import MAX_MODELS, Telemetry
from serve.gateway.observe.tracing import PARENT, Tracing
from serve.gateway.settings import Settings
from tests.serve_http import Scripted, gateway, scripted_server
from tests.unit.serve.gateway.test_upstream import INFER, ask, echo

PARENT_HEADER = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def spans_of(collector: Scripted) -> list[Any]:
    spans: list[Any] = []
    for request in collector.requests:
        assert request.target == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(unpack(request.body, request.headers)).resource_spans:
            for scope in resource.scope_spans:
                spans += scope.spans
    return spans


def unpack(body: bytes, headers: dict[str, str]) -> bytes:
    return gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body


def traced(*headers: tuple[bytes, bytes], ratio: float = 1.0, target: bytes = INFER) -> tuple[list[Any], Scripted]:
    """The spans of one request, and the Triton that it went to."""

    async def main() -> tuple[list[Any], Scripted]:
        async with scripted_server(echo) as triton, scripted_server(echo) as collector:
            settings = Settings(
                upstream=(triton.url,), port=0, otlp_endpoint=collector.url, trace_ratio=ratio, drain_delay_s=0
            )
            async with gateway(settings) as address:
                assert (await ask(address, target, b"{}", *headers)).status == 200
            return spans_of(collector), triton

    return uvloop.run(main())


def test_a_callers_trace_goes_on_through_the_gateway_to_triton() -> None:
    spans, triton = traced((b"traceparent", PARENT_HEADER))
    by_name = {span.name: span for span in spans}
    server = by_name["/v2/models/{model}/infer m"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert server.parent_span_id.hex() == "00f067aa0ba902b7"
    assert by_name.keys() == {server.name, "auth", "receive", "queue", "upstream"}
    for part in ("auth", "receive", "queue", "upstream"):
        assert by_name[part].parent_span_id == server.span_id
        assert server.start_time_unix_nano <= by_name[part].start_time_unix_nano
        assert by_name[part].end_time_unix_nano <= server.end_time_unix_nano
    assert triton.requests[0].headers["traceparent"] == f"00-{TRACE}-{server.span_id.hex()}-01"
    attributes = {each.key: each.value for each in server.attributes}
    assert attributes["http.response.status_code"].int_value == 200
    assert attributes["serve.model"].string_value == "m"


def test_a_caller_decides_whether_it_is_traced() -> None:
    spans, triton = traced((b"traceparent", PARENT_HEADER[:-1] + b"0"))
    assert spans == []
    assert triton.requests[0].headers["traceparent"] == (PARENT_HEADER[:-1] + b"0").decode()


@pytest.mark.parametrize(("ratio", "count"), [(0.0, 0), (1.0, 5)])
def test_others_are_traced_by_chance(ratio: float, count: int) -> None:
    spans, triton = traced(ratio=ratio)
    assert len(spans) == count
    assert ("traceparent" in triton.requests[0].headers) == bool(count)


@pytest.mark.parametrize(
    "parent",
    [b"", b"00", b"ff" + PARENT_HEADER[2:], PARENT_HEADER[:-2] + b"zz", PARENT_HEADER.upper(), b"00-" + b"0" * 32 + PARENT_HEADER[35:],
     b"00-" + PARENT_HEADER[3:36] + b"0" * 16 + b"-01"],
)  # fmt: skip
def test_a_parent_that_is_none_begins_a_trace_of_our_own(parent: bytes) -> None:
    assert not PARENT.fullmatch(parent)
    spans, _ = traced((b"traceparent", parent))
    assert len({span.trace_id for span in spans}) == 1
    assert TRACE not in {span.trace_id.hex() for span in spans}


def test_a_collector_that_is_gone_harms_no_request() -> None:
    async def main() -> None:
        async with scripted_server(echo) as triton:
            settings = Settings(
                upstream=(triton.url,), port=0, otlp_endpoint="http://127.0.0.1:9", trace_ratio=1.0, drain_delay_s=0
            )
            async with gateway(settings) as address:
                answers = await asyncio.gather(*(ask(address, INFER, b"{}") for _ in range(50)))
                assert {answer.status for answer in answers} == {200}

    uvloop.run(main())


def test_tracing_can_not_be_slow_when_nothing_is_sampled() -> None:
    tracing = Tracing("http://127.0.0.1:9", 0.0)
    assert tracing.begin(None) is None
    tracing.close()


def test_each_request_has_a_line_without_what_is_secret(tmp_path: Path) -> None:
    secret, _ = add_key(tmp_path / "keys.json", "shop")
    log = tmp_path / "access.log"

    async def main() -> None:
        async with scripted_server(echo) as triton:
            settings = Settings(
                upstream=(triton.url,), port=0, keys=tmp_path / "keys.json", access_log=log, drain_delay_s=0
            )
            async with gateway(settings) as address:
                key = (b"authorization", f"Bearer {secret}".encode())
                assert (await ask(address, INFER, b'{"private": "payload"}', key)).status == 200
                assert (await ask(address, INFER, b"{}", (b"x-api-key", b"sk-guess-of-somebody"))).status == 401
                assert (await ask(address, b"/v2/models/m/config?token=abc", None, key)).status == 200
                await ask(
                    address,
                    b"/v1/embeddings",
                    b'{"model": "nobody", "input": "a"}',
                    key,
                    (b"content-type", b"application/json"),
                )

    uvloop.run(main())
    text = log.read_text()
    for hidden in (secret, "payload", "guess", "token"):
        assert hidden not in text
    infer, refused, config, listed = map(json.loads, text.splitlines())
    assert (infer["route"], infer["model"], infer["key"], infer["status"]) == (
        "/v2/models/{model}/infer", "m", "shop", 200,
    )  # fmt: skip
    assert (infer["bytes_in"], infer["bytes_out"], infer["client"]) == (22, 22, "127.0.0.1")
    assert infer["ms"] > 0
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+\+00:00", infer["time"])
    assert (refused["status"], refused["key"]) == (401, "")
    assert (config["route"], config["status"]) == ("/v2/models/{model}/config", 200)
    assert (listed["route"], listed["bytes_in"]) == ("/v1/embeddings", 33)
    assert oct(log.stat().st_mode & 0o777) == "0o640"


def test_a_log_that_is_moved_away_goes_on_in_a_new_file(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    log.add(number=1)
    log.flush()
    (tmp_path / "access.log").rename(tmp_path / "access.log.1")
    log.add(number=2)
    log.close()
    assert [json.loads((tmp_path / name).read_text())["number"] for name in ("access.log.1", "access.log")] == [1, 2]


def test_a_log_to_a_standard_output_that_is_closed_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    with pytest.raises(ServerError, match="standard output is closed"):
        AccessLog(Path("-"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_drops_lines_and_nothing_else() -> None:
    log = AccessLog(Path("/dev/full"))
    for _ in range(3):
        log.add(number=1)
        log.flush()
    assert log.dropped == 3
    log.close()


@pytest.mark.parametrize("room", range(0, 60, 7))
def test_a_disk_that_takes_a_part_leaves_whole_lines_and_counts_the_rest(tmp_path: Path, room: int) -> None:
    log = AccessLog(tmp_path / "access.log")
    for number in (1, 2):
        log.add(number=number)
    whole = os.write
    left = room

    class Full(io.RawIOBase):
        """A raw file that takes so many bytes."""

        def write(self, data: Any) -> int:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            taken = bytes(data)[:left]
            left -= len(taken)
            return whole(file.fileno(), taken)

        def fileno(self) -> int:
            return file.fileno()

    file, log._file = log._file, Full()  # type: ignore[assignment]
    log.flush()
    left = 10_000
    log.add(number=3)
    log.close()
    file.close()
    lines = (tmp_path / "access.log").read_text().splitlines()
    read = []
    for line in lines:
        with suppress(ValueError):
            read.append(json.loads(line)["number"])
    assert read[-1] == 3, lines
    assert log.dropped == 3 - len(read)
    telemetry = Telemetry(log)
    assert f"gateway_access_log_dropped_total {log.dropped}.0" in telemetry.page().decode()


def test_lines_that_can_not_be_written_in_time_are_dropped(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "access.log")
    for number in range(10_500):
        log.add(number=number)
    assert log.dropped == 500
    log.close()


def test_a_log_that_can_not_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="can't write the access log"):
        AccessLog(tmp_path / "none" / "access.log")
    assert list(tmp_path.iterdir()) == []


def counted(telemetry: Telemetry, model: str, code: int) -> str:
    """The name that a request is counted under."""
    before = telemetry.requests.copy()
    telemetry.observe(telemetry.begin("/predict/{model}", model, "127.0.0.1"), code)
    ((label, _, _),) = telemetry.requests - before
    return label


def test_a_model_of_the_catalogue_counts_by_its_name_before_it_was_loaded_and_no_other_does() -> None:
    telemetry = Telemetry()
    assert counted(telemetry, "cold", 503) == "unknown"
    telemetry.catalogued = {"cold", "warm"}.__contains__
    assert counted(telemetry, "cold", 503) == "cold"
    assert counted(telemetry, "made-up", 404) == "unknown"
    telemetry.catalogued = lambda _: False  # it has left the repository
    assert counted(telemetry, "cold", 404) == "cold"


def test_a_catalogue_without_an_end_gives_no_labels_without_an_end() -> None:
    telemetry = Telemetry()
    telemetry.catalogued = lambda _: True
    names = {counted(telemetry, f"model{at}", 503) for at in range(MAX_MODELS + 10)}
    assert len(names) == MAX_MODELS + 1
    assert "unknown" in names

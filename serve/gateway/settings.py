"""How a gateway is set up."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from compress.errors import ServerError
from serve.http.message import Address

__all__ = ["ModelSettings", "Settings"]

POSITIVE = (
    "max_body_bytes", "timeout_s", "max_connections", "drain_timeout_s", "head_timeout_s", "body_timeout_s",
    "keep_alive_s", "max_clients", "memory_bytes", "write_timeout_s", "max_in_flight", "max_waiting",
    "health_interval_s", "left_timeout_s",
)  # fmt: skip
NOT_NEGATIVE = (
    "drain_delay_s", "max_elements", "latency_target_s", "max_wait_s", "feedback_answers", "feedback_s",
    "sequence_wait_s",
)  # fmt: skip


@dataclass(frozen=True)
class ModelSettings:
    """What may be set for one model in place of what holds for all.

    Raises:
        ServerError: a value that can't work.
    """

    max_in_flight: int | None = None
    latency_target_s: float | None = None
    max_wait_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise _unusable(f"{name} of a model is {value}", f"give {name} a value above 0")


@dataclass(frozen=True)
class Settings:
    """One gateway in front of one or several Tritons.

    Raises:
        ServerError: a value that can't work.
    """

    upstream: tuple[str, ...] = ("http://127.0.0.1:8000",)
    """Triton's HTTP endpoint, http://host:port; may be given again for more of them, which hold the same models."""

    discover: bool = False
    """Whether each upstream is a name that stands for a changing set of Tritons, such as a headless service of
    Kubernetes; it is looked up with each probe."""

    host: str = "127.0.0.1"
    """Address to listen on; only this machine reaches the default."""

    port: int = 8080
    """Port to listen on; 0 takes a free one."""

    grpc_port: int = 0
    """Port to listen on for gRPC, with the same keys and limits; 0 for none."""

    grpc_upstream: tuple[str, ...] = ()
    """Triton's gRPC endpoint, host:port; one for each upstream, in the same order."""

    keys: Path | None = None
    """File of API keys (`serve keys add`); without it nobody is asked for one."""

    state: Path = Path("rollouts.db")
    """State file of rollouts (`serve rollout`), which need not exist; the gateway follows it."""

    agree_module: Path | None = None
    """A Python file of yours with functions (candidate, baseline) -> bool, which `serve rollout start --agree
    OUTPUT:function=NAME` may name; run in a process of its own."""

    anonymous: bool = False
    """Let other machines ask without a key: without --keys, the gateway listens on loopback only unless this is set."""

    tls_certificate: Path | None = None
    """Certificate chain (PEM), for HTTPS."""

    tls_key: Path | None = None
    """Its private key (PEM)."""

    max_body_bytes: int = 64 * 1024 * 1024
    """Longest request body that is accepted, in bytes."""

    memory_bytes: int = 1024 * 1024 * 1024
    """Most bytes that bodies, answers and connections may take at a time; what is over it is answered with 503. The
    process itself, and the one that reads long JSON, come on top: `serve deploy render` adds them to a pod's limit."""

    validate: bool = True
    """Hold each request against its model's metadata, and let nothing else through. Off only for an upstream that tells
    none: what may end any server is refused all the same, but names, dimensions and batches are left to the server."""

    max_elements: int = 0
    """Most elements that an input tensor may have, whatever the model's dimensions allow; 0 for what they do."""

    timeout_s: float = 30.0
    """How long an answer may take in all, in seconds; a request's X-Request-Timeout-Ms can only shorten it."""

    left_timeout_s: float = 600.0
    """How long a model may go on with a stream that its client has left before it is told as stuck, and the place is
    given back, in seconds."""

    head_timeout_s: float = 10.0
    """How long a client may take to send a request's head, in seconds."""

    body_timeout_s: float = 30.0
    """How long a client may take to send a request's body, in seconds."""

    write_timeout_s: float = 30.0
    """How long a client may take to read an answer, in seconds; a second more for each 256 KiB that it has to read."""

    keep_alive_s: int = 75
    """How long an idle connection of a client's stays open, in seconds."""

    max_clients: int = 20000
    """Most connections of clients at a time; further ones are answered with 503."""

    max_address_share: float = 0.5
    """Largest share of the connections that one address may have (of IPv6: one /64), over HTTP and over gRPC; 1 where
    all clients come through one proxy."""

    max_connections: int = 768
    """Most connections to each Triton at a time, which models and keys share: a model has at most half of them, and a
    key while others ask. They are opened as requests need them; each is an open file here, and one of Triton's."""

    max_in_flight: int = 128
    """Most requests of one model with Triton at a time; adapted downwards when answers get slow."""

    latency_target_s: float = 0.0
    """Seconds that Triton may take under load before fewer requests are passed on; 0: 8 times its fastest answer, 50 ms
    at least."""

    max_wait_s: float = 0.5
    """Seconds that a request may wait for its turn before it is refused; 0: as the latency target."""

    max_waiting: int = 1024
    """Most requests of one model that wait for their turn."""

    sequence_wait_s: float = 5.0
    """Seconds that a sequence waits for a slot of the model's sequence batcher before those of a key that holds more
    than its share are ended for it; 0 for never."""

    max_sequence_share: float = 1.0
    """Largest share of the slots of a model's sequence batcher that one key may have through this gateway, one slot at
    least. Gateways in front of one Triton know nothing of each other's: with two of them, 0.33 leaves a third to
    others."""

    feedback_answers: int = 10_000
    """Most answers of models under release that clients may still speak of (POST /feedback); 0 for none. Of one key, a
    quarter of them."""

    feedback_s: float = 3600.0
    """How long they may, in seconds."""

    health_interval_s: float = 1.0
    """Seconds between probes of each Triton."""

    reuse_port: bool = False
    """Share the port with another gateway of the same user: start the new one, then stop the old one."""

    drain_delay_s: float = 0.25
    """How long to go on accepting requests after readiness turned false, for load balancers to notice and for clients
    to leave their connections, in seconds."""

    drain_timeout_s: int = 30
    """How long requests in flight may take to end when the gateway stops, in seconds."""

    access_log: Path | None = None
    """File for a line of JSON for each request, without payloads and keys; - for stdout."""

    otlp_endpoint: str = ""
    """Collector for OpenTelemetry traces, OTLP over HTTP, as http://127.0.0.1:4318; needs the extra [otel]."""

    trace_ratio: float = 0.01
    """Share of requests that are traced, of those whose caller has not decided."""

    models: Annotated[Mapping[str, ModelSettings], Parameter(parse=False)] = field(default_factory=dict)
    """Settings of single models, by name; from a file only."""

    def __post_init__(self) -> None:
        if not self.upstream:
            raise _unusable("no upstream is named", "name Triton's HTTP endpoint as in http://127.0.0.1:8000")
        for url in self.upstream:
            try:
                Address.parse(url)
            except ValueError as err:
                raise ServerError(
                    "the gateway has no upstream to talk to",
                    why=str(err),
                    mend="name Triton's HTTP endpoint as in http://127.0.0.1:8000",
                ) from err
        if len(set(self.upstream)) < len(self.upstream):
            raise _unusable("an upstream is named twice", "name each Triton once")
        for name in POSITIVE:
            if getattr(self, name) <= 0:
                raise _unusable(f"{name} is {getattr(self, name)}", f"give {name} a value above 0")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise _unusable(f"{name} is {getattr(self, name)}", f"give {name} a value of 0 or more")
        if not 0 < self.max_address_share <= 1:
            raise _unusable(f"max_address_share is {self.max_address_share}", "give a share above 0, and at most 1")
        if not 0 < self.max_sequence_share <= 1:
            raise _unusable(f"max_sequence_share is {self.max_sequence_share}", "give a share above 0, and at most 1")
        if not 0 <= self.trace_ratio <= 1:
            raise _unusable(f"trace_ratio is {self.trace_ratio}", "give a share, 0 to 1")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise _unusable(f"otlp_endpoint is {self.otlp_endpoint!r}", "name it as in http://127.0.0.1:4318")
        if not 0 <= self.port <= 65535:
            raise _unusable(f"port is {self.port}", "a port is 0 to 65535")
        if not 0 <= self.grpc_port <= 65535 or (self.grpc_port and self.grpc_port == self.port):
            raise _unusable(f"grpc_port is {self.grpc_port}", "a port is 1 to 65535, and not that of HTTP")
        if (self.grpc_port or self.grpc_upstream) and len(self.grpc_upstream) != len(self.upstream):
            raise _unusable(
                f"there are {len(self.upstream)} upstreams, and {len(self.grpc_upstream)} for gRPC",
                "give --grpc-upstream host:port once for each --upstream, in the same order",
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise _unusable("one of tls_certificate and tls_key is missing", "give both, or neither")
        for path in (self.tls_certificate, self.tls_key):
            if path is not None and not path.is_file():
                raise _unusable(f"there is no file {path}", "name the PEM file")
        if self.agree_module is not None and not self.agree_module.is_file():
            raise _unusable(f"there is no file {self.agree_module}", "name a Python file for --agree-module")
        if self.keys is None and not self.anonymous and not _loopback(self.host):
            raise _unusable(
                f"everybody who reaches {self.host} could use every model",
                "make keys with `serve keys add` and name them (keys = … in --gateway's file, SERVE_GATEWAY_KEYS; "
                "--keys of `serve gateway`), or allow it (anonymous = true, SERVE_GATEWAY_ANONYMOUS; --anonymous)",
            )


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unusable(why: str, mend: str) -> ServerError:
    return ServerError("the gateway can't be set up", why=why, mend=mend)

"""Everything but inference passes here: who may see it, and the headers that keep an answer where it belongs."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve.gateway.access.gate import Gate
from serve.gateway.access.identity import KEY_HEADERS, Identity
from serve.gateway.access.path import take_path
from serve.gateway.edge.extensions import STILL
from serve.gateway.edge.openai_errors import refusal
from serve.gateway.errors import BadRequestError, GatewayError

__all__ = ["GuardMiddleware", "cost_of", "key_headers"]

# Health for load balancers, and pages that hold nothing of the models'; what they ask for carries the key.
FREE = re.compile(
    r"/(?:healthz|readyz|v2/health/(?:live|ready)|docs(?:/[a-z.-]+)?|ui/[a-z]+\.(?:js|css)|openapi\.json)?"
)
OF_MODEL = re.compile(r"/(?:v2/models|predict|v1/models)/([^/]+)(?:/.*)?")
ALL_STATISTICS = "/v2/models/stats"
ASKS = re.compile(r"/predict/.+|.+/generate_stream")
LISTED = ("/v1/embeddings", "/v1/rerank")  # these name their model in their body
# What a question costs its key, in Triton's answers or about as much work here; anything else costs 1.
COSTS = (
    (re.compile(r"/v2/models/[^/]+(?:/versions/[^/]+)?(?:/example)?|/v1/models/[^/]+"), 2),
    (re.compile(r"/metrics|/ui/models|/ui/memory|/v1/models|/v2/models/stats|/v2/repository/index"), 5),
    (re.compile(r"/v2/repository/models/.*"), 10),
)
SAFE = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
HTTPS_ONLY = (b"strict-transport-security", b"max-age=31536000")


class GuardMiddleware:
    """Puts who asks into `scope["state"]["identity"]`; answers 401 and 403 itself."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self.app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def safe(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                present = {name for name, _ in headers}
                headers += [header for header in SAFE if header[0] not in present]
                if scope["scheme"] == "https":
                    headers.append(HTTPS_ONLY)
                message = {**message, "headers": headers}
            await send(message)

        try:
            self._check(scope)
        except GatewayError as err:
            await refusal(err, scope)(scope, receive, safe)
            return
        await self.app(scope, receive, safe)

    def _check(self, scope: Scope) -> None:
        path = take_path(scope)
        if FREE.fullmatch(path):
            return
        identity = self._gate.keys.identify(key_headers(scope["headers"]))
        state = scope.setdefault("state", {})
        state["identity"] = identity
        state[STILL] = lambda: self._check_rights(self._gate.keys.again(identity), path)
        if ASKS.fullmatch(path) or path in LISTED:
            identity.take()
        else:
            identity.ask(cost_of(path))
        self._check_rights(identity, path)

    def _check_rights(self, identity: Identity, path: str) -> None:
        if path == "/metrics":
            if not self._gate.keys.open:
                identity.check_metrics()
        elif path == "/feedback":
            if not self._gate.keys.open:
                identity.check_feedback()
        elif path == ALL_STATISTICS:
            if not self._gate.keys.open:
                identity.check_admin()
        elif match := OF_MODEL.fullmatch(path):
            identity.check_model(match[1])


def cost_of(path: str) -> int:
    """Of a question that is no inference."""
    return next((cost for pattern, cost in COSTS if pattern.fullmatch(path)), 1)


def key_headers(headers: list[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Those that carry a key.

    Raises:
        BadRequestError: one comes twice, with different values.
    """
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in KEY_HEADERS and found.setdefault(name, value) != value:
            raise BadRequestError(f"the header {name.decode()} comes twice, with different values")
    return found

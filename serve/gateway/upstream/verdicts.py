"""What a server's answer says of it, and of the model there."""

from __future__ import annotations

import re

from serve.gateway.upstream.outliers import Verdict
from serve.http.client import Response

__all__ = ["STOPPING", "is_leaving", "verdict_of"]

# Triton's sentences while it stops, and of models that it has unloaded already: whole, for a model may say their words.
_NAMED = rb"'?[\w.+:@=~/-]{1,300}'?"
STOPPING = re.compile(
    rb"(?:in ensemble '[^'\"\\]{0,300}', )?(?:Server (?:is )?not ready|Server exiting|Model (?:version )?not ready|"
    rb"Server is stopping, scheduler for model has stopped accepting new inference requests|"
    rb"Request for unknown model ?: (?:" + _NAMED + rb" )?(?:version -?[0-9]+ )?"
    rb"(?:is not found|is not at ready state|has no available versions)|"
    + _NAMED
    + rb" version -?[0-9]+ is not at ready state)\.?"
)
MOST_SAID = 2048


def verdict_of(answer: Response) -> Verdict:
    """What an answer says of the model at this server."""
    if is_leaving(answer) or answer.status in (502, 503, 504):
        return Verdict.GATEWAY_FAILURE
    return Verdict.SERVER_ERROR if answer.status >= 500 else Verdict.GOOD


def is_leaving(answer: Response) -> bool:
    """Whether this is how Triton turns requests away when it stops, or does not have the model."""
    return answer.status in (400, 404, 503) and _says_stopping(answer.body)


def _says_stopping(body: bytes) -> bool:
    if len(body) > MOST_SAID:
        return False
    error = re.fullmatch(rb'\s*\{"error":\s*"([^"]*)"\}\s*', body)
    return STOPPING.fullmatch(body.strip() if error is None else error[1]) is not None

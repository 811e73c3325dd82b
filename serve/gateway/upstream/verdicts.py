"""What a server's answer says of it, and of the model there."""

from __future__ import annotations

import re
from collections.abc import Callable

from serve.gateway.upstream.outliers import Verdict
from serve.http.body import GrowingBody
from serve.http.client import Response

__all__ = ["HURRY", "STOPPING", "is_leaving", "verdict_of", "was_hurried"]

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
EXPIRED = re.compile(rb"(?:in ensemble '[^'\"\\]{0,300}', )?Request timeout expired\.?")
HURRY = b'"timeout":'  # the parameter, as the gateway writes JSON: a text that says so has other quotes
MOST_SAID = 2048


def verdict_of(answer: Response, body: bytes | GrowingBody = b"") -> Verdict:
    """What an answer says of the model at this server.

    Args:
        body: of the request, as it went to Triton.
    """
    if answer.status == 503 and was_hurried(answer.body, lambda: HURRY in body):
        return Verdict.NOTHING
    if is_leaving(answer) or answer.status in (502, 503, 504):
        return Verdict.GATEWAY_FAILURE
    return Verdict.SERVER_ERROR if answer.status >= 500 else Verdict.GOOD


def is_leaving(answer: Response) -> bool:
    """Whether this is how Triton turns requests away when it stops, or does not have the model."""
    return answer.status in (400, 404, 503) and _says(STOPPING, answer.body)


def was_hurried(told: bytes, chosen: Callable[[], bool]) -> bool:
    """Whether a request left the model's queue because its client gave it too little time there.

    Such an end says nothing of the server, as a client's own deadline does not.

    Args:
        told: Triton's words, or the JSON with them, of an answer of 503.
        chosen: tells whether the request says for how long it may wait; else the model's configuration says so. It is
            asked only where the words are those: it looks through the request.
    """
    return _says(EXPIRED, told) and chosen()


def _says(sentence: re.Pattern[bytes], told: bytes) -> bool:
    if len(told) > MOST_SAID:
        return False
    error = re.fullmatch(rb'\s*\{"error":\s*"([^"]*)"\}\s*', told)
    return sentence.fullmatch(told.strip() if error is None else error[1]) is not None

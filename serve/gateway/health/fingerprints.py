"""What is told of a request: its key, its model, and a fingerprint of what it says to it."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from serve.http.body import GrowingBody

__all__ = ["LONG_BYTES", "Suspect", "suspect_of"]

LONG_BYTES = 256 * 1024  # of bodies that are digested beside the event loop
_OF_QUEUES = frozenset(("timeout", "priority", "binary_data_output"))  # no model sees these
_OF_INPUT = frozenset(("binary_data_size", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"))


@dataclass(frozen=True)
class Suspect:
    """A request by what may be told of it.

    Attributes:
        key: the id of its key.
        model: that was asked.
        fingerprint: of what it says, in hex; "" for one that had not come to its end.
    """

    key: str
    model: str
    fingerprint: str

    def __str__(self) -> str:
        key = f"key {self.key}" if self.key else "no key"
        return f"{self.model} ({key}, fingerprint {self.fingerprint or 'unknown'})"


def suspect_of(key: str, model: str, body: bytes | GrowingBody) -> Suspect:
    """The request as a suspect.

    Args:
        key: the id of its key.
        model: that is asked.
        body: that it sends; one that is not whole, or empty, has no fingerprint.
    """
    if isinstance(body, GrowingBody):
        if not body.whole:
            return Suspect(key, model, "")
        body = body.so_far()
    if not body:
        return Suspect(key, model, "")
    digest = hashlib.blake2b(model.encode() + b"\0" + _essence(body), digest_size=12)
    return Suspect(key, model, digest.hexdigest())


def _essence(body: bytes) -> bytes:
    """What a request says to the model: without its id, and without what is read by queues alone.

    Long ones are taken as they are, and so is what can't be read.
    """
    if len(body) > LONG_BYTES:
        return body
    if body.lstrip()[:1] == b"{":
        with suppress(ValueError, TypeError, AttributeError, KeyError, RecursionError):
            text = body.decode("latin-1")  # raw tensors may follow
            asked, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
            return orjson.dumps(_plain(asked), option=orjson.OPT_SORT_KEYS) + body[end:]
    with suppress(Exception):  # protobuf's DecodeError, whose class depends on its implementation
        from tritonclient.grpc import service_pb2 as messages

        message = messages.ModelInferRequest()
        message.ParseFromString(body)
        for field in ("id", "model_name", "model_version"):  # another may answer for the name
            message.ClearField(field)
        for name in _OF_QUEUES:
            message.parameters.pop(name, None)
        for tensor in message.inputs:
            for name in set(tensor.parameters) - _OF_INPUT:
                del tensor.parameters[name]
        found: bytes = message.SerializeToString(deterministic=True)
        return found
    return body


def _plain(asked: dict[str, Any]) -> dict[str, Any]:
    """A request's JSON, but for its id and the parameters that no model sees."""
    found = {name: value for name, value in asked.items() if name in ("inputs", "outputs", "parameters")}
    found["parameters"] = {
        name: value for name, value in (asked.get("parameters") or {}).items() if name not in _OF_QUEUES
    }
    found["inputs"] = [
        item | {"parameters": {k: v for k, v in (item.get("parameters") or {}).items() if k in _OF_INPUT}}
        for item in asked["inputs"]
    ]
    return found

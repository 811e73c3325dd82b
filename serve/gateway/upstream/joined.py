"""Binary requests of one form as one, and its answer as theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import orjson

from serve.gateway.oip.contract import ITEM_BYTES
from serve.gateway.oip.protocol import BINARY_HEADER
from serve.http.client import Response

__all__ = ["Form", "split"]


@dataclass(frozen=True)
class Form:
    """What requests that can be joined have in common.

    Attributes:
        head: the JSON that they begin with.
        batch: items of each.
        sizes: bytes of each input, in the order in which they follow the head.
    """

    head: bytes
    batch: int
    sizes: tuple[int, ...]
    request: dict[str, Any]

    @classmethod
    def read(cls, head: bytes) -> Self | None:
        """The form of requests with this head; None where they must go alone.

        Alone go those with an id or parameters of their own, with tensors in JSON, and whose answer would hold some;
        and those whose tensors do not lie where their shapes say, to the byte: texts, whose lengths a client writes.
        """
        try:
            request = orjson.loads(head)
            if not request.keys() <= {"inputs", "outputs", "parameters", "id"} or request.get("id"):
                return None
            binary = request.get("parameters", {}) == {"binary_data_output": True}
            outputs = request.get("outputs", [])
            if not binary and (request.get("parameters") or not outputs):
                return None
            if not all(each.get("parameters", {"binary_data": binary}) == {"binary_data": True} for each in outputs):
                return None
            batches = {each["shape"][0] for each in request["inputs"]}
            sizes = []
            for each in request["inputs"]:
                if "data" in each or each["parameters"].keys() != {"binary_data_size"}:
                    return None
                size = each["parameters"]["binary_data_size"]
                if type(size) is not int or size != _bytes_of(each["datatype"], each["shape"]):
                    return None
                sizes.append(size)
            if len(batches) != 1:
                return None
            return cls(head, batches.pop(), tuple(sizes), request)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            return None  # Triton says what is wrong with it

    def joined(self, count: int, tensors: Sequence[bytes]) -> tuple[bytes, int]:
        """A body for several requests, and the length of its head.

        Args:
            count: of requests.
            tensors: what followed the head of each.
        """
        inputs = [
            {
                **each,
                "shape": [count * each["shape"][0], *each["shape"][1:]],
                "parameters": {"binary_data_size": count * size},
            }
            for each, size in zip(self.request["inputs"], self.sizes, strict=True)
        ]
        head = orjson.dumps({**self.request, "inputs": inputs})
        if len(self.sizes) == 1:
            return b"".join((head, *tensors)), len(head)
        parts, at = [head], 0
        for size in self.sizes:
            parts += [each[at : at + size] for each in tensors]
            at += size
        return b"".join(parts), len(head)


def split(answer: Response, count: int, batch: int) -> list[Response] | None:
    """The answers to requests that were joined; None where the rows can't be told apart.

    Args:
        count: of requests.
        batch: items of each.
    """
    length = answer.header(BINARY_HEADER)
    if length is None:
        return None
    at = int(length)
    try:
        told = orjson.loads(answer.body[:at])
        outputs = told["outputs"]
        columns = []
        for each in outputs:
            size = each["parameters"]["binary_data_size"]
            raw = answer.body[at : at + size]
            at += size
            if each["shape"][0] != count * batch or not len(raw) == size == _bytes_of(each["datatype"], each["shape"]):
                return None
            share = size // count
            columns.append([raw[i * share : (i + 1) * share] for i in range(count)])
        if at != len(answer.body):
            return None
        head = orjson.dumps({**told, "outputs": [
            {**each, "shape": [batch, *each["shape"][1:]],
             "parameters": {**each["parameters"], "binary_data_size": len(column[0])}}
            for each, column in zip(outputs, columns, strict=True)
        ]})  # fmt: skip
        headers = [header for header in answer.headers if header[0] not in (BINARY_HEADER, b"content-length")]
        headers.append((BINARY_HEADER, b"%d" % len(head)))
        bodies = [b"".join((head, *rows)) for rows in zip(*columns, strict=True)] if columns else [head] * count
        return [Response(200, list(headers), body, len(body)) for body in bodies]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        return None


def _bytes_of(datatype: str, shape: Sequence[int]) -> int | None:
    """Bytes of a tensor; None where its shape does not say."""
    if datatype not in ITEM_BYTES or not all(type(dim) is int and dim >= 0 for dim in shape):
        return None
    return ITEM_BYTES[datatype] * math.prod(shape)

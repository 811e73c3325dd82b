"""A request for embeddings as OpenAI's API has it, and its answer: no web framework is loaded to read what is long."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import orjson

from serve.config.names import MODEL_NAME
from serve.gateway.edge.lengths import LONGEST, by_length
from serve.gateway.edge.openai_errors import ParameterError
from serve.gateway.errors import BadRequestError, UpstreamBrokenError
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import Message, build_request, parse_response
from serve.gateway.oip.tensors import ProtocolError, Tensor, object_array

__all__ = [
    "EMBEDDINGS",
    "MOST_TEXTS",
    "Asked",
    "Embedder",
    "Part",
    "asked_of",
    "embedder_of",
    "embeddings_of",
    "held_bytes",
    "parts_of",
    "unknown",
]

EMBEDDINGS = "embeddings"  # the task that `serve pack` writes into a model's parameters
MOST_TEXTS = 2048
TEXT_BYTES, PART_BYTES = 256, 2048  # that one takes beside its own, however short: objects, an answer's head
FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
NO_IDS = "embed the text itself; of LangChain, that is check_embedding_ctx_length=False"
OTHERS = "GET /v1/models lists those that do"


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        texts: in UTF-8.
        packed: each embedding is to be base64 of its numbers, float32, little endian.
        dimensions: numbers that an embedding is to have; None leaves it to the model.
    """

    model: str
    texts: tuple[bytes, ...]
    packed: bool
    dimensions: int | None


@dataclass(frozen=True)
class Embedder:
    """How a model of embeddings is asked.

    Attributes:
        input: the name of its texts; `output` that of its embeddings, `tokens` that of their lengths, "" for none.
        width: numbers of an embedding.
        most: texts that a request of Triton's may hold.
    """

    input: str
    output: str
    tokens: str
    width: int
    most: int


class Part(NamedTuple):
    """Some of a request's texts.

    Attributes:
        places: of each in the request.
        cost: bytes, each taken for as long as the longest, as far as the model may read.
    """

    places: tuple[int, ...]
    cost: int

    def message(self, texts: Sequence[bytes], by: Embedder) -> Message:
        """The infer request for them; made as its turn comes, as a list may have thousands.

        Args:
            texts: of the whole request.
            by: how the model is asked.
        """
        some = [texts[at] for at in self.places]
        return build_request((Tensor(by.input, "BYTES", object_array(some, by.input, [len(some), 1])),))


def asked_of(values: Any) -> Asked:
    """What the JSON of a request says; raises BadRequestError."""
    if not isinstance(values, dict):
        raise BadRequestError("the body is no JSON object", mend='send {"model": "...", "input": ["..."]}')
    for name in values:
        if name not in FIELDS:
            raise ParameterError(
                str(name)[:64], f"{str(name)[:64]!r} is not known here", why=f"known are {', '.join(FIELDS)}",
                mend="leave it out", code="unknown_parameter",
            )  # fmt: skip
    model = values.get("model")
    if not isinstance(model, str) or not model:
        raise ParameterError("model", "no model is named", mend=OTHERS, code="missing_required_parameter")
    if not re.fullmatch(MODEL_NAME, model):
        raise unknown(model)
    form = values.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise ParameterError("encoding_format", "encoding_format is neither 'float' nor 'base64'")
    wanted = values.get("dimensions")
    if wanted is not None and (type(wanted) is not int or wanted < 1):
        raise ParameterError("dimensions", "dimensions is no number above 0")
    if not isinstance(values.get("user"), str | None):
        raise ParameterError("user", "user is no text")
    if "input" not in values:
        raise ParameterError("input", "there is no input", mend="send texts", code="missing_required_parameter")
    return Asked(model, _texts(values["input"]), form == "base64", wanted)


def unknown(model: str) -> ParameterError:
    """There is no such model."""
    told = f"the model {model[:100]!r} does not exist"
    return ParameterError("model", told, mend=OTHERS, code="model_not_found", status=404)


def _texts(given: Any) -> tuple[bytes, ...]:
    several = given if isinstance(given, list) else [given]
    if not several:
        raise ParameterError("input", "input is empty", mend="send at least one text")
    if all(type(each) is int for each in several) or any(isinstance(each, list) for each in several):
        raise ParameterError(
            "input", "input holds token ids", why="the model takes texts, which its own tokenizer reads",
            mend=NO_IDS, code="token_ids_not_supported",
        )  # fmt: skip
    if len(several) > MOST_TEXTS:
        raise ParameterError(
            "input", "input is too long", why=f"it holds {len(several)} texts, and {MOST_TEXTS} are allowed",
            mend="send several requests",
        )  # fmt: skip
    found = []
    for at, each in enumerate(several):
        if not isinstance(each, str):
            raise ParameterError("input", f"input {at} is no text", mend="send a text, or a list of texts")
        if not each.strip():
            raise ParameterError("input", f"input {at} is empty", mend="send a text that is not white space alone")
        found.append(each.encode("utf-8"))
    return tuple(found)


def embedder_of(model: ModelMetadata) -> Embedder | None:
    """How a model is asked for embeddings; None where it gives none of texts."""
    if model.task != EMBEDDINGS or not model.batched or len(model.inputs) != 1:
        return None
    (text,) = model.inputs
    rows = [each for each in model.outputs if each.datatype == "FP32" and len(each.shape) == 2 and each.shape[1] > 0]
    if text.datatype != "BYTES" or text.shape != (-1, 1) or len(rows) != 1:
        return None
    counts = [each.name for each in model.outputs if each.name == "tokens" and each.datatype == "INT32"]
    return Embedder(text.name, rows[0].name, next(iter(counts), ""), rows[0].shape[1], max(1, model.max_batch_size))


def parts_of(texts: Sequence[bytes], by: Embedder, budget: int) -> list[Part]:
    """Parts of like length, of at most as many texts as the model takes at once, and of at most `budget` bytes.

    A part's bytes are as of `by_length`, which makes them.
    """
    return [
        Part(tuple(places), len(places) * min(len(texts[places[0]]), LONGEST))
        for places in by_length(texts, by.most, budget)
    ]


def held_bytes(texts: Sequence[bytes], parts: Sequence[Part]) -> int:
    """What a list makes the gateway hold until it is answered, besides its answers' numbers."""
    return sum(map(len, texts)) + TEXT_BYTES * len(texts) + PART_BYTES * len(parts)


def embeddings_of(
    answers: Sequence[tuple[bytes, bytes | None]],
    by: Embedder,
    model: str,
    places: Sequence[Sequence[int]],
    packed: bool,
) -> bytes:
    """The answer, as JSON.

    Args:
        answers: Triton's, each with its header that says how long its JSON is.
        model: the name that was asked.
        places: that the texts of each answer have in the request.
        packed: see `Asked`.

    Raises:
        UpstreamBrokenError: an answer can't be read, or is not of so many texts.
    """
    rows: list[Any] = [None] * sum(map(len, places))
    tokens = 0
    for (body, length), at in zip(answers, places, strict=True):
        try:
            result = parse_response(body, int(length) if length is not None else None)
        except ValueError as err:
            why = str(err) if isinstance(err, ProtocolError) else "its header length is not a number"
            raise UpstreamBrokenError("the model server's answer can't be read", why=why) from err
        outputs = {tensor.name: tensor.data for tensor in result.outputs}
        found = outputs.get(by.output)
        if found is None or found.shape[1:] != (by.width,) or not np.isfinite(found).all():
            why = f"its {by.output!r} is not {by.width} numbers for each text"
            raise UpstreamBrokenError("the model's answer is no embeddings", why=why)
        if len(found) != len(at):
            raise UpstreamBrokenError(
                "the model's answer is no embeddings", why=f"{len(found)} came for {len(at)} texts"
            )
        for place, row in zip(at, np.ascontiguousarray(found, "<f4"), strict=True):
            rows[place] = row
        tokens += int(outputs[by.tokens].sum()) if by.tokens in outputs else 0
    data = [
        {
            "object": "embedding",
            "index": at,
            "embedding": base64.b64encode(row.tobytes()).decode("ascii") if packed else row,
        }
        for at, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps(
        {"object": "list", "data": data, "model": model, "usage": usage}, option=orjson.OPT_SERIALIZE_NUMPY
    )

"""A request for embeddings as OpenAI's API has it, and its answer: no web framework is loaded to read what is long."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import orjson

from serve.gateway.edge.listed_values import (
    OTHERS,
    TritonAnswer,
    check_number,
    list_of,
    model_of,
    rows_of,
    tokens_of,
    unknown,
    values_of,
)
from serve.gateway.edge.openai_errors import ParameterError
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.oip.protocol import Message, build_request
from serve.gateway.oip.tensors import Tensor, object_array

__all__ = ["EMBEDDINGS", "Asked", "Embedder", "asked_of", "embedder_of", "embeddings_of", "fitting"]

EMBEDDINGS = "embeddings"  # the task that `serve pack` writes into a model's parameters
FIELDS = ("model", "input", "encoding_format", "dimensions", "user")
UNIT = 1e-3  # of a length that is 1 but for rounding, in half precision or INT8
NO_IDS = "embed the text itself; of LangChain, that is check_embedding_ctx_length=False"


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

    @property
    def sizes(self) -> list[int]:
        """Bytes of each."""
        return [len(text) for text in self.texts]

    @property
    def held(self) -> int:
        """Bytes of all."""
        return sum(map(len, self.texts))

    def kept(self) -> Self:
        """Without the texts, which no answer holds."""
        return replace(self, texts=())


@dataclass(frozen=True)
class Embedder:
    """How a model of embeddings is asked.

    Attributes:
        input: the name of its texts; `output` that of its embeddings, `tokens` that of their lengths, "" for none.
        width: numbers of an embedding.
        most: texts that a request of Triton's may hold.
        shorter: numbers that an embedding may be cut to, as one trained for it may (Kusupati et al. 2022, Matryoshka
            Representation Learning).
    """

    input: str
    output: str
    tokens: str
    width: int
    most: int
    shorter: tuple[int, ...] = ()

    def message(self, asked: Asked, places: Sequence[int]) -> Message:
        """The infer request for some of the texts."""
        some = [asked.texts[at] for at in places]
        return build_request((Tensor(self.input, "BYTES", object_array(some, self.input, [len(some), 1])),))


def asked_of(body: Any) -> Asked:
    """What the JSON of a request says; raises BadRequestError."""
    values = values_of(body, FIELDS, '{"model": "...", "input": ["..."]}')
    model = model_of(values)
    form = values.get("encoding_format")
    if form not in (None, "float", "base64"):
        raise ParameterError("encoding_format", "encoding_format is neither 'float' nor 'base64'")
    wanted = check_number(values, "dimensions")
    if not isinstance(values.get("user"), str | None):
        raise ParameterError("user", "user is no text")
    if "input" not in values:
        raise ParameterError("input", "there is no input", mend="send texts", code="missing_required_parameter")
    return Asked(model, _texts(values["input"]), form == "base64", wanted)


def _texts(given: Any) -> tuple[bytes, ...]:
    several = list_of(given if isinstance(given, list) else [given], "input", "texts")
    if all(type(each) is int for each in several) or any(isinstance(each, list) for each in several):
        raise ParameterError(
            "input", "input holds token ids", why="the model takes texts, which its own tokenizer reads",
            mend=NO_IDS, code="token_ids_not_supported",
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
    width = rows[0].shape[1]
    shorter = tuple(size for size in model.dimensions if 0 < size < width)
    return Embedder(text.name, rows[0].name, tokens_of(model), width, max(1, model.max_batch_size), shorter)


def fitting(asked: Asked, model: ModelMetadata | None) -> Embedder:
    """How a model is asked for that.

    Raises:
        ParameterError: it is not there, gives no embeddings, or none of so many numbers.
    """
    if model is None:
        raise unknown(asked.model)
    by = embedder_of(model)
    if by is None:
        told = f"the model {asked.model!r} gives no embeddings of texts"
        why = f"it takes {', '.join(map(str, model.inputs))}, and is not packed for the task 'embeddings'"
        raise ParameterError("model", told, why=why, mend=OTHERS, code="model_not_supported")
    if asked.dimensions not in (None, by.width, *by.shorter):
        told = f"the model {asked.model!r} gives no embeddings of {asked.dimensions} numbers"
        why = f"its own have {by.width}"
        if by.shorter:
            why += f", and may be cut to {', '.join(map(str, by.shorter))}"
        raise ParameterError("dimensions", told, why=why, mend="leave dimensions out")
    return by


def embeddings_of(
    answers: Sequence[TritonAnswer], places: Sequence[Sequence[int]], asked: Asked, by: Embedder
) -> tuple[bytes, int]:
    """The answer, as JSON, and its tokens; arguments as of `Form.write`.

    Raises:
        UpstreamBrokenError: an answer can't be read, or is not of so many texts.
    """
    rows, tokens = rows_of(answers, places, by, "embeddings")
    if asked.dimensions is not None and asked.dimensions < by.width:
        rows = [_cut(row, asked.dimensions) for row in rows]
    data = [
        {
            "object": "embedding",
            "index": at,
            "embedding": base64.b64encode(row.tobytes()).decode("ascii") if asked.packed else row,
        }
        for at, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    told = {"object": "list", "data": data, "model": asked.model, "usage": usage}
    return orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY), tokens


def _cut(row: Any, size: int) -> Any:
    """The first numbers of an embedding; of length 1 where the whole is."""
    found = np.ascontiguousarray(row[:size])
    length = float(np.linalg.norm(found.astype(np.float64)))
    if length and abs(float(np.linalg.norm(row.astype(np.float64))) - 1) < UNIT:
        found = (found / length).astype("<f4")
    return found

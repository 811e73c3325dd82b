"""A request to rank documents by a query, as Cohere's and Jina's APIs have it, and its answer: no web framework."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import orjson

from serve.gateway.edge.listed_values import (
    MOST_SAMPLES,
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

__all__ = ["LONGEST_QUERY", "Asked", "Judge", "asked_of", "fitting", "judge_of", "ranking_of"]

TASK = "sequence-classification"  # the task that `serve pack` writes into a model's parameters
FIELDS = ("model", "query", "documents", "top_n", "return_documents")
PAIR = ("text", "text_pair")  # the inputs of a model of pairs: the query, and a document
LONGEST_QUERY = 16_384  # bytes: it goes to the model with each document


@dataclass(frozen=True)
class Asked:
    """What a request asks for.

    Attributes:
        query: in UTF-8, as `documents` are.
        top_n: documents that the answer is to have at most.
        whole: whether it is to have their texts, too.
    """

    model: str
    query: bytes
    documents: tuple[bytes, ...]
    top_n: int
    whole: bool

    @property
    def sizes(self) -> list[int]:
        """Bytes of each pair."""
        return [len(self.query) + len(document) for document in self.documents]

    @property
    def held(self) -> int:
        """Bytes of all."""
        return len(self.query) + sum(map(len, self.documents))

    def kept(self) -> Self:
        """With the documents where the answer holds them."""
        return self if self.whole else replace(self, documents=())


@dataclass(frozen=True)
class Judge:
    """How a model that judges pairs is asked.

    Attributes:
        output: the name of its number for each pair; `tokens` that of their lengths, "" for none.
        most: pairs that a request of Triton's may hold.
    """

    output: str
    tokens: str
    most: int
    width: int = 1

    def message(self, asked: Asked, places: Sequence[int]) -> Message:
        """The infer request for some of the documents, each with the query."""
        pairs = [asked.query] * len(places), [asked.documents[at] for at in places]
        tensors = (
            Tensor(name, "BYTES", object_array(texts, name, [len(texts), 1]))
            for name, texts in zip(PAIR, pairs, strict=True)
        )
        return build_request(tuple(tensors))


def asked_of(body: Any) -> Asked:
    """What the JSON of a request says; raises BadRequestError."""
    values = values_of(body, FIELDS, '{"model": "...", "query": "...", "documents": ["..."]}')
    model = model_of(values)
    for name in ("query", "documents"):
        if name not in values:
            raise ParameterError(name, f"there is no {name}", mend="send it", code="missing_required_parameter")
    query = _text(values["query"], "query", "query")
    if len(query) > LONGEST_QUERY:
        why = f"it has {len(query):,} bytes, and {LONGEST_QUERY:,} are allowed"
        raise ParameterError("query", "query is too long", why=why, mend="send a shorter one")
    top_n, whole = check_number(values, "top_n"), values.get("return_documents")
    if not isinstance(whole, bool | None):
        raise ParameterError("return_documents", "return_documents is neither true nor false")
    documents = list_of(values["documents"], "documents", "documents")
    texts = tuple(_text(_bare(each), f"documents {at}", "documents") for at, each in enumerate(documents))
    return Asked(model, query, texts, min(top_n or MOST_SAMPLES, len(texts)), bool(whole))


def _bare(document: Any) -> Any:
    """A document may be an object with its text, and nothing else, as it would be ignored."""
    return document["text"] if isinstance(document, dict) and document.keys() == {"text"} else document


def _text(given: Any, name: str, param: str) -> bytes:
    if not isinstance(given, str):
        raise ParameterError(param, f"{name} is no text", mend="send a text")
    if not given.strip():
        raise ParameterError(param, f"{name} is empty", mend="send a text that is not white space alone")
    return given.encode("utf-8")


def judge_of(model: ModelMetadata) -> Judge | None:
    """How a model is asked to rank; None where it gives no single number for two texts."""
    if model.task != TASK or not model.batched or {each.name for each in model.inputs} != set(PAIR):
        return None
    if any(each.datatype != "BYTES" or each.shape != (-1, 1) for each in model.inputs):
        return None
    rows = [each.name for each in model.outputs if each.datatype == "FP32"]
    if len(rows) != 1 or not all(each.shape == (-1, 1) for each in model.outputs):
        return None
    return Judge(rows[0], tokens_of(model), max(1, model.max_batch_size))


def fitting(asked: Asked, model: ModelMetadata | None) -> Judge:
    """How a model is asked for that; raises ParameterError where it is not there, or does not rank."""
    if model is None:
        raise unknown(asked.model)
    by = judge_of(model)
    if by is None:
        told = f"the model {asked.model!r} does not rank texts"
        why = (
            f"it takes {', '.join(map(str, model.inputs))} and gives {', '.join(map(str, model.outputs))}, where a "
            f"cross-encoder of the task {TASK!r} takes {' and '.join(PAIR)}, and gives one number"
        )
        raise ParameterError("model", told, why=why, mend=OTHERS, code="model_not_supported")
    return by


def ranking_of(
    answers: Sequence[TritonAnswer], places: Sequence[Sequence[int]], asked: Asked, by: Judge
) -> tuple[bytes, int]:
    """The answer, as JSON, the best first and equals in the order that they came, and its tokens; arguments as of
    `Form.write`.

    A document's score is the sigmoid of the network's number, as cross-encoders are trained, and as both APIs give it.

    Raises:
        UpstreamBrokenError: an answer can't be read, or is not of so many documents.
    """
    rows, tokens = rows_of(answers, places, by, "ranking")
    numbers = np.concatenate(rows).astype(np.float64)
    best = np.argsort(-numbers, kind="stable")[: asked.top_n]
    scores = 1 / (1 + np.exp(-np.clip(numbers, -700, 700)))  # beyond, exp has no number
    results: list[dict[str, Any]] = []
    for at in best.tolist():
        document = {"document": {"text": asked.documents[at].decode()}} if asked.whole else {}
        results.append({"index": at, "relevance_score": float(scores[at]), **document})
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return orjson.dumps({"object": "list", "model": asked.model, "results": results, "usage": usage}), tokens

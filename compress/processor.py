"""What makes a model's inputs of texts or images, and names its classes: files that go with the model.

Standard library alone, as `compress.artifact`, which hands this to `serve`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from compress.vetting.paths import stands_inside

__all__ = ["EMBEDDINGS", "FILES", "IMAGE_SETTINGS", "LARGEST_FILE", "Columns", "Processor"]

KINDS = ("text", "image", "audio")
EMBEDDINGS = "embeddings"
TASKS = ("sequence-classification", "token-classification", "image-classification", EMBEDDINGS, "features", "logits")
IMAGE_SETTINGS = "preprocessor_config.json"
# Whatever a folder holds of these: tokenizers, image and audio processors.
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "spm.model",
    "sentence_bert_config.json", IMAGE_SETTINGS, "processor_config.json",
)  # fmt: skip
LARGEST_FILE = 128 << 20  # of these: a tokenizer.json of 260,000 tokens has a quarter
MOST_LABELS, LONGEST_LABEL = 100_000, 1000
PAIR = "text_pair"  # the column's name where an artifact was made of pairs, and nobody says another


@dataclass(frozen=True)
class Columns:
    """Columns of a table of texts: the text, what may stand beside it, and its label, where somebody says."""

    text: str = "text"
    pair: str | None = None
    label: str | None = None


@dataclass(frozen=True)
class Processor:
    """Files that make inputs, and what they are for.

    Attributes:
        kind: "text", "image" or "audio".
        task: what the model does with the inputs, of `TASKS`.
        files: names to SHA-256, hex; all lie in one folder.
        labels: the classes' names by number; empty where there are none.
        max_length: tokens of a text at most; None where it is no text.
        folder: where the files lie.
        columns: that texts are read from.
        pad_token_id: with which the model's configuration says texts are filled up; None where it does not say.
        multi_label: whether each class is a question of its own, so that a text may have several labels, or none.
        type_ids: whether its tokenizer passes token_type_ids; None where nobody has said.
    """

    kind: str
    task: str
    files: Mapping[str, str]
    labels: tuple[str, ...]
    max_length: int | None
    folder: Path
    columns: Columns = field(default=Columns(), compare=False)
    pad_token_id: int | None = None
    multi_label: bool = False
    type_ids: bool | None = None

    @property
    def joined(self) -> bool:
        """Whether a text and the one beside it are one input; an encoder of sentences embeds each by itself."""
        return self.columns.pair is not None and self.task != EMBEDDINGS

    @property
    def apart(self) -> bool:
        """Whether there are two texts to a row, and each is an input of its own."""
        return self.columns.pair is not None and self.task == EMBEDDINGS

    @property
    def digest(self) -> str:
        """Of all that makes inputs; names of classes, by which labels get their numbers, are no part of it."""
        told = "\n".join(f"{name} {sha256}" for name, sha256 in sorted(self.files.items()))
        filler = "" if self.pad_token_id is None else f" {self.pad_token_id}"
        types = " no type ids" if self.type_ids is False else ""
        return hashlib.sha256(f"{told}\n{self.max_length}{filler}{types}".encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "task": self.task,
            "files": dict(self.files),
            "labels": list(self.labels),
            "max_length": self.max_length,
            **({} if self.pad_token_id is None else {"pad_token_id": self.pad_token_id}),
            **({"multi_label": True} if self.multi_label else {}),
            **({"pair": True} if self.joined else {}),
            **({} if self.type_ids is None else {"token_type_ids": self.type_ids}),
        }

    @classmethod
    def from_dict(cls, data: Any, folder: Path) -> Self:
        """Of artifact.json.

        Raises:
            ValueError, TypeError, KeyError: it is malformed.
        """
        files, labels, longest = data["files"], data["labels"], data["max_length"]
        if data["kind"] not in KINDS or data["task"] not in TASKS:
            raise ValueError(f"its processor is of the kind {str(data['kind'])[:40]!r}, {str(data['task'])[:40]!r}")
        if type(files) is not dict or type(labels) is not list or len(labels) > MOST_LABELS:
            raise TypeError("its processor has no table of files, or no list of labels")
        for name, sha256 in files.items():
            if "/" in name or not stands_inside(name) or type(sha256) is not str:
                raise ValueError(f"its processor has the file {name[:40]!r}")
        if not all(type(label) is str and len(label) <= LONGEST_LABEL for label in labels):
            raise TypeError("a label of its processor is no text")
        if longest is not None and (type(longest) is not int or not 0 < longest < 1 << 31):
            raise ValueError("its processor's max_length is no number of tokens")
        pad = data.get("pad_token_id")
        if pad is not None and (type(pad) is not int or not 0 <= pad < 1 << 31):
            raise ValueError("its processor's pad_token_id is no token's number")
        several, pair, types = data.get("multi_label", False), data.get("pair", False), data.get("token_type_ids")
        if type(several) is not bool or type(pair) is not bool or (types is not None and type(types) is not bool):
            raise TypeError("its processor's multi_label, pair or token_type_ids is neither true nor false")
        columns = Columns(pair=PAIR if pair and data["task"] != EMBEDDINGS else None)
        return cls(
            data["kind"], data["task"], dict(files), tuple(labels), longest, folder, columns, pad, several, types
        )

"""How many rows the table has that an ONNX file looks ids up in, by its bytes, and how many ids a tokenizer makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from compress.artifact import Artifact
from compress.tokenizer.open import TOKENIZER, tokenizer_of
from compress.tokenizer.vocabulary import ids_of, too_many
from compress.vetting.wire import fields
from serve.hooks.last_node import GRAPH, INPUT, NODE, OPERATOR, OUTPUT, mapped, parts
from serve.hooks.packed.values import Array

__all__ = ["beyond_table", "table_rows", "tokenizer_ids"]

INITIALIZER, GRAPH_INPUT = 5, 11  # of GraphProto
ATTRIBUTE = 5  # of NodeProto
DIMS, INT64, TENSOR_NAME, RAW = 1, 7, 8, 9  # of TensorProto
ATTRIBUTE_NAME, NUMBER = 1, 3  # of AttributeProto
VALUE_NAME = 1  # of ValueInfoProto
SAME = {"Cast", "DequantizeLinear", "Flatten", "Identity", "QuantizeLinear", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators that leave ids what they are, and a table as many rows as it has."""


@dataclass
class _Graph:
    """What is looked at: nodes by what they make, and initializers' first dimensions and whole numbers by name."""

    nodes: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    lookups: list[tuple[str, str]] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)

    def source(self, name: str) -> str:
        """What a tensor is at its beginning, past what changes no value."""
        seen: set[str] = set()
        while name in self.nodes and name not in seen:
            seen.add(name)
            operator, given = self.nodes[name]
            if operator == "Gather" and len(given) == 2 and self.nodes.get(given[0], ("",))[0] == "Range":
                name = given[1]  # ids, looked up among all ids: which lets those through that there are
            elif operator in SAME and given:
                name = given[0]
            else:
                break
        return name

    def length(self, table: str) -> int | None:
        """Rows of a table; None where that is not known."""
        table = self.source(table)
        operator, given = self.nodes.get(table, ("", []))
        if operator == "Range" and len(given) == 3:
            return self.numbers.get(given[1])
        return self.rows.get(table)


def table_rows(path: Path) -> dict[str, int]:
    """Rows of the smallest table that each input of ids is looked up in, as far as the file tells; {} where it can't be
    read so.

    Args:
        path: an ONNX file that was vetted.
    """
    try:
        with mapped(path) as data:
            graph = _graph(data)
    except (OSError, ValueError):
        return {}
    found: dict[str, int] = {}
    for table, ids in graph.lookups:
        name, rows = graph.source(ids), graph.length(table)
        if name in graph.inputs and rows is not None:
            found[name] = min(rows, found.get(name, rows))
    return found


def beyond_table(source: Artifact, arrays: Mapping[str, Array]) -> str:
    """Which ids a table of the network has not, "" where it has all: positions are bounded otherwise."""
    rows = table_rows(source.model_path)
    for spec, array in zip(source.signature.inputs, arrays.values(), strict=True):
        if spec.name not in rows or array.dtype.kind not in "iu" or not array.size:
            continue
        least, most, known = int(array.min()), int(array.max()), rows[spec.name]
        if most >= known or least < -known:
            told = f"{spec.name} has the id {most if most >= known else least}, and the table that it is looked up in "
            told += f"has {known:,} rows, for 0 to {known - 1}"
            made = tokenizer_ids(source)
            return f"{told}; the artifact's {too_many(made, known)}" if made > known else told
    return ""


def tokenizer_ids(source: Artifact) -> int:
    """How many ids the tokenizer can make that came with an artifact; 0 where none did, or it can't be read."""
    if source.processor is None or TOKENIZER not in source.processor.files:
        return 0
    try:
        return ids_of(tokenizer_of(source.processor.folder / TOKENIZER))
    except (OSError, ValueError, RecursionError):
        return 0


def _graph(data: memoryview) -> _Graph:
    found = _Graph()
    for graph, end in parts(data, 0, len(data), GRAPH):
        for at, until in parts(data, graph, end, GRAPH_INPUT):
            found.inputs.update(_texts(data, at, until, VALUE_NAME))
        for at, until in parts(data, graph, end, INITIALIZER):
            _tensor(data, at, until, found)
        for at, until in parts(data, graph, end, NODE):
            operator = next(_texts(data, at, until, OPERATOR), "")
            given = list(_texts(data, at, until, INPUT))
            found.nodes |= dict.fromkeys(_texts(data, at, until, OUTPUT), (operator, given))
            if operator == "Gather" and len(given) == 2 and not _axis(data, at, until):
                found.lookups.append((given[0], given[1]))
    return found


def _tensor(data: memoryview, at: int, until: int, found: _Graph) -> None:
    name = next(_texts(data, at, until, TENSOR_NAME), "")
    dims = list(_numbers(data, at, until, DIMS))
    if dims:
        found.rows[name] = dims[0]
        return
    raw = [bytes(data[slice(*part)]) for part in parts(data, at, until, RAW)]
    told = [*_numbers(data, at, until, INT64), *(int.from_bytes(each, "little") for each in raw if len(each) == 8)]
    if told:
        found.numbers[name] = told[0]


def _axis(data: memoryview, at: int, until: int) -> int:
    """Of a Gather: 0 is by rows."""
    for start, end in parts(data, at, until, ATTRIBUTE):
        if next(_texts(data, start, end, ATTRIBUTE_NAME), "") == "axis":
            return next(_numbers(data, start, end, NUMBER), 0)
    return 0


def _texts(data: memoryview, at: int, until: int, wanted: int) -> Iterator[str]:
    return (str(data[slice(*part)], "utf-8") for part in parts(data, at, until, wanted))


def _numbers(data: memoryview, at: int, until: int, wanted: int) -> Iterator[int]:
    """Whole numbers of a field, each by itself or packed."""
    for number, start, inside, stop in fields(data, at, until):
        if number == wanted:
            values = list(_varints(data, start if inside is None else inside, stop))
            yield from values[1:] if inside is None else values  # the field's tag stands before a lone one


def _varints(data: memoryview, at: int, until: int) -> Iterator[int]:
    value = shift = 0
    for byte in data[at:until]:
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            yield value
            value = shift = 0

"""What is sent: a dataset in turn, the files of a folder, bodies made from a template."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from compress.errors import RepositoryError, ServerError
from compress.vetting.arrays import open_npz
from compress.vetting.texts import read_bytes, read_text
from serve.config.named import LARGEST_DATA
from serve.gateway.oip.metadata import ModelMetadata, TensorMetadata
from serve.gateway.oip.tensors import DATATYPES, Tensor
from serve.load.ask.check import word_of
from serve.load.options import LoadOptions
from serve.verify.arrays import LABEL_KEYS, LONGEST_TEXT, read_arrays
from serve.verify.samples import labelled_files

__all__ = ["Item", "batches_of", "bodies", "items_of_data", "weighted"]

MOST_BYTES = 256 * 1024 * 1024
DATA_MEND = (
    "give an .npz with an array for each input, a row for each request (np.savez), a .jsonl or .csv with such columns, "
    "or a folder of files"
)


@dataclass(frozen=True)
class Item:
    """One request's contents.

    Attributes:
        inputs: tensors, for a model; empty for a plain body.
        body: for anything else.
        rows: inferences that it asks for.
        weight: how often it is sent, relative to the others; 0 for in turn.
        labels: of its rows; empty where nothing is known.
        expected: values by output; empty where nothing is known.
    """

    inputs: tuple[Tensor, ...] = ()
    body: bytes = b""
    rows: int = 1
    weight: float = 0.0
    labels: tuple[str, ...] = ()
    expected: Mapping[str, Any] | None = None


def items_of_data(metadata: ModelMetadata | None, options: LoadOptions) -> list[Item]:
    """A dataset's rows, in turn.

    Args:
        metadata: of the model; None for bodies made from a template.

    Raises:
        ServerError: the data does not fit the model.
    """
    path = options.data
    assert path is not None  # noqa: S101
    try:
        if path.is_dir():
            return _of_files(path, metadata, options)
        arrays = read_arrays(path, [each.name for each in metadata.inputs] if metadata else ())
    except (OSError, ValueError, RepositoryError) as err:
        raise ServerError(f"can't send {path}", why=str(err), mend=DATA_MEND) from err
    key = next((key for key in LABEL_KEYS if key in arrays), None)
    labels = arrays.pop(key).reshape(-1) if key is not None else None
    lengths = {len(array) for array in (*arrays.values(), *([] if labels is None else [labels])) if array.ndim}
    if len(lengths) != 1 or not arrays:
        raise ServerError(f"can't send {path}", why="its arrays do not have the same number of rows", mend=DATA_MEND)
    count = lengths.pop()
    expected = _expected(options, count)
    if metadata is None:
        template = _template(options)
        return [
            Item(body=_filled(template, {name: array[row] for name, array in arrays.items()}),
                 labels=() if labels is None else (word_of(labels[row]),), expected=_rows(expected, [row]))
            for row in range(_fitting(arrays, count))
        ]  # fmt: skip
    found: list[Item] = []
    count = _fitting(arrays, count)
    for rows, weight in batches_of(options.batch):
        if rows > 1 and not metadata.batched:
            raise ServerError(
                f"can't send batches of {rows}", why="the model takes one item at a time", mend="leave --batch out"
            )
        for start in range(0, count, rows):
            picked = [(start + step) % count for step in range(rows)]
            inputs = tuple(_tensor(each, arrays, picked, metadata, path) for each in metadata.inputs)
            own = () if labels is None else tuple(word_of(labels[row]) for row in picked)
            found.append(Item(inputs, rows=rows, weight=weight, labels=own, expected=_rows(expected, picked)))
    return found


def bodies(options: LoadOptions) -> list[Item]:
    """Bodies for an address with a path: one, those of a folder, or none.

    Raises:
        ServerError: they can't be read.
    """
    if options.data is not None and options.body is not None:
        return items_of_data(None, options)
    if options.data is not None:
        if options.data.is_dir():
            return _of_files(options.data, None, options)
        raise ServerError(
            f"can't send {options.data}",
            why="an address with a path is sent bodies, not tensors",
            mend='give --body a template that says where the rows go, such as {"x": ${x}}',
        )
    if options.body is None:
        return [Item()]
    try:
        if options.body.is_dir():
            paths = sorted(path for path in options.body.iterdir() if path.is_file())
            found = [Item(body=read_bytes(path, LARGEST_DATA)) for path in paths]
        else:
            found = [Item(body=read_bytes(options.body, LARGEST_DATA, named=True))]
    except (OSError, ValueError) as err:
        why = getattr(err, "strerror", None) or str(err)
        raise ServerError(f"can't send {options.body}", why=why, mend="name a file, or a folder of files") from err
    if not found:
        raise ServerError(f"can't send {options.body}", why="there is no file in it", mend="name a folder of files")
    return found


def batches_of(texts: Sequence[str]) -> list[tuple[int, float]]:
    """Rows and weight of each kind of request; a weight of 0 where there is one kind."""
    found: list[tuple[int, float]] = []
    for text in texts or ("1",):
        rows, weight = weighted(text)
        if not rows.isdecimal() or int(rows) < 1:
            raise ServerError(f"can't send batches of {text!r}", why="that is no number of rows", mend="give --batch 8")
        found.append((int(rows), weight))
    return [(rows, weight if len(found) > 1 else 0.0) for rows, weight in found]


def weighted(text: str) -> tuple[str, float]:
    """A value and its weight: "8@3" is 8 with the weight 3, "8" with 1."""
    value, at, weight = text.rpartition("@")
    if not at:
        return text, 1.0
    try:
        number = float(weight)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e9:
        raise ServerError(f"can't read {text!r}", why=f"{weight!r} is no weight", mend="give a number over 0 after @")
    return value, number


def _of_files(folder: Path, metadata: ModelMetadata | None, options: LoadOptions) -> list[Item]:
    """Each file's content as the one BYTES input of a model, or as a body."""
    pairs = labelled_files(folder) or [(path, "") for path in sorted(folder.iterdir()) if path.is_file()]
    if not pairs:
        raise ServerError(f"can't send {folder}", why="there is no file in it", mend=DATA_MEND)
    if metadata is not None and [each.datatype for each in metadata.inputs] != ["BYTES"]:
        raise ServerError(
            f"can't send the files of {folder}",
            why=f"the model takes {', '.join(map(str, metadata.inputs))}",
            mend="give an .npz, or ask a model that takes one BYTES (with hooks)",
        )
    expected = _expected(options, len(pairs))
    found: list[Item] = []
    size = 0
    for row, (path, label) in enumerate(pairs):
        content = read_bytes(path, LARGEST_DATA)
        size += len(content)
        if size > MOST_BYTES and found:
            break
        labels = (label,) if label else ()
        if metadata is None:
            found.append(Item(body=content, labels=labels, expected=_rows(expected, [row])))
            continue
        data = np.empty([max(dim, 1) for dim in metadata.inputs[0].shape], dtype=np.object_)
        data.fill(content)
        tensor = Tensor(metadata.inputs[0].name, "BYTES", data)
        found.append(Item((tensor,), labels=labels, expected=_rows(expected, [row])))
    return found


def _fitting(arrays: Mapping[str, Any], count: int) -> int:
    """How many rows are kept: all of them, up to a bound on memory."""
    each = sum(array.nbytes for array in arrays.values()) / max(count, 1)
    return max(min(count, int(MOST_BYTES / max(each, 1))), 1)


def _tensor(
    wanted: TensorMetadata, arrays: Mapping[str, Any], rows: Sequence[int], metadata: ModelMetadata, path: Path
) -> Tensor:
    array = arrays.get(wanted.name)
    if array is None and len(metadata.inputs) == len(arrays) == 1:  # hooks may call it otherwise than the network does
        (only,) = arrays.values()
        array = only if (only.dtype.kind in "SUO") == (wanted.datatype == "BYTES") else None
    if array is None:
        raise ServerError(
            f"can't send {path}",
            why=f"the model takes {wanted}, the file has {', '.join(arrays)}",
            mend="give a folder of files, one for each request (in folders by label), or an array of this name"
            if wanted.datatype == "BYTES" and len(metadata.inputs) == 1
            else "name its arrays as the model's inputs",
        )
    part = array[list(rows)] if metadata.batched else array[rows[0]]
    if wanted.datatype == "BYTES":
        data = np.empty(part.shape, dtype=np.object_)
        for at, value in np.ndenumerate(part):
            data[at] = value if isinstance(value, bytes) else str(value).encode()
        part = data
    else:
        part = np.ascontiguousarray(part).astype(DATATYPES[wanted.datatype], casting="unsafe")
    if len(part.shape) == len(wanted.shape) - 1 and wanted.shape[-1] == 1:
        part = part[..., None]
    fits = len(part.shape) == len(wanted.shape) and all(
        dim in (-1, size) for dim, size in zip(wanted.shape, part.shape, strict=True)
    )
    if not fits:
        raise ServerError(
            f"can't send {path}",
            why=f"a request would hold {wanted.name}{list(part.shape)}, the model takes {wanted}",
            mend="give each row the model's own shape",
        )
    return Tensor(wanted.name, wanted.datatype, part)


def _expected(options: LoadOptions, count: int) -> dict[str, Any]:
    if not options.expect.endswith(".npz"):
        return {}
    try:
        arrays = open_npz(Path(options.expect), text=LONGEST_TEXT)
    except (OSError, ValueError) as err:
        raise ServerError(
            f"can't expect {options.expect}", why=str(err), mend="give an .npz with an array for each output"
        ) from err
    if any(not array.ndim or len(array) != count for array in arrays.values()):
        raise ServerError(
            f"can't expect {options.expect}",
            why="it has another number of rows than the data",
            mend="give one for each",
        )
    return arrays


def _rows(expected: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any] | None:
    return {name: array[list(rows)].tolist() for name, array in expected.items()} if expected else None


def _template(options: LoadOptions) -> string.Template:
    assert options.body is not None  # noqa: S101
    try:
        return string.Template(read_text(options.body, named=True))
    except (OSError, ValueError) as err:
        raise ServerError(f"can't read the template {options.body}", why=str(err), mend="name a text file") from err


def _filled(template: string.Template, row: Mapping[str, Any]) -> bytes:
    values = {name: orjson.dumps(_plain(value)).decode() for name, value in row.items()}
    try:
        return template.substitute(values).encode()
    except (KeyError, ValueError) as err:
        raise ServerError(
            "can't fill the template", why=f"it asks for {err}", mend=f"name one of {', '.join(row)}, or write $$ for $"
        ) from err


def _plain(value: Any) -> Any:
    found = np.asarray(value)
    return (np.char.decode(found, "utf-8", "replace") if found.dtype.kind == "S" else found).tolist()

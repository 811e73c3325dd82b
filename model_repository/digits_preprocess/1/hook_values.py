"""Values that hooks take and give, as tensors, and one hook at work: shared by `serve` and the model that Triton runs.

`serve pack` copies this file, as it is, beside hook_model.py. It needs numpy, and takes `packaging` where it is there.
"""

import importlib.metadata
import itertools
import operator
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

NUMPY_TYPES: Mapping[str, Any] = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_UINT16": np.uint16, "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64, "TYPE_INT8": np.int8, "TYPE_INT16": np.int16, "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}  # fmt: skip

BAD_INPUT = "bad input: "  # begins what is the client's fault in a stream, which carries no codes
YIELDED = 16  # answers that are looked at of a sample: there may be no end of them
NO_IMAGE = ("UnidentifiedImageError", "DecompressionBombError")  # of Pillow, which need not be installed


def to_value(item: Array, kind: str) -> Any:
    """One item of a tensor as the argument that a hook takes.

    Args:
        item: one item, without the batch dimension; strings are bytes objects.
        kind: "bytes", "str", "int", "float", "bool" or "scalar" (a numpy scalar), each from an item of one element;
            "array" leaves it as it is.
    """
    if kind == "array":
        return np.asarray(item)
    value = item[0]
    if kind == "bytes":
        return _as_bytes(value)
    if kind == "str":
        return _as_bytes(value).decode("utf-8")
    convert = {"int": int, "float": float, "bool": bool}.get(kind)
    return convert(value) if convert else value


def to_array(value: Any, kind: str, data_type: str, dims: Sequence[int]) -> Array:
    """What a hook gave as one item of a tensor.

    Args:
        value: what the hook gave.
        kind: as in `to_value`. An "array" must have the dtype; a list is taken for one of that dtype.
        data_type: Triton's name of the dtype.
        dims: the item's shape, -1 for a dimension that varies.

    Raises:
        TypeError, ValueError, OverflowError: it does not fit; the message says what was given and what is wanted.
    """
    dtype = np.dtype(NUMPY_TYPES[data_type])
    if kind != "array":
        return np.array([_scalar(value, kind, dtype)], dtype)
    strings = dtype == np.object_
    array = np.asarray(value) if isinstance(value, np.ndarray | np.generic) else _from_list(value, dtype)
    given = "string" if array.dtype.kind in "OSU" else array.dtype.name
    wanted = "string" if strings else dtype.name
    fits = array.ndim == len(dims) and all(want in (-1, have) for want, have in zip(dims, array.shape, strict=True))
    if given != wanted or not fits:
        shape = ",".join("?" if dim == -1 else str(dim) for dim in dims)
        raise ValueError(f"gave {given}[{','.join(map(str, array.shape))}], wanted {wanted}[{shape}]")
    if strings:
        array = np.array([_as_bytes(element) for element in array.ravel().tolist()], np.object_).reshape(array.shape)
    return array


def named(result: Any, names: Sequence[str], returns: str) -> dict[str, Any]:
    """A hook's result by the names of the tensors that it fills.

    Raises:
        TypeError: names are missing, or there are too many.
    """
    if isinstance(result, Mapping) and (returns == "mapping" or set(result) == set(names)):
        values = dict(result)
    elif returns == "value":
        values = {names[0]: result}
    elif returns == "tuple" and isinstance(result, tuple) and len(result) == len(names):
        values = dict(zip(names, result, strict=True))
    else:
        wanted = "dict with the keys" if returns == "mapping" else "named tuple with the fields"
        raise TypeError(f"gave {type(result).__name__}, wanted a {wanted} {', '.join(names)}")
    if set(values) != set(names):
        raise TypeError(f"gave {', '.join(map(str, values)) or 'nothing'}, wanted {', '.join(names)}")
    return values


def missing_requirements(requirements: Sequence[str]) -> list[str]:
    """The requirements that this Python does not meet, each with what it has instead.

    Versions are compared where the package `packaging` is there; without it a requirement is met by any version.
    """
    missing = []
    for text in requirements:
        name = re.split(r"[\s\[<>=!~;@(]", text.strip(), maxsplit=1)[0]
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = ""
        try:
            from packaging.requirements import Requirement
        except ImportError:
            fits = bool(have)
        else:
            requirement = Requirement(text)
            unneeded = requirement.marker is not None and not requirement.marker.evaluate()
            fits = unneeded or (bool(have) and requirement.specifier.contains(have, prereleases=True))
        if not fits:
            missing.append(f"{text} ({f'{have} is installed' if have else 'not installed'})")
    return missing


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise TypeError(f"gave {type(value).__name__}, wanted bytes or str")


def _from_list(value: Any, dtype: np.dtype[Any]) -> Array:
    """A list, nested or not, as an array of the dtype where its numbers allow it, and otherwise of their own."""
    array = np.asarray(value, np.object_ if dtype == np.object_ or _has_text(value) else None)
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        _check_range(int(array.min()), dtype)
        _check_range(int(array.max()), dtype)
    widens = (dtype.kind in "iu" and array.dtype.kind in "iu") or (dtype.kind == "f" and array.dtype.kind in "iuf")
    return array.astype(dtype) if widens else array


def _has_text(value: Any) -> bool:
    """Whether there is a text among the numbers: numpy would make texts of all, each as long as the longest."""
    level = [value]
    while level:
        kinds = set(map(type, level))
        if any(issubclass(kind, str | bytes) for kind in kinds):
            return True
        nested = any(issubclass(kind, list | tuple) for kind in kinds)
        level = [part for each in level if isinstance(each, list | tuple) for part in each] if nested else []
    return False


def _check_range(value: int, dtype: np.dtype[Any]) -> int:
    if not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:  # NumPy 1 would wrap it around
        raise OverflowError(f"gave {value}, too large for {dtype.name}")
    return value


def _scalar(value: Any, kind: str, dtype: np.dtype[Any]) -> Any:
    if kind in ("bytes", "str"):
        return _as_bytes(value)
    if dtype.kind == "b":
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"gave {type(value).__name__}, wanted bool")
        return value
    if isinstance(value, str | bytes):
        raise TypeError(f"gave {type(value).__name__}, wanted {kind if kind != 'scalar' else dtype.name}")
    return _check_range(operator.index(value), dtype) if dtype.kind in "iu" else float(value)


class Hook:
    """One hook function and what it takes and gives; tensors go in and out of it.

    Args:
        name: "preprocess" or "postprocess".
        function: the user's.
        spec: `arguments` (the kind of each, see `to_value`), `results` (kind, Triton's data type and dims of each, in
            order), `returns` ("value", "mapping" or "tuple"), `batchwise`, whether it takes a whole batch at a time,
            and `streams`, whether it yields any number of results for one item.
        file: the user's module, to find its lines in a traceback.
        admit: the user's, of `preprocess`: it takes the same arguments, each as a list with one for each item of a
            request, and raises ValueError where they are too much together, before any of them is worked on.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        spec: Mapping[str, Any],
        file: str,
        admit: Callable[..., None] | None = None,
    ) -> None:
        self.name, self.function, self.file = name, function, file
        self.admit = admit if name == "preprocess" else None
        self.arguments: Mapping[str, str] = spec["arguments"]
        self.results: Mapping[str, Sequence[Any]] = spec["results"]
        self.returns: str = spec["returns"]
        self.batchwise: bool = spec.get("batchwise", False)
        self.streams: bool = spec.get("streams", False)

    def one(self, item: Mapping[str, Array]) -> dict[str, Array]:
        """The hook's results for one item, without the batch dimension, each checked."""
        self._admit({name: item[name][None] for name in self.arguments})
        return self._one(item)

    def _one(self, item: Mapping[str, Array]) -> dict[str, Array]:
        return self._checked(self.function(**self._values(item)))

    def stream(self, item: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """The results that the hook yields for one item, as they come, each as of `one`."""
        answers = self.function(**self._values(item))
        if not isinstance(answers, Iterator):  # what wraps it gives something else than it says
            raise TypeError(f"it gives {type(answers).__name__}, where what it wraps yields")
        for result in answers:
            yield self._checked(result)

    def _values(self, item: Mapping[str, Array]) -> dict[str, Any]:
        return {name: to_value(item[name], kind) for name, kind in self.arguments.items()}

    def _checked(self, result: Any) -> dict[str, Array]:
        values = named(result, list(self.results), self.returns)
        return {name: self._array(name, values[name]) for name in self.results}

    def sample(self, item: Mapping[str, Array]) -> dict[str, Array]:
        """As `one`; a batch-wise hook is given the item as a batch of one. Of what is yielded, the first, if any; some
        more are checked.
        """
        if self.streams:
            first, *_ = [*itertools.islice(self.stream(item), YIELDED), {}]
            return first
        if not self.batchwise:
            return self.one(item)
        return {name: array[0] for name, array in self.many({name: item[name][None] for name in item}).items()}

    def many(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """The hook's results for a batch: called once when it is batch-wise, else for each item."""
        size = len(next(iter(tensors.values())))
        self._admit(tensors)
        if self.batchwise:
            return self._batch(tensors, size)
        answers = [self._one({name: array[index] for name, array in tensors.items()}) for index in range(size)]
        arrays = {}
        for name in self.results:
            parts = [answer[name] for answer in answers]
            if len({part.shape for part in parts}) > 1:
                raise TypeError(f"{name}: the items of one request must have one shape")
            arrays[name] = np.stack(parts)
        return arrays

    def _admit(self, tensors: Mapping[str, Array]) -> None:
        if self.admit is not None:
            kinds = self.arguments.items()
            self.admit(**{name: [to_value(item, kind) for item in tensors[name]] for name, kind in kinds})

    def _batch(self, tensors: Mapping[str, Array], size: int) -> dict[str, Array]:
        arguments = {
            name: tensors[name] if kind == "array" else [to_value(item, kind) for item in tensors[name]]
            for name, kind in self.arguments.items()
        }
        result = self.function(**arguments)
        if isinstance(result, list) and self.returns != "value":  # a list of answers, one for each item
            rows = [named(answer, list(self.results), self.returns) for answer in result]
            values: dict[str, Any] = {name: [row[name] for row in rows] for name in self.results}
        else:
            values = named(result, list(self.results), self.returns)
        arrays = {}
        for name, value in values.items():
            if not hasattr(value, "__len__") or len(value) != size:
                have = len(value) if hasattr(value, "__len__") else type(value).__name__
                raise TypeError(f"{name}: gave {have} for a batch of {size}")
            kind, data_type, dims = self.results[name]
            if kind == "array" and isinstance(value, np.ndarray) and data_type != "TYPE_STRING":
                arrays[name] = to_array(value, kind, data_type, (size, *dims))
            else:
                arrays[name] = np.stack([self._array(name, item) for item in value])
        return arrays

    def _array(self, name: str, value: Any) -> Array:
        try:
            return to_array(value, *self.results[name])
        except (TypeError, ValueError, OverflowError) as err:
            raise TypeError(f"{name}: {err}") from err

    def message(self, err: BaseException) -> str:
        """What the client is told: the hook, the error, and the line of the user's module that raised it."""
        lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == self.file]
        where = f" (line {lines[-1]})" if lines else ""
        return f"hooks.py {self.name}: {type(err).__name__}: {err}{where}"

    def at_fault(self, err: BaseException) -> bool:
        """Whether the client is (HTTP 400, not 500): preprocess has a ValueError, or Pillow's word of a bad image."""
        names = {kind.__name__ for kind in type(err).__mro__ if kind.__module__.partition(".")[0] == "PIL"}
        return self.name == "preprocess" and (isinstance(err, ValueError) or not names.isdisjoint(NO_IMAGE))

"""The Triton model that runs one hook of a user's module, item by item.

`serve pack` copies this file, as it is, into a model's version folder as model.py, beside the user's module hooks.py.
It needs numpy, Triton's triton_python_backend_utils and what the user's module needs, nothing else. What it has to know
stands in config.pbtxt: `input` and `output`, and these parameters:

    stage         "preprocess" or "postprocess", the function to call
    arguments     JSON object: the kind of each argument, see `to_value`
    results       JSON object: the kind of each result, in order, see `to_array`
    returns       "value" (one result, bare), "mapping" (by name) or "tuple" (in order)
    requirements  JSON list: what must be installed, as in requirements.txt
"""

import importlib.metadata
import json
import operator
import re
import sys
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

NUMPY_TYPES: Mapping[str, Any] = {
    "TYPE_BOOL": np.bool_, "TYPE_UINT8": np.uint8, "TYPE_UINT16": np.uint16, "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64, "TYPE_INT8": np.int8, "TYPE_INT16": np.int16, "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64, "TYPE_FP16": np.float16, "TYPE_FP32": np.float32, "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}  # fmt: skip


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
    array = np.asarray(value, dtype if dtype == np.object_ else None)
    if dtype.kind in "iu" and array.dtype.kind in "iu" and array.size:
        _check_range(int(array.min()), dtype)
        _check_range(int(array.max()), dtype)
    widens = (dtype.kind in "iu" and array.dtype.kind in "iu") or (dtype.kind == "f" and array.dtype.kind in "iuf")
    return array.astype(dtype) if widens else array


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


class TritonPythonModel:
    """What Triton's Python backend looks for in model.py."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Import the user's module.

        Args:
            args: of these, model_config (JSON) is read.
        """
        import triton_python_backend_utils

        self.backend = triton_python_backend_utils
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self.stage = parameters["stage"]
        self.arguments: dict[str, str] = json.loads(parameters["arguments"])
        self.results: dict[str, str] = json.loads(parameters["results"])
        self.returns = parameters["returns"]
        self.batched = int(config["max_batch_size"]) > 0
        self.outputs = {output["name"]: (output["data_type"], _item_dims(output)) for output in config["output"]}
        missing = missing_requirements(json.loads(parameters["requirements"]))
        if missing:
            raise RuntimeError(f"hooks.py needs {', '.join(missing)}")
        self.file = Path(__file__).with_name("hooks.py")
        module = sys.modules["user_hooks"] = types.ModuleType("user_hooks")
        module.__file__ = str(self.file)
        # Not by importlib: it would leave a __pycache__ in the model repository.
        exec(compile(self.file.read_bytes(), str(self.file), "exec"), vars(module))  # noqa: S102 - the user's module
        self.hook = getattr(module, self.stage)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer each request by itself, so that a failing hook fails only the request whose item it was given."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        utils = self.backend
        try:
            tensors = {name: utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.arguments}
            size = len(next(iter(tensors.values()))) if self.batched else 1
            items = [
                {name: (array[index] if self.batched else array) for name, array in tensors.items()}
                for index in range(size)
            ]
            answers = [self._run(item) for item in items]
            wanted = [name for name in request.requested_output_names() if name in self.outputs]
            arrays = {name: self._joined(name, [answer[name] for answer in answers]) for name in wanted}
        except (Exception, SystemExit) as err:
            code = utils.TritonError.INVALID_ARG if self._at_fault(err) else utils.TritonError.INTERNAL
            return utils.InferenceResponse(error=utils.TritonError(self._message(err), code))
        return utils.InferenceResponse([utils.Tensor(name, array) for name, array in arrays.items()])

    def _run(self, item: Mapping[str, Array]) -> dict[str, Array]:
        """The hook's results for one item, each checked."""
        arguments = {name: to_value(array, self.arguments[name]) for name, array in item.items()}
        values = named(self.hook(**arguments), list(self.results), self.returns)
        arrays = {}
        for name, kind in self.results.items():
            try:
                arrays[name] = to_array(values[name], kind, *self.outputs[name])
            except (TypeError, ValueError, OverflowError) as err:
                raise TypeError(f"{name}: {err}") from err
        return arrays

    def _joined(self, name: str, arrays: list[Array]) -> Array:
        if not self.batched:
            return arrays[0]
        if len({array.shape for array in arrays}) > 1:
            raise TypeError(f"{name}: the items of one request must have one shape")
        return np.stack(arrays)

    def _at_fault(self, err: BaseException) -> bool:
        """Whether the client is: a ValueError of preprocess says that the input is bad (HTTP 400, not 500)."""
        return self.stage == "preprocess" and isinstance(err, ValueError)

    def _message(self, err: BaseException) -> str:
        lines = [frame.lineno for frame in traceback.extract_tb(err.__traceback__) if frame.filename == str(self.file)]
        where = f" (line {lines[-1]})" if lines else ""
        return f"hooks.py {self.stage}: {type(err).__name__}: {err}{where}"


def _item_dims(tensor: Mapping[str, Any]) -> tuple[int, ...]:
    """An item's shape as the hook has it: `reshape` where there is one, for a scalar for each item."""
    dims = tensor["reshape"].get("shape", []) if tensor.get("reshape") is not None else tensor["dims"]
    return tuple(int(dim) for dim in dims)

"""A recording double of TensorRT's Python package, built strictly from the published names and signatures.

A name that is not in the listing is an AttributeError, a call that does not fit a listed signature is a TypeError. Behind
it, ONNX Runtime computes at the very addresses that the engine is given, so that wrong bindings give wrong numbers.
"""

from __future__ import annotations

import ctypes
import enum
import importlib.machinery
import inspect
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

LISTING = Path(__file__).parent / "golden/tensorrt_11_4.txt"
TYPES = {1: "FLOAT", 10: "HALF", 16: "BF16", 3: "INT8", 6: "INT32", 7: "INT64", 9: "BOOL", 2: "UINT8"}
NUMPY = {"FLOAT": np.float32, "HALF": np.float16, "INT8": np.int8, "INT32": np.int32, "INT64": np.int64,
         "BOOL": np.bool_, "UINT8": np.uint8}  # fmt: skip


def listing() -> tuple[dict[str, list[str]], dict[str, dict[str, list[inspect.Signature]]], dict[str, set[str]]]:
    """Enums; methods by class, with their signatures; properties and constants by class."""
    enums: dict[str, list[str]] = {}
    methods: dict[str, dict[str, list[inspect.Signature]]] = {}
    values: dict[str, set[str]] = {}
    cls = ""
    for line in LISTING.read_text(encoding="utf-8").splitlines():
        if line.startswith("class "):
            cls = line.split()[1]
            methods[cls], values[cls] = {}, set()
        elif line.startswith("  ") and "(property)" not in line and "(" in line:
            name = line.strip().partition("(")[0]
            methods[cls].setdefault(name, []).append(_signature(line.strip()))
        elif line.startswith("  "):
            values[cls].add(line.split()[0])
        elif match := re.fullmatch(r"(\w+): (.+)", line):
            enums[match[1]] = match[2].split(", ")
    return enums, methods, values


def _signature(line: str) -> inspect.Signature:
    inside = line[line.index("(") + 1 : line.rindex(")")]
    depth, parts, part = 0, [], ""
    for char in inside:
        depth += (char in "[(<") - (char in "])>")
        if char == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += char
    parts += [part] if part.strip() else []
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature(
        [
            inspect.Parameter(text.split(":")[0].strip(), kind, **({"default": None} if "=" in text else {}))
            for text in parts
        ]
    )


class Double:
    """The module.

    Attributes:
        calls: what was called and set, in order, as "Class.name".
        flags: what the builder's configuration was set to.
        fail: names of calls that answer as TensorRT does when it refuses.
    """

    def __init__(self, version: str = "11.4.0.106", *, renumbered: bool = False) -> None:
        enums, self._methods, self._values = listing()
        self.__version__ = version
        self.__spec__ = importlib.machinery.ModuleSpec("tensorrt", None)
        self.calls: list[str] = []
        self.state: dict[str, Any] = {}
        self.fail: set[str] = set()
        self.gpu = "a"
        for name, members in enums.items():
            numbers = {member: index + (1 if renumbered else 0) for index, member in enumerate(members)}
            setattr(self, name, enum.IntEnum(name, numbers))
        for name in ("Builder", "OnnxParser", "Runtime"):
            setattr(self, name, self._constructor(name))
        self.Logger = self._constructor("Logger")
        for level in ("VERBOSE", "INFO", "WARNING", "ERROR"):
            setattr(self.Logger, level, level)
        self.IProgressMonitor = type("IProgressMonitor", (), {})

    def _constructor(self, name: str) -> Any:
        def make(*given: Any, **named: Any) -> Object:
            self._check(name, "__init__", given, named)
            made: Object = Object(self, name, BEHAVIOURS[name]())
            made._behaviour.start(self, *given, **named)
            return made

        return make

    def make(self, name: str, behaviour: Any) -> Object:
        return Object(self, name, behaviour)

    def _check(self, cls: str, name: str, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.calls.append(f"{cls}.{name}")
        errors = []
        for signature in self._methods[cls][name]:
            try:
                signature.bind(*given, **named)
            except TypeError as err:
                errors.append(err)
            else:
                return
        raise TypeError(f"{cls}.{name}: {errors}")


class Object:
    """Something of a listed class: only its listed names are there."""

    def __init__(self, double: Double, cls: str, behaviour: Any) -> None:
        object.__setattr__(self, "_double", double)
        object.__setattr__(self, "_cls", cls)
        object.__setattr__(self, "_behaviour", behaviour)

    def __getattr__(self, name: str) -> Any:
        double, cls = self._double, self._cls
        if name in double._methods[cls]:
            real: Callable[..., Any] = getattr(self._behaviour, name)

            def call(*given: Any, **named: Any) -> Any:
                double._check(cls, name, given, named)
                return real(*given, **named)

            return call
        if name in double._values[cls]:
            return getattr(self._behaviour, name)
        raise AttributeError(f"TensorRT's {cls} has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._double._values[self._cls]:
            raise AttributeError(f"TensorRT's {self._cls} has no {name}")
        self._double.calls.append(f"{self._cls}.{name}=")
        self._double.state[name] = value
        setattr(self._behaviour, name, value)


class Behaviour:
    double: Double

    def start(self, double: Double, *_given: Any, **_named: Any) -> None:
        self.double = double


class Memory(bytes):
    """IHostMemory: read through the buffer protocol."""


class Builder(Behaviour):
    def create_network(self, flags: int = 0) -> Object:
        kind: Any = self.double.NetworkDefinitionCreationFlag  # type: ignore[attr-defined]
        assert flags == 1 << kind.STRONGLY_TYPED, "precision comes from the graph alone"
        return self.double.make("INetworkDefinition", Network())

    def create_builder_config(self) -> Object:
        config = Config()
        config.double = self.double
        return self.double.make("IBuilderConfig", config)

    def create_optimization_profile(self) -> Object:
        return self.double.make("IOptimizationProfile", Profile())

    def build_serialized_network(self, network: Object, config: Object) -> Memory | None:
        monitor = getattr(config._behaviour, "progress_monitor", None)
        if monitor is not None and not self._phases(monitor):
            return None
        if "build" in self.double.fail:
            return None
        profiles = [profile._behaviour.shapes for profile in config._behaviour.profiles]
        model = network._behaviour.model
        free = [v.name for v in model.graph.input if any(d.dim_param for d in v.type.tensor_type.shape.dim)]
        if any(set(free) - set(profile) for profile in profiles or [{}]):
            return None
        head: dict[str, Any] = {
            "profiles": profiles,
            "gpu": self.double.gpu,
            "verbosity": str(config._behaviour.profiling_verbosity),
        }
        head["host code"] = "VERSION_COMPATIBLE" in self.double.state.get("flags", [])
        return Memory(json.dumps(head).encode() + b"\n" + model.SerializeToString())

    @staticmethod
    def _phases(monitor: Any) -> bool:
        monitor.phase_start("Building Engine", None, 2)
        monitor.phase_start("Timing tactics", "Building Engine", 3)
        going = all(monitor.step_complete("Timing tactics", step) for step in range(3))
        monitor.phase_finish("Timing tactics")
        going = going and all(monitor.step_complete("Building Engine", step) for step in range(2))
        monitor.phase_finish("Building Engine")
        return going


class Network(Behaviour):
    model: onnx.ModelProto


class Parser(Behaviour):
    def start(self, double: Double, network: Object, _logger: Object) -> None:
        self.double, self._network, self.errors = double, network, list[Any]()

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def parse_from_file(self, model: str) -> bool:
        self._network._behaviour.model = onnx.load(model)
        self.errors = [
            node for node in self._network._behaviour.model.graph.node if node.op_type in ("MatMulInteger", "Det")
        ]
        return not self.errors

    def get_error(self, index: int) -> Object:
        return self.double.make("ParserError", ParserError(self.errors[index]))


class ParserError:
    def __init__(self, node: onnx.NodeProto) -> None:
        self._node = node

    def node_operator(self) -> str:
        return str(self._node.op_type)

    def node_name(self) -> str:
        return str(self._node.name)

    def desc(self) -> str:
        return "operator is not supported"


class Config(Behaviour):
    profiling_verbosity: Any = None

    def __init__(self) -> None:
        self.profiles: list[Object] = []
        self.cache: Object | None = None

    def set_flag(self, flag: Any) -> None:
        self.double.state.setdefault("flags", []).append(flag.name)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self.double.state[pool.name] = pool_size

    def add_optimization_profile(self, profile: Object) -> int:
        self.profiles.append(profile)
        low_best_high = profile._behaviour.shapes.values()
        fits = all(list(low) <= list(best) <= list(high) for low, best, high in low_best_high)
        return len(self.profiles) - 1 if fits else -1

    def create_timing_cache(self, serialized_timing_cache: bytes) -> Object:
        return self.double.make("ITimingCache", TimingCache(bytes(serialized_timing_cache) or self._own()))

    def set_timing_cache(self, cache: Object, ignore_mismatch: bool) -> bool:
        if cache._behaviour.data != self._own() and not ignore_mismatch:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Object | None:
        return self.cache

    def _own(self) -> bytes:
        return f"{self.double.__version__} {self.double.gpu}".encode()


class TimingCache:
    def __init__(self, data: bytes) -> None:
        self.data = data

    def serialize(self) -> Memory:
        return Memory(self.data)


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, list[list[int]]] = {}

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:  # noqa: A002  the listing's names
        self.shapes[input] = [list(min), list(opt), list(max)]


class Runtime(Behaviour):
    engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Object | None:
        head, _, model = bytes(serialized_engine).partition(b"\n")
        if json.loads(head)["gpu"] != self.double.gpu:
            return None
        if json.loads(head)["host code"] and not self.engine_host_code_allowed:
            return None  # as TensorRT does, which logs that host code is not allowed
        return self.double.make("ICudaEngine", Engine(self.double, json.loads(head), onnx.load_from_string(model)))


class Engine:
    device_memory_size_v2 = 1 << 20

    def __init__(self, double: Double, head: dict[str, Any], model: onnx.ModelProto) -> None:
        self.double, self.head, self.model = double, head, model
        self.inputs = {value.name: value for value in model.graph.input}
        self.tensors = self.inputs | {value.name: value for value in model.graph.output}

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return max(1, len(self.head["profiles"]))

    def get_tensor_name(self, index: int) -> str:
        return str(list(self.tensors)[index])

    def get_tensor_mode(self, name: str) -> Any:
        mode: Any = self.double.TensorIOMode  # type: ignore[attr-defined]
        return mode.INPUT if name in self.inputs else mode.OUTPUT

    def get_tensor_dtype(self, name: str) -> str:
        return "DataType." + TYPES[self.tensors[name].type.tensor_type.elem_type]

    def get_tensor_shape(self, name: str) -> list[int]:
        return [dim.dim_value or -1 for dim in self.tensors[name].type.tensor_type.shape.dim]

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[list[int]]:
        if not self.head["profiles"]:
            return [self.get_tensor_shape(name)] * 3
        found: list[list[int]] = self.head["profiles"][profile_index].get(name, [self.get_tensor_shape(name)] * 3)
        return found

    def create_engine_inspector(self) -> Object:
        return self.double.make("EngineInspector", Inspector(self))

    def create_execution_context(self) -> Object:
        return self.double.make("IExecutionContext", Context(self))

    def create_serialization_config(self) -> Object:
        return self.double.make("ISerializationConfig", Serialization())

    def serialize_with_config(self, arg0: Object) -> Memory:
        assert [flag.name for flag in arg0._behaviour.flags] == ["EXCLUDE_WEIGHTS"]
        return Memory(b"stripped")


class Serialization:
    def __init__(self) -> None:
        self.flags: list[Any] = []

    def set_flag(self, flag: Any) -> bool:
        self.flags.append(flag)
        return True


class Inspector:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def get_engine_information(self, format: Any) -> str:  # noqa: A002  the listing's name
        assert format.name == "JSON"
        text = {"QuantizeLinear": "Int8", "DequantizeLinear": "Int8"}
        layers = [
            {
                "Name": node.name,
                "LayerType": node.op_type,
                "Outputs": [{"Name": node.output[0], "Format/Datatype": f"Row major {text.get(node.op_type, 'FP32')}"}],
            }
            for node in self._engine.model.graph.node
        ]
        return json.dumps({"Layers": layers, "Bindings": list(self._engine.tensors)})


class Context:
    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile = engine, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.session = ort.InferenceSession(engine.model.SerializeToString(), providers=["CPUExecutionProvider"])

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.profile = profile_index
        self.engine.double.state["profile"] = profile_index
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        assert all(a <= size <= b for a, size, b in zip(low, shape, high, strict=True)), "inside the profile"
        self.shapes[name] = shape
        return True

    def get_tensor_shape(self, name: str) -> list[int]:
        batch = next(iter(self.shapes.values()))[0]
        return [size if size > 0 else batch for size in self.engine.get_tensor_shape(name)]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if "execute" in self.engine.double.fail:
            return False
        fed = {name: self._at(name, self.shapes[name]) for name in self.engine.inputs}
        names = [output.name for output in self.session.get_outputs()]
        for name, values in zip(names, self.session.run(names, fed), strict=True):
            self._at(name, values.shape)[...] = values
        return True

    def _at(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        kind: np.dtype[Any] = np.dtype(NUMPY[self.engine.get_tensor_dtype(name).partition(".")[2]])
        size = int(np.prod(shape)) * kind.itemsize
        buffer = (ctypes.c_char * size).from_address(self.addresses[name])
        found: np.ndarray[Any, Any] = np.frombuffer(memoryview(buffer), kind).reshape(shape)
        return found


BEHAVIOURS: dict[str, Any] = {"Builder": Builder, "OnnxParser": Parser, "Runtime": Runtime, "Logger": Behaviour}

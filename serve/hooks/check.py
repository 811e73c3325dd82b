"""Run a model's hooks and its network once, without a server: what `serve hooks check` shows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from compress.artifact import RUNTIME_EXTRAS, RUNTIME_NAMES, Artifact, Runtime
from compress.errors import MissingExtraError, RepositoryError
from compress.tokenizer.vocabulary import MEND
from compress.vetting.loops import SETTING, loop_seconds
from compress.vetting.texts import read_bytes
from serve.config.named import LARGEST_DATA
from serve.hooks.load import Hooks
from serve.hooks.module import Guarded
from serve.hooks.packed.values import Array, named, to_array
from serve.hooks.tables import beyond_table
from serve.hooks.types import HookTensor, of_spec

__all__ = ["Step", "UnprovenError", "check_hooks", "in_bfloat16", "nans", "run_network", "sample_of", "shown"]

SHOWN = 6  # elements of an array
LONGEST = 60  # characters of a text

# As the serving processes do: a runtime is no import of this package.
_NETWORK = """
import json, sys, time
import numpy as np
def ended(code, err):
    print(" ".join(str(err).split()) or type(err).__name__, file=sys.stderr)
    sys.exit(code)
given = np.load(sys.argv[2])
inputs, names = json.loads(sys.argv[4])
feed = {name: given[str(i)] for i, name in enumerate(inputs)}
#runtime#
try:
    run()
except Exception as err:
    ended(4, err)
start = time.perf_counter()
made = run()
took = time.perf_counter() - start
arrays = {str(i): a.astype(str) if a.dtype == object else a for i, a in enumerate(made)}
np.savez(sys.argv[3], took=took, **arrays)
"""
_RUNTIMES: dict[Runtime, str] = {
    "onnxruntime": """
import onnxruntime as ort
ort.set_default_logger_severity(4)
try:
    session = ort.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
except Exception as err:
    ended(3, err)
feed = {n.name: feed[n.name].astype(object) if n.type == "tensor(string)" else feed[n.name]
        for n in session.get_inputs()}
def run():
    return session.run(names, feed)
""",
    # Its import would send an event, and write to the home folder. What serves a file mends what OpenVINO would compute
    # wrong in it, and is asked how it opens one; the module that it talks to Triton by is Triton's alone.
    "openvino": """
sys.modules["openvino_telemetry"] = None
import openvino
import runpy, types
from pathlib import Path
sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
backend = runpy.run_path(sys.argv[6])
try:
    core = openvino.Core()
    settings = backend["properties"]({}, 1, core) | {"INFERENCE_PRECISION_HINT": sys.argv[5]}
    network = core.compile_model(backend["opened"](core, Path(sys.argv[1]), {}), "CPU", settings)
except Exception as err:
    ended(3, err)
def run():
    made = network(feed)
    return [np.array(made[name]) for name in names]
""",
}

_BACKEND = Path(__file__).parents[1] / "triton" / "backends" / "openvino" / "model.py"
NOT_OPENED, REFUSED = 3, 4  # how the program above ends
MOST_TOLD = 300  # letters of ONNX Runtime's, from the end, where it says what did not fit


class UnprovenError(RepositoryError):
    """What a try on this machine ended with, and says nothing of the hooks for sure."""


@dataclass(frozen=True)
class Step:
    """One step of the check.

    Attributes:
        name: "preprocess", "network" or "postprocess".
        made: one item of each tensor that it gave, without the batch dimension.
        seconds: that it took, for one item.
    """

    name: str
    made: Mapping[str, Any]
    seconds: float


def check_hooks(hooks: Hooks, source: Artifact, item: Mapping[str, Array]) -> list[Step]:
    """Take one request all the way through.

    Args:
        hooks: that were checked against the network.
        source: what they are for.
        item: a good sample, see `sample_of`.

    Returns:
        A step for each hook that there is, and the network's.

    Raises:
        HookError: the hooks fail; the message names the line.
        RepositoryError: the network refuses what preprocess gave.
        UnprovenError: it can't be opened here, does not come to an end, or answers NaN.
        MissingExtraError: there is no such runtime to run the network with.
    """
    steps = []
    if hooks.preprocess is not None:
        steps.append(_hook(hooks, "preprocess", item))
        item = steps[-1].made
    steps.append(run_network(source, item))
    if nans(steps[-1]):
        raise UnprovenError(
            f"can't use what {source.model_path} answers",
            why=f"to a good sample, {', '.join(nans(steps[-1]))} is NaN",
            mend="see whether preprocess gives what the network was trained with, and whether it answers at all",
        )
    if hooks.postprocess is not None:
        by_tensor = {tensor.name: tensor.tensor or tensor.name for tensor in hooks.postprocess.arguments}
        outputs = {name: steps[-1].made[tensor] for name, tensor in by_tensor.items()}
        steps.append(_hook(hooks, "postprocess", outputs))
    return steps


def sample_of(hooks: Hooks, source: Artifact, given: Path | None) -> dict[str, Array]:
    """One item of the served model's inputs, strings as bytes, without a batch dimension.

    Args:
        hooks: that were checked against the network.
        source: what they are for.
        given: a file for a model that takes one input of bytes, or a .json file of values by input name; None takes
            what the hooks' own example() gives.

    Raises:
        RepositoryError: there is none, or the file does not fit the model.
    """
    batched = source.signature.batched
    inputs = tuple(of_spec(spec.name, spec, batched=batched) for spec in source.signature.inputs)
    front = hooks.preprocess.arguments if hooks.preprocess else inputs
    item = dict(hooks.example or {}) if given is None else _item(given, front)
    if not item:
        raise RepositoryError(
            f"can't try {hooks.source.path}",
            why="there is nothing to try it with",
            mend="add --input FILE, or an example() to it",
        )
    return item


def _item(given: Path, front: tuple[HookTensor, ...]) -> dict[str, Array]:
    """One item of the served model's inputs, from a file."""
    mend = f"give a file for {front[0].name!r}"
    if len(front) > 1 or given.suffix == ".json":
        mend = f"give a .json file of {{{', '.join(f'{json.dumps(tensor.name)}: …' for tensor in front)}}}"
    try:
        content = read_bytes(given, LARGEST_DATA, named=given.is_relative_to("/dev"))  # a pipe of the shell's is read
        if given.suffix == ".json":
            values = named(json.loads(content), [tensor.name for tensor in front], "mapping")
        else:
            values = named(content, [tensor.name for tensor in front], "value" if len(front) == 1 else "mapping")
        return {
            tensor.name: to_array(values[tensor.name], tensor.kind, tensor.data_type, tensor.dims) for tensor in front
        }
    except (OSError, TypeError, ValueError, OverflowError, RecursionError) as err:
        raise RepositoryError(f"can't try {given}", why=str(err), mend=mend) from err


def _hook(hooks: Hooks, name: Literal["preprocess", "postprocess"], item: Mapping[str, Array]) -> Step:
    hook = hooks.hook(name)
    with Guarded(hooks.source, name, "it failed"):
        start = time.perf_counter()
        made = hook.sample(item)
        seconds = time.perf_counter() - start
    return Step(name, made, seconds)


def in_bfloat16(source: Artifact) -> bool:
    """Whether OpenVINO is to compute float32 in BF16, as it did where the artifact was measured."""
    return bool(source.stages) and source.stages[-1].measured.runtime == "OpenVINO, BF16"


def run_network(source: Artifact, item: Mapping[str, Array]) -> Step:
    """Run the network on one item in the runtime that the artifact says, in a process of its own.

    Raises:
        RepositoryError: it refuses the item.
        UnprovenError: it can't be opened here, or does not come to an end.
        MissingExtraError: there is no such runtime to run it with.
    """
    batched = source.signature.batched
    names = [spec.name for spec in source.signature.outputs]
    arrays = {}
    for number, spec in enumerate(source.signature.inputs):
        array = np.asarray(item[spec.name])
        if spec.dtype == "string":
            array = _texts(source, spec.name, array)
        arrays[str(number)] = array[None] if batched else array
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "given.npz", Path(folder) / "made.npz"
        np.savez(given, **arrays)  # type: ignore[arg-type]
        network = _NETWORK.replace("#runtime#", _RUNTIMES[source.runtime])
        program = [sys.executable, "-P", "-c", network]  # the current folder's modules are not the network's
        command = [
            *program,
            str(source.model_path),
            str(given),
            str(made),
            json.dumps([[spec.name for spec in source.signature.inputs], names]),
        ]
        # As the server will: by itself OpenVINO takes what is fast here.
        command += ["bf16" if in_bfloat16(source) else "f32", str(_BACKEND)]
        seconds = loop_seconds()
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
        except subprocess.TimeoutExpired as err:
            raise UnprovenError(
                f"can't run {source.model_path}",
                why=f"it does not come to an end within {seconds:g} s",
                mend=f"see whether it has a loop without an end; if it is only slow, set {SETTING} to more seconds",
            ) from err
        if done.returncode:
            if f"No module named '{source.runtime}'" in done.stderr:
                raise MissingExtraError(
                    "can't run the network", module=source.runtime, extra=RUNTIME_EXTRAS[source.runtime]
                )
            lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            if done.returncode == NOT_OPENED:
                raise UnprovenError(
                    f"can't open {source.model_path}",
                    why=_end_of(lines[-1]),
                    mend=f"see whether this machine's {RUNTIME_NAMES[source.runtime]} has all of its operators",
                )
            if why := beyond_table(source, arrays):
                raise RepositoryError(f"can't run {source.model_path}", why=why, mend=MEND)
            given_shapes = ", ".join(
                f"{spec.name} {spec.dtype}{list(array.shape)}"
                for spec, array in zip(source.signature.inputs, arrays.values(), strict=True)
            )
            raise RepositoryError(
                f"can't run {source.model_path}",
                why=_end_of(lines[-1]),
                mend=f"see whether it takes {given_shapes}, which preprocess gives: a size that the file leaves free "
                "may have a bound, such as a number of positions",
            )
        with np.load(made) as found:
            outputs = {name: found[str(number)] for number, name in enumerate(names)}
            seconds = float(found["took"])
    return Step("network", {name: array[0] if batched else array for name, array in outputs.items()}, seconds)


def _end_of(told: str) -> str:
    """ONNX Runtime's words, without its codes and, where they are many, without the first."""
    told = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", told)
    return told if len(told) <= MOST_TOLD else f"… {told[-MOST_TOLD:].partition(' ')[2]}"


def _texts(source: Artifact, name: str, array: Array) -> Array:
    try:
        return np.array([text.decode("utf-8") for text in array.ravel()], np.str_).reshape(array.shape)
    except UnicodeDecodeError as err:
        why = f"{name}: preprocess gave {shown(np.array([err.object], object))}, and its strings are UTF-8"
        raise RepositoryError(f"can't run {source.model_path}", why=why, mend="let preprocess give text") from err


def nans(step: Step) -> list[str]:
    """The tensors that a step gave with a number in it that is none."""
    return [name for name, value in step.made.items() if value.dtype.kind == "f" and np.isnan(value).any()]


def shown(value: Any) -> str:
    """An array as a reader wants it: the text or number of one element, else dtype, shape, first elements and range."""
    array = np.asarray(value)
    first = [_element(element) for element in array.ravel()[:SHOWN].tolist()]
    if array.size == 1:
        return first[0]
    kind = "string" if array.dtype.kind in "OSU" else array.dtype.name
    text = f"{kind}{list(array.shape)} {', '.join(first)}{', …' if array.size > SHOWN else ''}"
    if array.size > SHOWN and kind != "string" and array.dtype.kind != "b":
        text += f" (least {_element(array.min().item())}, most {_element(array.max().item())})"
    return text


def _element(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="backslashreplace")
    if isinstance(value, str):
        return repr(value if len(value) <= LONGEST else f"{value[:LONGEST]}…")
    return f"{value:.5g}" if isinstance(value, float) else repr(value)

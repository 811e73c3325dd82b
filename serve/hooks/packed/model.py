"""The Triton model that runs a user's hooks: one of them as a step of an ensemble, or both around the network.

`serve pack` copies this file, as it is, into a model's version folder as model.py, beside hook_values.py and the user's
module hooks.py. It needs numpy, Triton's triton_python_backend_utils and what the user's module needs, nothing else.
What it has to know stands in config.pbtxt: `input` and `output`, and these parameters:

    stages           JSON object: for "preprocess" and/or "postprocess" what hook_values.Hook is made of; `tensors`
                     there says which output of the network each argument of postprocess is
    network          the model that runs the network; without it this model is one step, and an ensemble joins them
    network_outputs  JSON list: the tensors to ask the network for
    passed           JSON list: what preprocess gives that goes past the network into the answer
    requirements     JSON list: what must be installed, as in requirements.txt
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

sys.dont_write_bytecode = True  # nothing is written into the model repository
from hook_values import BAD_INPUT, Array, Hook, missing_requirements  # noqa: E402 - after that

Tensors = dict[str, Array]
SHORT = 64  # bytes, below which texts are taken for alike


class TritonPythonModel:
    """What Triton's Python backend looks for in model.py."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Import the user's module.

        Args:
            args: of these, model_config (JSON) is read.
        """
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        missing = missing_requirements(json.loads(parameters["requirements"]))
        if missing:
            raise RuntimeError(f"hooks.py needs {', '.join(missing)}")
        file = Path(__file__).with_name("hooks.py")
        module = sys.modules["user_hooks"] = types.ModuleType("user_hooks")
        module.__file__ = str(file)
        # Not by importlib, which would want a name on the path.
        exec(compile(file.read_bytes(), str(file), "exec"), vars(module))  # noqa: S102 - the user's module
        self.batched = int(config["max_batch_size"]) > 0
        self.inputs = [tensor["name"] for tensor in config["input"]]
        self.outputs = [tensor["name"] for tensor in config["output"]]
        stages = json.loads(parameters["stages"])
        passed = json.loads(parameters.get("passed", "[]"))
        self.steps: list[Any] = []
        self.stream: Stream | None = None
        for name in ("preprocess", "network", "postprocess"):
            if name in stages:
                admit = getattr(module, "admit", None)
                hook = Hook(name, getattr(module, name), stages[name], str(file), admit)
                if hook.streams:
                    self.stream = Stream(hook, stages[name].get("tensors", {}), batched=self.batched)
                    continue
                aside = passed if name == "postprocess" else []
                self.steps.append(Step(hook, stages[name].get("tensors", {}), aside, batched=self.batched))
            elif name == "network" and "network" in parameters:
                self.steps.append(Network(parameters["network"], json.loads(parameters["network_outputs"]), passed))

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """Answer the requests that Triton put together: a step takes them all at once where it can.

        A step that fails is taken again by each request alone, so that a fault fails only the request it came with.
        Where the last hook yields, each of its answers is sent as it comes.
        """
        held: list[Tensors | Failed] = [self._read(request) for request in requests]
        for step in self.steps:
            held = step.run(held) if self.batched else [_guarded(step.alone, tensors) for tensors in held]
        if self.stream is not None:
            for request, tensors in zip(requests, held, strict=True):
                self._send(request, tensors, self.stream)
            return None
        return [self._response(request, tensors) for request, tensors in zip(requests, held, strict=True)]

    def _read(self, request: Any) -> Tensors:
        return {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in self.inputs}

    def _send(self, request: Any, tensors: Tensors | Failed, stream: Stream) -> None:
        """The answers to one request, up to the first that fails, or until nobody waits for them."""
        sender = request.get_response_sender()
        try:
            if isinstance(tensors, Failed):
                raise tensors
            for made in stream.answers(tensors):
                if sender.is_cancelled():
                    break
                sender.send(self._response(request, made))
        except Failed as err:
            told = BAD_INPUT if err.code == pb_utils.TritonError.INVALID_ARG else ""
            sender.send(self._response(request, Failed(f"{told}{err}", err.code)))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _response(self, request: Any, tensors: Tensors | Failed) -> Any:
        if isinstance(tensors, Failed):
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(tensors), tensors.code))
        wanted = [name for name in request.requested_output_names() if name in self.outputs]
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, tensors[name]) for name in wanted])


class Failed(Exception):  # noqa: N818 - it is an outcome, and is kept as one
    """Why a request has no answer."""

    def __init__(self, message: str, code: Any) -> None:
        super().__init__(message)
        self.code = code


class Step:
    """A hook, for requests."""

    def __init__(self, hook: Hook, tensors: Mapping[str, str], passed: Sequence[str], *, batched: bool) -> None:
        self.hook, self.tensors, self.passed, self.batched = hook, tensors, passed, batched
        kinds = hook.arguments if hook.name == "preprocess" else {}
        self.texts = [name for name, kind in kinds.items() if kind == "str"]

    def alone(self, tensors: Tensors) -> Tensors:
        """One request through the hook."""
        given = {name: self._of(tensors, name) for name in self.hook.arguments}
        try:
            made: Tensors = self.hook.many(given) if self.batched else self.hook.one(given)
        except (Exception, SystemExit) as err:
            raise _failed(self.hook, err) from err
        return made | {name: tensors[name] for name in self.passed}

    def run(self, held: list[Tensors | Failed]) -> list[Tensors | Failed]:
        """All requests: together when the hook is batch-wise, those of texts of like length; else one by one."""
        if not self.hook.batchwise:
            return [_guarded(self.alone, each) for each in held]
        return _together(self.alone, held, self.texts)

    def _of(self, tensors: Tensors, name: str) -> Array:
        return _of(self.tensors, tensors, name)


class Stream:
    """A hook that yields its answers."""

    def __init__(self, hook: Hook, tensors: Mapping[str, str], *, batched: bool) -> None:
        self.hook, self.tensors, self.batched = hook, tensors, batched

    def answers(self, tensors: Tensors) -> Iterator[Tensors]:
        """Those to one request, as they come; raises Failed."""
        given = {name: _of(self.tensors, tensors, name) for name in self.hook.arguments}
        if self.batched:
            size = len(next(iter(given.values())))
            if size != 1:
                told = f"it has {size} samples, and the model's answers are a stream: send one at a time"
                raise Failed(told, pb_utils.TritonError.INVALID_ARG)
            given = {name: array[0] for name, array in given.items()}
        try:
            for made in self.hook.stream(given):
                yield {name: array[None] for name, array in made.items()} if self.batched else made
        except (Exception, SystemExit) as err:
            raise _failed(self.hook, err) from err


def _of(names: Mapping[str, str], tensors: Tensors, name: str) -> Array:
    """In a pipeline postprocess sees the network's own names."""
    other = names.get(name, name)
    found: Array = tensors[other] if other in tensors else tensors[name]
    return found


def _failed(hook: Hook, err: BaseException) -> Failed:
    code = pb_utils.TritonError.INVALID_ARG if hook.at_fault(err) else pb_utils.TritonError.INTERNAL
    return Failed(hook.message(err), code)


class Network:
    """The model that runs the network, asked through Triton, which may put it together with others' requests."""

    def __init__(self, name: str, outputs: Sequence[str], passed: Sequence[str]) -> None:
        self.name, self.outputs, self.passed = name, list(outputs), passed
        self.memory = pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)

    def alone(self, tensors: Tensors) -> Tensors:
        """One request."""
        given = {name: array for name, array in tensors.items() if name not in self.passed}
        inputs = [pb_utils.Tensor(name, np.ascontiguousarray(array)) for name, array in given.items()]
        request = pb_utils.InferenceRequest(
            model_name=self.name, requested_output_names=self.outputs, inputs=inputs, preferred_memory=self.memory
        )
        response = request.exec()
        if response.has_error():
            raise Failed(response.error().message(), pb_utils.TritonError.INTERNAL)
        made: Tensors = {name: pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in self.outputs}
        return made | {name: tensors[name] for name in self.passed}

    def run(self, held: list[Tensors | Failed]) -> list[Tensors | Failed]:
        """All requests as one, which is no more than this model's own largest batch, and the network's is the same."""
        return _together(self.alone, held)


def _guarded(step: Any, tensors: Tensors | Failed) -> Tensors | Failed:
    if isinstance(tensors, Failed):
        return tensors
    try:
        return dict(step(tensors))
    except Failed as err:
        return err


def _together(step: Any, held: list[Tensors | Failed], texts: Sequence[str] = ()) -> list[Tensors | Failed]:
    """Join what can be joined, run each such batch, and split the answers again.

    A batch of texts becomes one array, as long as its longest: a request of short ones would cost what a long one does.
    """
    answers = list(held)
    for group in _alike(held, texts):
        for at, answer in zip(group, _joined(step, [held[at] for at in group]), strict=True):
            answers[at] = answer
    return answers


def _alike(held: list[Tensors | Failed], texts: Sequence[str]) -> list[list[int]]:
    """Requests whose tensors can be joined, with texts of which none is over twice as long as another."""
    by_shape: dict[Any, list[tuple[int, int]]] = {}
    for at, each in enumerate(held):
        if not isinstance(each, Failed):
            shape = tuple((name, array.shape[1:], array.dtype) for name, array in each.items())
            length = sum(max(map(len, each[name].ravel().tolist()), default=0) for name in texts)
            by_shape.setdefault(shape, []).append((length, at))
    groups: list[list[int]] = []
    for found in by_shape.values():
        most = -1
        for length, at in sorted(found):
            if length > most:
                most = max(2 * length, SHORT)
                groups.append([])
            groups[-1].append(at)
    return groups


def _joined(step: Any, sound: list[Any]) -> list[Tensors | Failed]:
    """Requests as one batch, or each alone where that fails."""
    if len(sound) > 1:
        sizes = [len(next(iter(each.values()))) for each in sound]
        joined = {name: np.concatenate([each[name] for each in sound]) for name in sound[0]}
        try:
            made = step(joined)
        except Failed:
            made = {}
        if made and all(len(array) == sum(sizes) for array in made.values()):
            ends = np.cumsum(sizes).tolist()
            spans = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
            return [{name: array[span] for name, array in made.items()} for span in spans]
    return [_guarded(step, each) for each in sound]

"""A user's hook module: plain functions that stand before and after the network, one item or one batch at a time.

    REQUIREMENTS = ["pillow>=11"]                        # optional: what must be installed where Triton runs
    FILES = ["labels.txt", "geometry.py"]                # optional: what stands beside it, and goes along

    def preprocess(image: bytes) -> np.ndarray: ...      # arguments become the served model's inputs

    class Answer(NamedTuple):                            # fields become the served model's outputs
        label: str
        score: float

    def postprocess(logits: np.ndarray) -> Answer: ...   # arguments are named after the network's outputs

    def example() -> dict[str, object]: ...              # optional: one sample of the served model's inputs

Either function may be left out. `preprocess` gives the network's input, or a dict by name when there are several; or a
NamedTuple of these by name and of further fields, annotated as an answer's are, which go past the network: they are
outputs of the served model. `postprocess` gives a NamedTuple, or one bare value, which is served as "result". No array
has a batch dimension. An output of the network that is no Python name has an underscore for each character that is
none; where that makes two the same, they are told apart by their places, as a_b_0 and a_b_1. Any may have one
underscore more behind its name, as `np_` for an output named np. An output that postprocess does not take is not
served.

A module may have `admit`, which takes what preprocess takes, each argument as a list with one for each item of a
request, before preprocess is called: a ValueError there refuses the request. It is for what would keep others waiting,
as the pixels of all images, by their heads: requests are worked on one after the other.

A ValueError in preprocess tells the client that its input is bad (HTTP 400); anything else that a hook raises is the
server's fault (500). Either fails that request alone.

A hook takes a whole batch at a time when its annotations say so: arguments of preprocess as list[bytes] or
Annotated[np.ndarray, "uint8[batch,28,28]"], and the result of postprocess as list[Answer], or as a NamedTuple whose
fields are such lists and arrays. All arrays then have the batch dimension, and all results one entry for each item.
When a batch of several requests fails, each is tried again by itself.

A postprocess that yields, annotated as Iterator[Answer], makes a decoupled model: each answer goes to the client as it
comes. It takes one item at a time, and a request has one.
"""

from __future__ import annotations

import inspect
import re
import traceback
import types
import typing
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from compress.artifact import Signature
from compress.errors import HookError, SignatureError
from serve.hooks.labelled import MEND, label_lists, mislabelled
from serve.hooks.module import Guarded, Source, import_module, read_source
from serve.hooks.packed.values import Array, Hook, named, to_array
from serve.hooks.types import HookTensor, of_annotation, of_spec, outputs_of

__all__ = ["Hooks", "Stage", "load_hooks"]

YIELDING = (Iterator, Iterable, Generator)


@dataclass(frozen=True)
class Stage:
    """One hook function.

    Attributes:
        arguments: what it takes.
        results: what it gives, in order. Of preprocess, those that are no input of the network have no `tensor`.
        returns: "value" (one result, bare), "mapping" (by name) or "tuple" (in order).
        batchwise: whether it takes a whole batch at a time.
        streams: whether it yields any number of results.
    """

    arguments: tuple[HookTensor, ...]
    results: tuple[HookTensor, ...]
    returns: str
    batchwise: bool = False
    streams: bool = False

    @property
    def passed(self) -> tuple[HookTensor, ...]:
        """Of preprocess: what goes past the network into the answer."""
        return tuple(item for item in self.results if not item.tensor)

    def spec(self) -> dict[str, Any]:
        """What serve.hooks.packed.values.Hook is made of, as JSON takes it."""
        streams = {"streams": True} if self.streams else {}
        return streams | {
            "arguments": {item.name: item.kind for item in self.arguments},
            "results": {item.name: [item.kind, item.data_type, list(item.dims)] for item in self.results},
            "returns": self.returns,
            "batchwise": self.batchwise,
            "tensors": {item.name: item.tensor for item in self.arguments if item.tensor not in ("", item.name)},
        }


@dataclass(frozen=True)
class Hooks:
    """A hook module that was checked against a network.

    Attributes:
        source: the user's file, with its REQUIREMENTS and FILES.
        module: the same, imported.
        preprocess, postprocess: the functions that it has.
        example: one item of each input of the served model, without the batch dimension, strings as bytes.
    """

    source: Source
    module: types.ModuleType
    preprocess: Stage | None
    postprocess: Stage | None
    example: Mapping[str, Array] | None

    @property
    def streams(self) -> bool:
        """Whether they give any number of answers."""
        return self.postprocess is not None and self.postprocess.streams

    def hook(self, name: Literal["preprocess", "postprocess"]) -> Hook:
        """One of its functions, as Triton calls it; the module has it."""
        stage = self.preprocess if name == "preprocess" else self.postprocess
        if stage is None:
            raise KeyError(name)
        admit = getattr(self.module, "admit", None)
        return Hook(name, getattr(self.module, name), stage.spec(), str(self.source.path), admit)


def load_hooks(path: Path, signature: Signature) -> Hooks:
    """Import a hook module from its file and check it against the network that it is for.

    With an example(), preprocess is run on it once, and what it gives must fit the network.

    Raises:
        HookError: it is missing, can't be imported, needs what isn't installed, or doesn't fit the network; the message
            names the line.
    """
    source = read_source(path)
    module = import_module(source)
    batched = signature.batched
    inputs = tuple(of_spec(spec.name, spec, batched=batched) for spec in signature.inputs)
    outputs = outputs_of(signature)
    before, after = getattr(module, "preprocess", None), getattr(module, "postprocess", None)
    if before is None and after is None:
        raise source.error(
            None, "it defines neither preprocess nor postprocess", "define one of them, at the top of the module"
        )
    preprocess = None if before is None else _preprocess(source, module, before, inputs)
    postprocess = None if after is None else _postprocess(source, module, after, outputs)
    if postprocess is not None:
        _check_labels(source, module, postprocess)
    front = preprocess.arguments if preprocess else inputs
    back = postprocess.results if postprocess else outputs
    passed = preprocess.passed if preprocess else ()
    both = sorted(name for name, count in Counter(item.name for item in (*front, *back, *passed)).items() if count > 1)
    if both:
        twice = "an input and of an output" if both[0] in {item.name for item in front} else "two outputs"
        raise source.error(
            "postprocess" if postprocess and twice != "two outputs" else "preprocess",
            f"{both[0]!r} is the name of {twice} of the served model",
            "rename one of the two: in an ensemble each tensor has its own name",
        )
    if passed and postprocess and postprocess.streams:
        why = f"preprocess gives {passed[0].name!r} past the network, and postprocess yields"
        raise source.error("postprocess", why, "leave one of the two out")
    _check_admit(source, module, preprocess)
    example = _example(source, module, front)
    for name, stage in (("preprocess", preprocess), ("postprocess", postprocess)):
        if stage is not None and stage.batchwise and not batched:
            raise source.error(
                name, "it takes a batch, and the network has none", "annotate it for one item, without list and batch"
            )
    hooks = Hooks(source, module, preprocess, postprocess, example)
    if example is not None and preprocess is not None:
        _try_out(hooks, example)
    return hooks


def _preprocess(source: Source, module: types.ModuleType, hook: Any, inputs: tuple[HookTensor, ...]) -> Stage:
    arguments = []
    names = _argument_names(source, "preprocess", hook)
    hints = _hints(source, "preprocess", hook)
    for name in names:
        if name not in hints:
            raise source.error(
                "preprocess",
                f"its argument {name!r} has no annotation",
                f"say what it is, as in '{name}: bytes'",
                argument=name,
            )
        try:
            arguments.append(of_annotation(name, hints[name]))
        except SignatureError as err:
            raise source.error("preprocess", f"{err.what}: {err.why}", err.mend, argument=name) from err
    if not arguments:
        raise source.error("preprocess", "it takes no argument", "give it one for each input of the served model")
    whole = _whole(source, "preprocess", arguments)
    made = hints.get("return")
    if not _is_named_tuple(made):
        return Stage(tuple(arguments), inputs, "value" if len(inputs) == 1 else "mapping", whole)
    return Stage(tuple(arguments), _made(source, module, made, inputs, whole=whole), "tuple", whole)


def _check_admit(source: Source, module: types.ModuleType, preprocess: Stage | None) -> None:
    """Raises HookError where it can't be called with what preprocess takes."""
    hook = getattr(module, "admit", None)
    if hook is None:
        return
    if preprocess is None:
        raise source.error("admit", "there is no preprocess that it stands before", "define one, or rename admit")
    if {*_argument_names(source, "admit", hook)} != {item.name for item in preprocess.arguments}:
        names = ", ".join(f"{item.name}: list" for item in preprocess.arguments)
        raise source.error("admit", "it does not take what preprocess takes", f"write 'def admit({names}) -> None'")


def _check_labels(source: Source, module: types.ModuleType, postprocess: Stage) -> None:
    """Raises HookError where postprocess takes labels by the likeliest class, and there are fewer or more of them."""
    dims = postprocess.arguments[0].dims
    if not dims or dims[-1] < 1 or any(dim != 1 for dim in dims[:-1]):
        return
    for name, line in label_lists(source.tree).items():
        labels = getattr(module, name, None)
        argument = postprocess.arguments[0]
        count = len(labels) if isinstance(labels, list | tuple) else dims[-1]
        if why := mislabelled(name, count, argument.tensor or argument.name, dims[-1]):
            raise source.error_at(source.constant_line(name) or line, why, MEND)


def _made(
    source: Source, module: types.ModuleType, made: Any, inputs: tuple[HookTensor, ...], *, whole: bool
) -> tuple[HookTensor, ...]:
    """What a preprocess gives whose result is a NamedTuple: the network's inputs, and what goes past the network."""
    where, by_name = made.__name__, {tensor.name: tensor for tensor in inputs}
    with Guarded(source, where, "its annotations can't be read"):
        hints = typing.get_type_hints(made, globalns=vars(module), include_extras=True)
    lacking = [name for name in by_name if name not in made._fields]
    if lacking:
        raise source.error(where, f"it has no field {lacking[0]!r}", "give it one for each input of the network")
    try:
        passed = {name: of_annotation(name, hints[name]) for name in made._fields if name not in by_name}
    except SignatureError as err:
        raise source.error(where, f"{err.what}: {err.why}", err.mend) from err
    if passed and _whole(source, where, list(passed.values())) != whole:
        mend = "annotate them as those of a batch where the arguments of preprocess are, and only there"
        raise source.error(where, f"{next(iter(passed))!r} is not as the arguments are, one item or a batch", mend)
    return tuple(by_name[name] if name in by_name else passed[name] for name in made._fields)


def _whole(source: Source, where: str, tensors: Sequence[HookTensor]) -> bool:
    """Whether they are a batch's; all must be, or none."""
    kinds = {tensor.batchwise for tensor in tensors}
    if len(kinds) > 1:
        one = next(tensor.name for tensor in tensors if not tensor.batchwise)
        raise source.error(where, f"{one!r} is one item, and others are a batch", "annotate all as a batch, or none")
    return kinds.pop()


def _postprocess(source: Source, module: types.ModuleType, hook: Any, outputs: tuple[HookTensor, ...]) -> Stage:
    by_name = {output.name: output for output in outputs}
    names = _argument_names(source, "postprocess", hook)
    arguments: list[HookTensor] = []
    for name in names:
        short = name if name in by_name else name.removesuffix("_")
        if short not in by_name or short in {item.name for item in arguments}:
            raise _no_output(source, name, outputs)
        arguments.append(replace(by_name[short], name=name))
    if not names:
        raise source.error("postprocess", "it takes no argument", f"let it take one of {', '.join(by_name)}")
    annotation = _hints(source, "postprocess", hook).get("return")
    if streams := _yields(hook):
        if typing.get_origin(annotation) not in YIELDING or not typing.get_args(annotation):
            what = "it yields, and does not say what"
            raise source.error("postprocess", what, "annotate its result, as in '-> Iterator[Answer]'")
        annotation = typing.get_args(annotation)[0]
    if annotation is None:
        raise source.error(
            "postprocess", "it does not say what it gives", "annotate its result with a NamedTuple class, or one type"
        )
    rows = (typing.get_origin(annotation) is list and typing.get_args(annotation)) or None
    if rows and _is_named_tuple(rows[0]):
        annotation = rows[0]
    named_tuple = _is_named_tuple(annotation)
    where, fields = "postprocess", {"result": annotation}
    if named_tuple:
        with Guarded(source, annotation.__name__, "its annotations can't be read"):
            hints = typing.get_type_hints(annotation, globalns=vars(module), include_extras=True)
        where, fields = annotation.__name__, {name: hints.get(name) for name in annotation._fields}
    try:
        results = tuple(of_annotation(name, hint) for name, hint in fields.items())
    except SignatureError as err:
        raise source.error(where, f"{err.what}: {err.why}", err.mend) from err
    if not results:
        raise source.error(where, "it has no field", "give it one for each output of the served model")
    whole = _whole(source, where, results)
    if streams and (whole or rows):
        raise source.error(where, "it yields batches", "yield one answer at a time, of one item")
    if named_tuple and rows:
        if whole:
            raise source.error(where, "a list of batches is given", "give a list of answers, or one answer of lists")
        whole = True
    return Stage(tuple(arguments), results, "tuple" if named_tuple else "value", whole, streams)


def _no_output(source: Source, name: str, outputs: Sequence[HookTensor]) -> HookError:
    alike = [item for item in outputs if re.sub(r"\W", "_", item.tensor) == name]
    why = f"its argument {name!r} is no output of the network"
    mend = f"name its arguments after what the network gives: {', '.join(item.name for item in outputs)}"
    if len(alike) > 1:
        why = f"its argument {name!r} could be {' or '.join(repr(item.tensor) for item in alike)} of the network"
        mend = f"write {', or '.join(f'{item.name} for {item.tensor!r}' for item in alike)}"
    return source.error("postprocess", why, mend, argument=name)


def _is_named_tuple(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, tuple) and hasattr(annotation, "_fields")


def _yields(hook: Any) -> bool:
    """Whether a hook yields, or one that was wrapped with `functools.wraps`, which says that the two are alike."""
    return inspect.isgeneratorfunction(inspect.unwrap(hook, stop=inspect.isgeneratorfunction))


def _argument_names(source: Source, stage: str, hook: Any) -> list[str]:
    waits = any(of(inspect.unwrap(hook, stop=of)) for of in (inspect.iscoroutinefunction, inspect.isasyncgenfunction))
    if not inspect.isroutine(hook) or waits or (_yields(hook) and stage != "postprocess"):
        words = "async" if stage == "postprocess" else "async or yield"
        raise source.error(stage, f"{stage} is not a plain function", f"write 'def {stage}(…)', without {words}")
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(hook).parameters
    for parameter in parameters.values():
        if parameter.kind not in kinds:
            raise source.error(
                stage, f"its argument {parameter} can't be given by name", "give it plain arguments only"
            )
    return list(parameters)


def _hints(source: Source, stage: str, hook: Callable[..., Any]) -> dict[str, Any]:
    with Guarded(source, stage, "its annotations can't be read"):
        return typing.get_type_hints(hook, include_extras=True)


def _example(source: Source, module: types.ModuleType, front: tuple[HookTensor, ...]) -> dict[str, Array] | None:
    """What example() gives, as tensors of one item each."""
    if not hasattr(module, "example"):
        return None
    with Guarded(source, "example", "it failed"):
        values = named(module.example(), [item.name for item in front], "mapping")
        return {item.name: to_array(values[item.name], item.kind, item.data_type, item.dims) for item in front}


def _try_out(hooks: Hooks, example: Mapping[str, Array]) -> None:
    """Run preprocess on the example, as Triton will, and check what it gives."""
    source, hook = hooks.source, hooks.hook("preprocess")
    with Guarded(source, "preprocess", "on what example() gives, it failed"):
        try:
            hook.sample(example)
        except TypeError as err:
            if _raised_inside(source, err):
                raise
            raise source.error(
                "preprocess",
                f"on what example() gives, its result does not fit the network's input: {err}",
                "convert it in preprocess: .astype(np.float32) for another dtype, .transpose(2, 0, 1) where the last "
                "dimension is channels and the network has them first, [None] for a dimension more",
            ) from err


def _raised_inside(source: Source, err: BaseException) -> bool:
    """Whether the user's own lines raised it."""
    return any(frame.filename == str(source.path) for frame in traceback.extract_tb(err.__traceback__))

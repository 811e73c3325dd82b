"""A starting file of hooks for a network, and its test: what `serve hooks new` writes."""

from __future__ import annotations

import ast
import builtins
import json
import keyword
import math
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from compress.artifact import Artifact, TensorSpec
from compress.errors import HookError
from compress.vetting.replace import replace_file
from compress.vetting.texts import read_bytes
from serve.config.named import LARGEST_DATA
from serve.hooks import halves, starting, text_halves
from serve.hooks.image_settings import image_settings
from serve.hooks.last_node import gives_probabilities
from serve.hooks.starting import Part
from serve.hooks.types import item_shape, outputs_of

__all__ = ["TASKS", "UNKNOWN", "new_hooks"]

TASKS = ("image-classification", "text", "tabular")
SIDE = 224  # pixels, where the network takes any
LENGTH = 128  # tokens, where the network takes any
TOKENIZER = "tokenizer.json"
IDS = ("input_ids", "attention_mask", "token_type_ids")
SCORES = ("logit", "score", "prob", "class", "label")  # in the name of an output that is taken before the others
NO_SCORES = ("emb", "pool", "hidden", "feature", "token")  # in the name of an output that is no class scores
FLOATS = ("float16", "float32", "float64")
MOST_CLASSES = 100_000
MOST_NUMBERS = 100_000_000  # of a sample
# What the hooks, their test and what runs it import: a file of that name beside them would stand in for it.
IMPORTED = {"PIL", "conftest", "iniconfig", "numpy", "packaging", "pluggy", "pytest", "tokenizers"}
FRONTS = {"image-classification": "image", "text": "text", "tabular": "features"}
Named = Callable[..., Part]  # with the name of the served model's input, or of the network's output
UNKNOWN = {
    "MEAN, STD": "\n# What the network was trained with", "LABELS": "\nLABELS = [str(number) for number in range(",
}  # fmt: skip
"""Constants of the hooks that only the user can fill in, and how they stand there until then."""
PLACE = "a_name_for_what_the_hook_takes"


def new_hooks(task: str, source: Artifact, path: Path, tokenizer: Path | None = None) -> list[Path]:
    """Write hooks that fit a network, with an example(), and a test of them beside.

    Args:
        task: one of TASKS.
        source: what they are for: its signature says names, dtypes and shapes.
        path: of the hooks; the test is `test_` and its name.
        tokenizer: a tokenizer.json of the `tokenizers` library, where token ids are taken; it is copied beside. None
            is the artifact's own. How long texts are, what is done to images and the names of classes are the
            artifact's, too, where it has them.

    Returns:
        The files that were written.

    Raises:
        HookError: the network does not fit the task, or a file is there already (nothing is written then),
            or the place can't be written.
    """
    if path.suffix != ".py" or not _is_name(path.stem):
        raise _error(path, "that is no name of a Python module", "name it like hooks.py")
    if path.stem in IMPORTED | sys.stdlib_module_names:
        raise _error(path, f"a module {path.stem!r} is imported, which it would stand in for", "name it like hooks.py")
    for spec in source.signature.inputs:
        if math.prod(side for side in spec.shape if isinstance(side, int)) > MOST_NUMBERS:
            raise _error(
                path, f"its input is {spec}: more than {MOST_NUMBERS:,} numbers a sample", "export a smaller one"
            )
    alone = _alone(task, source, path)
    back = _back(source, alone=alone)
    taken = set(back.results) if back else {tensor.name for tensor in outputs_of(source.signature)}
    own = _tokenizer_of(source)
    make = {"image-classification": _image, "text": _text, "tabular": _tabular}[task](
        source, path, tokenizer or own, alone=alone
    )
    front = _named(make, [FRONTS[task] if task != "tabular" else source.signature.inputs[0].name, FRONTS[task]], taken)
    content: dict[Path, bytes | str] = {
        path: starting.module(front, back),
        path.with_name(f"test_{path.name}"): starting.test_module(path.stem, front, back),
    }
    if tokenizer is not None and not front.files:
        raise _error(path, "the network takes no token ids, and a tokenizer was given", "leave --tokenizer away")
    tokenizer = tokenizer or own
    if tokenizer is not None and front.files:
        beside = path.with_name(TOKENIZER)
        if not (beside.exists() and tokenizer.exists() and beside.samefile(tokenizer)):
            content[beside] = _read(path, tokenizer)
    try:
        for file in content:
            if file.exists() or file.is_symlink():
                raise _error(path, f"{file} is there already", "name another file by --out, or move that one away")
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in content.items():
            replace_file(file, text)
    except OSError as err:
        raise _error(path, f"it can't be written: {err.strerror or err}", "name a place that you may write to") from err
    return list(content)


def _alone(task: str, source: Artifact, path: Path) -> bool:
    """Whether the network takes one sample a call, as a batch of 1, which the hooks then make and open.

    Raises:
        HookError: it takes another number of samples, and that one only: they would be given to hooks as one.
    """
    own = {"image-classification": (3,), "text": (0, 1), "tabular": (1,)}[task]
    inputs = source.signature.inputs
    fixed = next((spec for spec in inputs if len(spec.shape) not in own and len(spec.shape) - 1 in own), None)
    if source.signature.batched or fixed is None:
        return False
    if all(spec.shape[:1] == (1,) for spec in inputs):
        return True
    ends = ", ".join(map(str, source.signature.outputs))
    why = f"its batch is not of any size: it takes {fixed} and gives {ends}"
    raise _error(path, why, "export it with a free first dimension of all inputs and outputs, or with one of 1")


def _tokenizer_of(source: Artifact) -> Path | None:
    """The artifact's own tokenizer.json."""
    processor = source.processor
    return None if processor is None or TOKENIZER not in processor.files else processor.folder / TOKENIZER


def _image(source: Artifact, path: Path, _: Path | None, *, alone: bool) -> Named:
    spec = _one(source, path)
    shape = item_shape(spec, batched=source.signature.batched or alone)
    channels = [axis for axis in (0, 2) if len(shape) == 3 and shape[axis] in (1, 3, 4)]
    if spec.dtype not in ("float32", "float16", "uint8") or not channels:
        why = f"its input is {spec}, not float32 or uint8 of [channels, height, width] or [height, width, channels]"
        raise _error(path, why, f"name another --task than image-classification: {', '.join(TASKS)}")
    last = channels[0] == 2
    sides = shape[:2] if last else shape[1:]
    height, width = (SIDE if isinstance(side, str) else side for side in sides)
    depth = shape[channels[0]]
    settings = image_settings(source, int(depth), height, width)
    return partial(
        halves.images, channels=int(depth), height=height, width=width, dtype=spec.dtype, last=last, settings=settings,
        alone=alone,
    )  # fmt: skip


def _text(source: Artifact, path: Path, tokenizer: Path | None, *, alone: bool) -> Named:
    specs = source.signature.inputs
    shapes = [item_shape(spec, batched=source.signature.batched or alone) for spec in specs]
    if len(specs) == 1 and specs[0].dtype == "string" and all(side == 1 or isinstance(side, str) for side in shapes[0]):
        return partial(text_halves.texts, shape=(1,) * (len(shapes[0]) + alone))
    names = tuple(spec.name for spec in specs)
    lengths = {shape[0] for shape in shapes if len(shape) == 1}
    dtypes = {spec.dtype for spec in specs}
    fit = dtypes <= {"int64", "int32"} and all(len(shape) == 1 for shape in shapes)
    if not (fit and len(dtypes) == 1 and len(lengths) == 1 and set(names) <= set(IDS) and IDS[0] in names):
        why = f"it takes {', '.join(map(str, specs))}, neither one string nor {', '.join(IDS)}"
        raise _error(path, why, "write preprocess by hand: it gives a dict of these by name")
    if tokenizer is None:
        mend = "add --tokenizer tokenizer.json (the file beside the model that it was trained from)"
        raise _error(path, "the network takes token ids", mend)
    (length,) = lengths
    known = source.processor.max_length if source.processor else None
    # Without a mask, padding would change what a text's neighbours in the batch make of it; and where nothing says how
    # long a text may be, one length for all shows at the first try whether the network takes it.
    varies = isinstance(length, str) and known is not None and IDS[1] in names and not alone
    longest = length if isinstance(length, int) else known or LENGTH
    types = source.processor is None or source.processor.type_ids is not False
    return partial(
        text_halves.token_ids, names=names, dtype=dtypes.pop(), length=longest, varies=varies, tokenizer=TOKENIZER,
        alone=alone, types=types,
    )  # fmt: skip


def _tabular(source: Artifact, path: Path, _: Path | None, *, alone: bool) -> Named:
    spec = _one(source, path)
    shape = item_shape(spec, batched=source.signature.batched or alone)
    if len(shape) != 1 or spec.dtype in ("string", "bool"):
        raise _error(path, f"its input is {spec}, not a row of numbers for each sample", "name another --task")
    return partial(
        halves.rows, length="length" if isinstance(shape[0], str) else shape[0], dtype=spec.dtype, alone=alone
    )


def _one(source: Artifact, path: Path) -> TensorSpec:
    specs = source.signature.inputs
    if len(specs) != 1:
        why = f"the network takes {len(specs)} inputs: {', '.join(spec.name for spec in specs)}"
        raise _error(path, why, "write preprocess by hand: it gives a dict of these by name")
    return specs[0]


def _named(make: Named, names: Iterable[str], taken: set[str]) -> Part:
    """The half that stands before the network; its argument has the first name that nothing else has."""
    uses = _uses(make(name=PLACE).code)
    *_, last = names
    free = (name for name in (*names, f"{last}_in", f"{last}_of_the_sample") if name not in uses | taken)
    return make(name=next(name for name in free if _is_name(name)))


def _uses(code: str) -> set[str]:
    """Names that mean something in the module already: an argument of that name would hide it."""
    nodes = list(ast.walk(ast.parse(code)))
    found = {node.id for node in nodes if isinstance(node, ast.Name)} | set(dir(builtins)) | {"self"}
    return found - {PLACE}


def _back(source: Artifact, *, alone: bool) -> Part | None:
    """What stands behind the output that is class scores or a number, the likeliest by its name; none otherwise."""
    tensors = outputs_of(source.signature)
    others = {tensor.name for tensor in tensors}
    pairs = zip(source.signature.outputs, tensors, strict=True)
    for spec, tensor in sorted(pairs, key=lambda pair: not any(word in pair[0].name.lower() for word in SCORES)):
        name = tensor.name
        one = alone and len(spec.shape) > 1 and spec.shape[0] == 1
        shape = item_shape(spec, batched=source.signature.batched or one)
        if not _is_name(name) or spec.dtype not in FLOATS or any(word in name.lower() for word in NO_SCORES):
            continue
        if shape in ((), (1,)):
            make: Named = partial(halves.number, shape=tuple(map(int, spec.shape[source.signature.batched :])))
        elif len(shape) == 1 and isinstance(shape[0], int) and 1 < shape[0] <= MOST_CLASSES:
            known = "prob" in name.lower() or (
                source.format == "onnx" and gives_probabilities(source.model_path, spec.name)
            )
            names = source.processor.labels if source.processor else ()
            names = names if len(names) == shape[0] else ()
            make = partial(halves.labels, classes=shape[0], probabilities=known, names=names, alone=one)
        else:
            continue
        own = f"{name}_" if name in _uses(make(output=PLACE).code) else name
        if own == name or own not in others:
            return make(output=own)
    return None


def _is_name(text: str) -> bool:
    return text.isascii() and text.isidentifier() and not keyword.iskeyword(text)


def _read(path: Path, tokenizer: Path) -> bytes:
    try:
        content = read_bytes(tokenizer, LARGEST_DATA)
    except (OSError, ValueError) as err:
        raise _error(path, f"{tokenizer} can't be read: {err}", "name a tokenizer.json that is there") from err
    try:
        held = json.loads(content)
    except (ValueError, RecursionError):
        held = None
    if not isinstance(held, dict) or "model" not in held:
        mend = "name the tokenizer.json of the `tokenizers` library that stands beside the model"
        raise _error(path, f"{tokenizer} is no such tokenizer's JSON", mend)
    return content


def _error(path: Path, why: str, mend: str) -> HookError:
    return HookError(f"can't write the hooks {path}", why=why, mend=mend)

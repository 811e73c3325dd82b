"""Files of each format, changed at random, and given to what opens them.

A change is of bytes, of an archive's entries, or of the plain data inside (JSON, the lists of a native graph, the
fields of an ONNX model), so that it also comes behind checksums and lengths. What comes out must be a model or samples,
or an error of the toolkit; anything else is a crash.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Literal

import numpy as np
import onnx
import torch

from compress.artifact import Signature, TensorSpec
from compress.data.dataset import Dataset
from compress.errors import ToolkitError
from compress.formats.checkpoint import load
from compress.formats.onnx.read import signature_of_onnx
from compress.model import OnnxModel
from compress.runtime.backends.onnxrt import OnnxBackend
from compress.tensorrt.lint import lint_tensorrt
from compress.vetting.calls.functions import functions, methods
from tests.hostile.exported_programs import _plain as program_entries
from tests.hostile.mutations import places_in
from tests.hostile.onnx_files import model as onnx_model
from tests.hostile.pickles import calling, expression, node

__all__ = ["KINDS", "changed", "ended", "opened"]

KINDS = (".pt2", ".pt", ".onnx", ".npz", ".npy")
ONE = Signature((TensorSpec("x", "float32", ("batch", 4)),), ())
NUMBERS = (0, 1, -1, 2, 7, 8, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63)
Outcome = Literal["loaded", "refused"]


def opened(path: Path) -> Outcome:
    """Open a file as the commands do.

    Raises:
        Exception: a crash: anything but the toolkit's own errors.
    """
    return "loaded" if ended(path) == "loaded" else "refused"


def ended(path: Path) -> str:
    """Open a file: "loaded", or where it was refused: by its "reader", the checks of its "graph", or its "run"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if path.suffix in (".pt", ".pt2"):
                load(path, inputs=["x:float32[batch,4]"] if path.suffix == ".pt" else [])
            elif path.suffix == ".onnx":
                lint_tensorrt(path)
                OnnxBackend(OnnxModel(path, signature_of_onnx(path)), 1)
            else:
                data = Dataset.open(str(path), ONE)
                for batch, _ in data.batches(64):
                    assert batch["x"].shape[1:] == (4,)
    except ToolkitError as err:
        if "does not run" in err.why or "its graph gives" in err.why or "memory" in err.what:
            return "run"
        return "graph" if "malformed" in err.why or "signature" in err.what else "reader"
    return "loaded"


def changed(kind: str, random: Random, canary: Path) -> bytes:
    """A file of a kind with one to four changes; code in it would write the canary."""
    if kind == ".pt" and random.random() < 0.6:  # whole, so that its graph is what is tried
        return _calls(random)
    if kind == ".pt2" and random.random() < 0.7:
        whole = _archive(_with_json(dict(program_entries()), random, canary), random)
    elif kind == ".pt" and random.random() < 0.7:
        out = io.BytesIO()
        torch.save(_tree(_native(), random, canary, random.randint(1, 3)), out)
        whole = out.getvalue()
    elif kind == ".onnx" and random.random() < 0.7:
        whole = _onnx(random, canary)
    else:
        whole = _seed(kind, random.randrange(2))
    if random.random() < 0.5 or whole in (_seed(kind, 0), _seed(kind, 1)):
        for _ in range(random.randint(1, 4)):
            whole = random.choice(_BYTES)(whole, random)
    return whole


@functools.cache
def _seed(kind: str, which: int) -> bytes:
    out = io.BytesIO()
    if kind == ".pt2":
        return _zipped(dict(program_entries()))
    if kind == ".pt":
        torch.save(_native() if which else {"0.weight": torch.ones(4, 4)}, out)
    elif kind == ".onnx":
        return onnx_model().SerializeToString()  # type: ignore[no-any-return]
    elif kind == ".npz":
        (np.savez if which else np.savez_compressed)(out, x=np.ones((64, 4), np.float32), label=np.arange(64))
    else:
        np.save(out, np.ones((64, 4), np.float32))
    return out.getvalue()


def _native() -> dict[str, Any]:
    graph: dict[str, Any] = {
        "nodes": [
            node("x", "placeholder", "x"), node("y", "call_module", "0", {"node": "x"}),
            node("output", "output", "output", {"node": "y"}),
        ],
        "modules": {"0": torch.nn.Linear(4, 4)}, "parameters": {}, "buffers": {"b": torch.ones(4)},
    }  # fmt: skip
    calling({"list": [1, 2.0, None, {"slice": [0, 1, None]}]}, alpha={"torch": "float32"})(graph)
    signature = {"inputs": ["x:float32[batch,4]"], "outputs": ["output:float32[batch,4]"]}
    return {"format": "compress.model", "version": 1, "signature": signature, "graph": graph}


def _calls(random: Random) -> bytes:
    """A native file that is as it should be, but for what a few nodes of it call."""
    nodes, known = [node("x", "placeholder", "x"), node("y", "call_module", "0", {"node": "x"})], ["x", "y"]
    layer: torch.nn.Module = random.choice((torch.nn.Linear(4, 4), torch.nn.Identity(), torch.nn.Softmax(1)))
    for number in range(random.randint(1, 4)):
        name = f"z{number}"
        if random.random() < 0.5:
            given = [_argument(random, known) for _ in range(random.randint(0, 3))]
            nodes.append(node(name, "call_method", random.choice(sorted(methods())), {"node": known[-1]}, *given))
        else:
            given = [_argument(random, known) for _ in range(random.randint(1, 5))]
            nodes.append(node(name, "call_function", random.choice(sorted(functions())), *given))
        if random.random() < 0.1:
            nodes[-1]["kwargs"]["dict"].append([random.choice(("dim", "out", "size", "p")), _argument(random, known)])
        if random.random() < 0.5:
            known.append(name)
    nodes.append(node("output", "output", "output", {"node": random.choice((known[-1], "y"))}))
    parts = {"modules": {"0": layer}, "parameters": {}, "buffers": {}}
    signature = {"inputs": ["x:float32[batch,4]"], "outputs": ["output:float32[batch,4]"]}
    out = io.BytesIO()
    whole = {"format": "compress.model", "version": 1, "signature": signature, "graph": {"nodes": nodes, **parts}}
    torch.save(whole, out)
    return out.getvalue()


def _argument(random: Random, known: list[str]) -> Any:
    """Of a node: mostly one that many functions take."""
    sizes = (0, 1, -1, 2, 3, 4, -5, 1 << 33, (1 << 63) - 1)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: {"node": random.choice(known)}, lambda: {"node": random.choice(known)}, lambda: random.choice(sizes),
        lambda: {"list": [random.choice(sizes) for _ in range(random.randint(0, 4))]},
        lambda: random.choice((0.0, 0.5, 1.0, -1.0, 1e300, float("nan"))), lambda: random.choice((None, True, False)),
        lambda: {"list": [{"node": random.choice(known)} for _ in range(random.randint(0, 3))]},
        lambda: {"torch": random.choice(("float32", "int64", "bool", "float16", "complex64"))},
        lambda: random.choice(("sum", "mean", "reflect", "ij,jk->ik", "torch.sparse.FloatTensor")),
        lambda: {"slice": [random.choice((None, *sizes)) for _ in range(3)]},
    )  # fmt: skip
    return random.choice(makers)()


def _zipped(content: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(out, "w", kind) as archive:
        warnings.simplefilter("ignore")
        for name, data in content.items():
            archive.writestr(f"model/{name}", data)
    return out.getvalue()


def _archive(content: dict[str, bytes], random: Random) -> bytes:
    """Entries left out, renamed, swapped or packed otherwise."""
    names = list(content)
    match random.randrange(8):
        case 0:
            del content[random.choice(names)]
        case 1:
            new = random.choice(
                ["models/x", "data/weights/model.pt", "extra/x", "../x", "a/b", "data/weights/weight_7"]
            )
            content[new] = content[random.choice(names)]
        case 2:
            first, second = random.sample(names, 2)
            content[first], content[second] = content[second], content[first]
        case 3:
            return _zipped(content, zipfile.ZIP_DEFLATED)
    return _zipped(content)


def _with_json(content: dict[str, bytes], random: Random, canary: Path) -> dict[str, bytes]:
    name = random.choice([name for name in content if name.endswith(".json")])
    changed = _tree(json.loads(content[name]), random, canary, random.randint(1, 3))
    return {**content, name: json.dumps(changed).encode()}


def _value(random: Random, canary: Path) -> Any:
    makers: tuple[Callable[[], Any], ...] = (
        lambda: random.choice(NUMBERS), lambda: expression(canary), lambda: None, lambda: True, list, dict,
        lambda: "x" * random.choice((0, 1, 5000)), lambda: float(random.choice(NUMBERS)), lambda: [[[1]]],
        lambda: random.choice(("__class__", "forward", "torch", "0", "weight", "é", "\x00", "a.b", "self", "None")),
        lambda: {"as_int": random.choice(NUMBERS)}, lambda: {"as_expr": {"expr_str": expression(canary)}},
        lambda: {"node": "x"}, lambda: {"tuple": [expression(canary)]},
    )  # fmt: skip
    return random.choice(makers)()


def _tree(whole: Any, random: Random, canary: Path, changes: int) -> Any:
    """Plain data, in some places other data."""
    whole = copy.deepcopy(whole)
    for _ in range(changes):
        places = [place for place in places_in(whole) if place]
        holder = whole
        *path, last = random.choice(places)
        for step in path:
            holder = holder[step]
        match random.randrange(5):
            case 0 if isinstance(holder, dict):
                holder[random.choice(["x", "__class__", expression(canary), "as_int"])] = holder.pop(last)
            case 1:
                del holder[last]
            case 2:
                other = whole
                for step in random.choice(places):
                    other = other[step]
                holder[last] = copy.deepcopy(other)
            case _:
                holder[last] = _value(random, canary)
        if not [place for place in places_in(whole) if place]:
            break
    return whole


def _onnx(random: Random, canary: Path) -> bytes:
    made = onnx_model()
    for _ in range(random.randint(1, 3)):
        message: Any = made
        while True:  # down to a random field
            fields = message.ListFields()
            if not fields:
                break
            field, value = random.choice(fields)
            inner = list(value) if isinstance(value, list) or hasattr(value, "extend") else [value]
            if not inner:
                break
            chosen = random.choice(inner)
            if hasattr(chosen, "ListFields") and random.random() < 0.8:
                message = chosen
                continue
            _set_field(message, field, random, canary)
            break
    return made.SerializeToString()  # type: ignore[no-any-return]


def _set_field(message: Any, field: Any, random: Random, canary: Path) -> None:
    try:
        if isinstance(message, onnx.TensorProto) and random.random() < 0.3:
            message.data_location = 1
            location = random.choice(["/etc/passwd", "../x", "x", ".", str(canary)])
            message.external_data.add(key="location", value=location)
        elif field.message_type is not None:
            message.ClearField(field.name)
        elif field.cpp_type in (field.CPPTYPE_STRING,):
            other = random.choice(
                [expression(canary), "", "x", "y", "If", "EPContext", "[/red]", "\x1b[2J", "é" * 1000]
            )
            value = other.encode() if field.type == field.TYPE_BYTES else other
            _assign(message, field, value)
        else:
            _assign(message, field, random.choice(NUMBERS))
    except (ValueError, TypeError):  # out of the field's range
        pass


def _assign(message: Any, field: Any, value: Any) -> None:
    now = getattr(message, field.name)
    if hasattr(now, "append"):
        now[:] = [value, *now[1:]]
    else:
        setattr(message, field.name, value)


def _flip(whole: bytes, random: Random) -> bytes:
    at = random.randrange(max(1, len(whole)))
    return whole[:at] + bytes([random.randrange(256)]) + whole[at + 1 :]


def _number(whole: bytes, random: Random) -> bytes:
    width = random.choice((1, 2, 4, 8))
    at = random.randrange(max(1, len(whole) - width))
    if random.random() < 0.3:  # the directory is at the end
        at = max(0, len(whole) - random.randrange(1, 200))
    value = random.choice(NUMBERS) % (1 << 8 * width)
    return whole[:at] + value.to_bytes(width, "little") + whole[at + width :]


def _cut(whole: bytes, random: Random) -> bytes:
    return whole[: random.randrange(len(whole) + 1)]


def _repeat(whole: bytes, random: Random) -> bytes:
    start = random.randrange(max(1, len(whole)))
    part = whole[start : start + random.choice((1, 16, 256))]
    return whole[:start] + part * random.choice((2, 3, 50)) + whole[start:]


def _move(whole: bytes, random: Random) -> bytes:
    first, second = sorted(random.randrange(len(whole) + 1) for _ in range(2))
    return whole[second:] + whole[first:second] + whole[:first]


_BYTES = (_flip, _flip, _flip, _number, _number, _cut, _repeat, _move)

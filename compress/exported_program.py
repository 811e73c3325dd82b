"""Load an exported program (`torch.export.save`), whose file names its own inputs.

`torch.export.load` runs code from a file in several ways: tensors and custom objects may be pickles, expressions of
sizes are evaluated as Python, operators are found by attribute names, tree structures name modules to import, and
compiled libraries are opened. A file that holds more than plain tensors, plain expressions and torch's own operators is
refused unless it is trusted.
"""

from __future__ import annotations

import io
import itertools
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import InputKind

from compress.artifact import TensorSpec
from compress.errors import CheckpointError, ToolkitError, first_line
from compress.infer import infer_signature
from compress.model import TorchModel

__all__ = ["load_exported_program"]

_OPERATOR = re.compile(
    r"torch\.ops(\.[A-Za-z_]\w*){2,3}|torch\._?sym_\w+|math\.[a-z]\w*"
    r"|_operator\.(?!call$|methodcaller|attrgetter|itemgetter)[a-z]\w*"
)
_IMPORTING = {"__enum__", "default_factory_module"}
_SYMBOL = re.compile(r"'[a-z]+\d+'")
# sympy's classes are capitalized; Python's own functions, which sympy would call, are not.
_WORD = re.compile(r"[A-Z]\w*|[a-z]{1,3}\d+|floor|ceiling|oo|int_oo|positive|nonnegative|nonzero|integer|real|evaluate")


def load_exported_program(path: Path, *, trust: bool, sizes: Mapping[str, int] | None = None) -> TorchModel:
    """Load a .pt2 file; it has no layers, so it can be exported and quantized but not pruned.

    Args:
        path: a zip file that torch.export.save wrote.
        trust: load it even if that runs code from it.
        sizes: representative ones, see `infer_signature`.

    Raises:
        CheckpointError: the file is damaged, from an incompatible release, or would run code.
    """
    try:
        if not trust and (reason := _runs_code(path)):
            raise CheckpointError(
                f"won't load {path}: it would run code",
                why=reason,
                mend="export it again from plain tensors; or, if you trust whoever made it, add --trust-pickle",
            )
        with path.open("rb") as file:
            program = torch.export.load(io.BytesIO(file.read()))
        module = program.module(check_guards=False)
    except ToolkitError:
        raise
    except Exception as err:  # torch.export gives many kinds for damaged files
        why = first_line(err)
        mend = "write it again with torch.export.save and this release of torch"
        raise CheckpointError(f"can't load the exported program {path}", why=why, mend=mend) from err
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    dims = _dims([values[name].shape for name in names])
    specs = tuple(
        TensorSpec(
            name,
            str(values[name].dtype).removeprefix("torch."),
            tuple(size if isinstance(size, int) else dims[str(size)] for size in values[name].shape),
        )
        for name in names
    )
    return TorchModel(module, infer_signature(module, specs, sizes=sizes), layered=False)


def _dims(shapes: Sequence[Sequence[Any]]) -> dict[str, str]:
    """A name for each of the program's symbols: `batch` where it comes first, else `dim_` and the axis it is first at.

    torch.export keeps what is equal (one symbol, one name), and not what it was called.
    """
    found: dict[str, str] = {}
    for shape in shapes:
        for axis, size in enumerate(shape):
            if isinstance(size, int) or str(size) in found:
                continue
            numbered = (f"dim_{axis}_{number}" for number in itertools.count(1))
            names = itertools.chain(("batch",) if axis == 0 else (), (f"dim_{axis}",), numbered)
            found[str(size)] = next(name for name in names if name not in found.values())
    return found


def _runs_code(path: Path) -> str | None:
    """What in the file would run code when it is loaded, or None."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            inner = name.partition("/")[2]
            if inner.startswith("data/aotinductor") or name.endswith((".so", ".dll")):
                return f"it holds the compiled library {inner}"
            if "data/constants/" in inner and re.search(r"custom_obj|opaque", inner):
                return f"it holds the pickled object {inner}"
            if inner.startswith("data/sample_inputs/"):
                try:
                    torch.load(io.BytesIO(archive.read(name)), weights_only=True)
                except Exception:  # torch would read it again without the restriction
                    return f"{inner} is a pickle of more than tensors"
            if inner.endswith(".json"):
                content = json.loads(archive.read(name))
                for key, value in _strings(content):
                    if reason := _refused(key, value):
                        return f"{inner} {reason}"
                if importer := next(_importers(content), None):
                    return f"{inner} imports a module of its choice, by {importer!r}"
        if not any("models/" in name for name in archive.namelist()):
            return "its format is one from before PyTorch 2.9, whose weights are a pickle"
    return None


def _refused(key: str, value: Any) -> str | None:
    if key == "use_pickle" and value:
        return "says that tensors are pickled"
    if key == "target" and isinstance(value, str) and ("__" in value or not _OPERATOR.fullmatch(value)):
        return f"calls {value!r}"
    if key == "expr_str" and isinstance(value, str):
        bare = _SYMBOL.sub("", value)
        words = re.findall(r"[A-Za-z_]\w*", bare)
        if not re.fullmatch(r"[\w\s+\-*/%(),<>=&|~]*", bare) or not all(_WORD.fullmatch(word) for word in words):
            return f"holds the expression {value!r}"
    return None


def _importers(value: Any) -> Iterator[str]:
    """Keys by which torch's tree structures name a module to import; they are JSON in strings, and again in those."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return
    if isinstance(value, dict):
        yield from sorted(_IMPORTING & value.keys())
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _importers(item)


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    else:
        yield key, value

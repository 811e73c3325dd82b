"""Load an exported program (`torch.export.save`), whose file names its own inputs.

`torch.export.load` runs code from a file in several ways: tensors, sample inputs and custom objects may be pickles,
expressions of sizes are evaluated as Python, names become source, operators are found by attribute names, tree
structures name modules to import, and compiled libraries are opened. So torch never reads a file that is not trusted:
it reads an archive that is written here, of what was understood of the file's.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from compress.artifact import TensorSpec
from compress.console.wording import AssumedWarning, counted
from compress.errors import CheckpointError, ToolkitError, first_line
from compress.formats.exported.decided import decided_by_sizes
from compress.formats.exported.expressions import TooLongError
from compress.formats.exported.guards import guards_in
from compress.formats.exported.program import clean_payloads, clean_program
from compress.model import TorchModel
from compress.model.infer import infer_signature
from compress.vetting.archive import Archive, ArchiveError, Entry
from compress.vetting.calls.guards import guard_module

__all__ = ["load_exported_program"]

MAX_JSON = 64 << 20
MAX_SMALL = 4096
# Of elements that all tensors together may declare, beyond those that the file holds: tied and expanded ones.
MAX_SHARED, MAX_EXPANDED = 8, 1 << 24
_PROGRAM = "models/model.json"
_PAYLOADS = {"data/weights/": "model_weights_config.json", "data/constants/": "model_constants_config.json"}
# torch writes these, and each has one content that is understood here.
_FIXED = {
    "archive_format": rb"pt2", "archive_version": rb"0", "byteorder": rb"little", ".data/version": rb"\d{1,3}\n?",
    ".data/serialization_id": rb"\d{1,80}", ".format_version": rb"\d{1,3}", ".storage_alignment": rb"\d{1,5}",
}  # fmt: skip
# What torch writes, and nothing here needs; the first is a pickle.
_UNREAD = re.compile(r"data/sample_inputs/model\.pt|extra/[\w.-]+(/[\w.-]+)*", re.ASCII)
_ITEM_SIZES = {
    1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 2, 7: 4, 8: 8, 9: 4, 10: 8, 11: 16, 12: 1, 13: 2, 28: 2, 29: 1, 30: 1, 31: 1,
    32: 1, 34: 4, 35: 8,
}  # fmt: skip
"""Bytes of an element, by torch's number of the dtype (torch._export.serde.schema.ScalarType)."""


def load_exported_program(path: Path, *, trust: bool, sizes: Mapping[str, int] | None = None) -> TorchModel:
    """Load a .pt2 file; it has no layers, so it can be exported and quantized but not pruned.

    Args:
        path: a zip file that torch.export.save wrote.
        trust: load it even if that runs code from it.
        sizes: representative ones, see `infer_signature`.

    Raises:
        CheckpointError: the file is damaged, from an incompatible release, or holds what could run code.
    """
    try:
        program, guards = _as_torch_reads_it(path) if trust else _as_understood(path)
        module = program.module(check_guards=False)
        if not trust:
            guard_module(module)
    except ToolkitError:
        raise
    except RecursionError as err:
        raise _refused(path, "it is nested too deeply") from err
    except Exception as err:  # torch.export gives many kinds for damaged files
        why = first_line(err)[:300]
        mend = "write it again with torch.export.save and this release of torch"
        raise CheckpointError(f"can't load the exported program {path}", why=why, mend=mend) from err
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    _refuse_nested(program, [name for name in names if not isinstance(values.get(name), torch.Tensor)], path)
    dims = _dims([values[name].shape for name in names])
    specs = tuple(
        TensorSpec(
            name,
            str(values[name].dtype).removeprefix("torch."),
            tuple(size if isinstance(size, int) else dims[str(size)] for size in values[name].shape),
        )
        for name in names
    )
    model = TorchModel(module, infer_signature(module, specs, sizes=sizes), layered=False)
    for told in decided_by_sizes(model, program, guards):
        warnings.warn(f"{path}: {told}", AssumedWarning, stacklevel=3)
    return model


def _refuse_nested(program: ExportedProgram, others: Sequence[str], path: Path) -> None:
    """A model's inputs are tensors, each by itself.

    Args:
        program: to be run.
        others: of its inputs, those that are no tensors.
        path: of it.

    Raises:
        CheckpointError: it takes these, a dict or a tuple of tensors, or some by keyword.
    """
    spec = program.call_spec.in_spec
    apart = True
    if spec is not None:
        given, named = spec.children()
        apart = not named.num_children and all(each.is_leaf() for each in given.children())
    if apart and not others:
        return
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    takes = "what is no tensor" if others else "tensors in a dict or a tuple, or by keyword"
    raise CheckpointError(
        f"can't take the exported program {path}",
        why=f"its forward takes {takes}: {', '.join(map(str, others or names))}"[:300],
        mend="export a module whose forward takes each tensor as a parameter of its own: forward(self, x, mask)",
    )


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


def _as_torch_reads_it(path: Path) -> tuple[ExportedProgram, list[str]]:
    with path.open("rb") as file:
        program = torch.export.load(file)
        return program, [str(guard) for guard in getattr(program, "_guards_code", None) or ()]


def _as_understood(path: Path) -> tuple[ExportedProgram, list[str]]:
    """The program that a file holds, of what is known of its format alone, and its guards, which are left out of it.

    Raises:
        CheckpointError: it holds anything else.
    """
    with path.open("rb") as file, tempfile.TemporaryFile() as clean:
        try:
            guards = _rewrite(Archive(file), clean)
        except ArchiveError as err:
            mend = "copy or download the file again; or write it with torch.export.save of this release of torch"
            raise CheckpointError(f"can't load the exported program {path}", why=str(err), mend=mend) from err
        except TooLongError as err:
            raise CheckpointError(
                f"can't vet the exported program {path}",
                why=f"{err} of sizes, which torch gives to sympy, and which gets longer there than is evaluated of a "
                "file that is not trusted: sizes padded up to multiples (windows, chunks) have such",
                mend="give the module itself, saved by compress.save or with --model, or export the program with "
                "numbers in place of the sizes that are padded; or, if you trust whoever made it, add --trust",
            ) from err
        except ValueError as err:
            raise _refused(path, str(err)) from err
        clean.seek(0)
        from torch.export.pt2_archive._package import load_pt2  # seconds, which no other file needs

        return load_pt2(clean).exported_programs["model"], guards


def _refused(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"won't load {path}: it would run code, or can't be told not to",
        why=why,
        mend="export it again from plain tensors with this release of torch; or, if you trust whoever made it, "
        "add --trust",
    )


def _rewrite(archive: Archive, clean: IO[bytes]) -> list[str]:
    """Write an archive of what was understood of another; gives its program's guards.

    Raises:
        ValueError: something in it is not known; says what.
    """
    held = _entries(archive)
    missing = [name for name in (_PROGRAM, *map("".join, _PAYLOADS.items()), "archive_format") if name not in held]
    if "archive_format" in missing and _PROGRAM in missing:
        raise ValueError("its format is one from before PyTorch 2.9, whose weights are a pickle")
    if missing:
        raise ArchiveError(f"it lacks {missing[0]}")
    for name, content in _FIXED.items():
        if name in held and not re.fullmatch(content, archive.read(held.pop(name), MAX_SMALL)):
            raise ArchiveError(f"its {name} is none that this release reads")
    try:
        name = _PROGRAM
        text = archive.read(held.pop(name), MAX_JSON)
        program, guards = clean_program(text), guards_in(text)
        texts: dict[str, bytes] = {}
        declared: dict[tuple[str, str], Any] = {}
        for folder, config in _PAYLOADS.items():
            name = folder + config
            texts[name] = archive.read(held.pop(name), MAX_JSON)
            payloads = clean_payloads(texts[name])
            declared |= {(folder, key): payload for key, payload in payloads.items()}
    except ArchiveError:
        raise
    except TooLongError as err:
        raise TooLongError(f"{name} {err}") from err
    except ValueError as err:
        raise ValueError(f"{name} {err}") from err
    used = _payloads(declared, held)
    if unused := sorted(held.keys() - used):
        raise ValueError(f"it holds {unused[0]}, which no tensor refers to")
    with zipfile.ZipFile(clean, "w") as out:
        fixed = {"archive_format": "pt2", "archive_version": "0", "byteorder": "little", ".data/version": "6\n"}
        empty = {"data/sample_inputs/model.pt": b""}
        for name, content in {**fixed, **empty, **texts, _PROGRAM: program}.items():
            out.writestr(f"model/{name}", content)
        for name in sorted(used):
            with out.open(f"model/{name}", "w", force_zip64=True) as written:
                for chunk in archive.chunks(held[name]):
                    written.write(chunk)
    return guards


def _entries(archive: Archive) -> dict[str, Entry]:
    """What is read of an archive, by its name within the one folder that it has."""
    found = {}
    roots = set()
    for name, entry in archive.entries.items():
        root, _, inner = name.partition("/")
        roots.add(root)
        folder, _, file = inner.rpartition("/")
        tensor = f"{folder}/" in _PAYLOADS and re.fullmatch(r"(weight|tensor)_\d{1,7}", file, re.ASCII)
        config = _PAYLOADS.get(f"{folder}/") == file
        if not (tensor or config or inner == _PROGRAM or inner in _FIXED or _UNREAD.fullmatch(inner)):
            raise ValueError(f"it holds {inner or name}, which torch.export.save does not write of plain tensors")
        if not entry.stored:
            raise ArchiveError(f"{inner} is compressed, which torch.export.save does not do")
        if not _UNREAD.fullmatch(inner):
            found[inner] = entry
    if len(roots) != 1:
        raise ArchiveError(f"it has {counted(len(roots), 'folders')} at its top, where torch.export.save writes one")
    return found


def _payloads(declared: Mapping[tuple[str, str], Any], held: Mapping[str, Entry]) -> set[str]:
    """The entries that hold tensors; each tensor lies within its entry's bytes.

    Raises:
        ArchiveError: one reaches over them, or all of them together declare far more than there is.
    """
    dtypes: dict[str, int] = {}
    elements = 0
    for (folder, key), payload in declared.items():
        entry, meta = folder + payload["path_name"], payload["tensor_meta"]
        if entry not in held:
            raise ArchiveError(f"{key!r} is to lie in {entry}, which is missing")
        if dtypes.setdefault(entry, meta["dtype"]) != meta["dtype"]:
            raise ArchiveError(f"{entry} holds tensors of two dtypes")
        sizes, strides = ([part["as_int"] for part in meta[which]] for which in ("sizes", "strides"))
        if len(sizes) != len(strides):
            raise ArchiveError(
                f"{key!r} has {counted(len(sizes), 'dimensions')} and {counted(len(strides), 'strides')}"
            )
        count = math.prod(sizes)
        reach = meta["storage_offset"]["as_int"] + sum(
            (size - 1) * stride for size, stride in zip(sizes, strides, strict=True)
        )
        there = held[entry].size // _ITEM_SIZES[meta["dtype"]]
        if held[entry].size % _ITEM_SIZES[meta["dtype"]] or (count and reach >= there):
            raise ArchiveError(f"{key!r} declares {sizes}, which the {held[entry].size:,} bytes of {entry} don't hold")
        elements += count
    there = sum(held[entry].size // _ITEM_SIZES[kind] for entry, kind in dtypes.items())
    if elements > MAX_SHARED * there + MAX_EXPANDED:
        raise ArchiveError(f"its tensors declare {elements:,} elements, where the file holds {there:,}")
    return set(dtypes)

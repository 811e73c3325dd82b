"""What identifies data and code: all of it that is used, since a result is kept under this key."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from compress.options.user_code import importable, user_code
from compress.vetting.heard import listener

__all__ = [
    "MADE", "code_files", "digest_of_arrays", "digest_of_code", "digest_of_files", "digest_of_samples", "is_users",
    "loaded_code",
]  # fmt: skip

CHUNK = 256
"""Samples in memory at a time."""
ROWS = 1 << 16
INSTALLED = frozenset(("site-packages", "dist-packages"))
OWN = frozenset(Path(folder).resolve() for folder in (sysconfig.get_path("stdlib"), Path(__file__).parents[1]))

Array = np.ndarray[Any, Any]
_KNOWN = frozenset((*sys.stdlib_module_names, "torch", "numpy", "compress")) - {"__main__"}
MADE = "samples made once, to know them by"


def digest_of_arrays(arrays: Mapping[str, Any]) -> str:
    """Of names, dtypes, shapes and all elements of arrays [n, …]."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        _add(digest.update, name, array.dtype, array.shape, _parts(array))
    return digest.hexdigest()


def digest_of_code(source: str) -> str:
    """Of the file of what a user names as `package.module:name`, and of the files that this one imports, wherever.

    Of what is installed and imported there, the versions. Python's own library and this package are known elsewhere.

    Raises:
        Exception: whatever the import raises.
    """
    with user_code(source):
        return hashlib.sha256(f"{source} {digest_of_files(source.partition(':')[0])}".encode()).hexdigest()


def digest_of_files(module: str) -> str:
    """Of the file of a module and of those that it imports, as in `digest_of_code`; of one without a file, of none."""
    digest = hashlib.sha256()
    installed: set[str] = set()
    for name, path in sorted(_files_of([module], installed=installed).items()):
        digest.update(f"\n{name}\n".encode() + path.read_bytes())
    distributions = packages_distributions() if installed else {}
    behind = {each for name in installed for each in distributions.get(name, ())}
    digest.update(json.dumps([f"{each} {version(each)}" for each in sorted(behind)]).encode())
    return digest.hexdigest()


def code_files(source: str) -> list[Path]:
    """The user's files behind `package.module:name`, which need not have been imported; none where that fails."""
    with importable(), suppress(Exception):  # packages above it are imported, and may do anything: who uses it says so
        return sorted(_files_of([source.partition(":")[0]]).values())
    return []


def loaded_code() -> list[Path]:
    """The user's files of all modules that this process has imported, and of what these import."""
    found: dict[str, Path] = {}
    for module in set(sys.modules) - {"__main__", "__mp_main__"}:  # the command itself, in processes of its own too
        with suppress(Exception):  # what stands for a module may be anything
            path = sys.modules[module].__file__
            if path is not None and is_users(module) and Path(path).is_file():
                found[module] = Path(path).resolve()
    with importable():
        return sorted({*found.values(), *_files_of(found, failing=True).values()})


def is_users(module: str) -> bool:
    """Whether a module that was imported is neither installed, nor Python's own, nor of this package."""
    if module.partition(".")[0] in _KNOWN:
        return False
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return True
    found = Path(path).resolve()
    return not INSTALLED.intersection(found.parts) and not OWN.intersection(found.parents)


def _files_of(names: Iterable[str], *, failing: bool = False, installed: set[str] | None = None) -> dict[str, Path]:
    """Python files by module: of those that are named, and of what they and these import; each is looked at once.

    Args:
        failing: whether some may fail, and are left out.
        installed: is given the names of packages that are imported and are not the user's.
    """
    found: dict[str, Path] = {}
    seen: set[str] = set()
    waiting = [*names]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        try:
            path = _file_of(module)
            if path is not None and not INSTALLED.intersection(path.parts) and not OWN.intersection(path.parents):
                found[module] = path
                waiting += _imported(path, module if path.name == "__init__.py" else module.rpartition(".")[0])
            elif installed is not None and module:
                installed.add(module.partition(".")[0])
        except Exception:
            if not failing:
                raise
    return found


def _file_of(module: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError, AttributeError):  # an attribute of a module, or one that was made in memory
        return None
    origin = None if spec is None else spec.origin
    return Path(origin).resolve() if origin is not None and origin.endswith(".py") else None


def _imported(path: Path, package: str) -> Iterator[str]:
    """Names of modules that a file imports, wherever in it, and of what may be one."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from (base, *(f"{base}.{alias.name}" for alias in node.names))


def digest_of_samples(samples: Any, rows: Callable[[Array], Mapping[str, Array]]) -> str:
    """Of all samples of a map-style torch Dataset.

    One that merely holds tensors is known by these; every sample of any other is made once.

    Args:
        samples: the dataset.
        rows: gives the samples at an index, by name.
    """
    digest = hashlib.sha256()
    if not _held(samples, digest.update):
        digest = hashlib.sha256()
        tell = listener()
        tell(0, len(samples), MADE)
        for start in range(0, len(samples), CHUNK):
            made = rows(np.arange(start, min(start + CHUNK, len(samples))))
            for name, array in sorted(made.items()):
                _add(digest.update, name, array.dtype, array.shape, [array])
            tell(min(start + CHUNK, len(samples)), len(samples), MADE)
    return digest.hexdigest()


def _held(samples: Any, update: Callable[[bytes], None]) -> bool:
    """Add what a dataset holds; not possible where it may compute something, as a class derived from these does."""
    kind = type(samples)
    if kind is TensorDataset:
        tensors: Sequence[torch.Tensor] = samples.tensors
        if any(type(tensor) is not torch.Tensor or tensor.layout is not torch.strided for tensor in tensors):
            return False
        update(f"tensors {len(tensors)};".encode())
        for tensor in tensors:
            plain = tensor.detach().cpu()
            pieces = (_bytes_of(plain[at : at + ROWS]) for at in range(0, len(plain), ROWS))
            _add(update, "", plain.dtype, tuple(plain.shape), pieces)
        return True
    if kind is Subset:
        index = np.asarray([int(place) for place in samples.indices], np.int64)
        _add(update, "subset", index.dtype, index.shape, [index])
        return _held(samples.dataset, update)
    if kind is ConcatDataset:
        update(f"concatenated {len(samples.datasets)};".encode())
        return all(_held(part, update) for part in samples.datasets)
    return False


def _bytes_of(tensor: torch.Tensor) -> Array:
    found: Array = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _parts(array: Any) -> Iterable[Array]:
    if not array.ndim:
        return [np.asarray(array)]
    return (np.asarray(array[at : at + ROWS]) for at in range(0, len(array), ROWS))


def _add(
    update: Callable[[bytes], None], name: str, dtype: Any, shape: tuple[int, ...], parts: Iterable[Array]
) -> None:
    update(f"{name!r} {dtype} {list(shape)};".encode())
    for part in parts:
        if part.dtype.hasobject:  # its bytes are addresses
            update(_of_objects(part.tolist()))
        else:
            update(np.ascontiguousarray(part).reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _of_objects(values: Any) -> bytes:
    """What objects are, whole: a `repr` leaves out what is in the middle of an array."""
    from compress.storage.plain_form import NoPlainFormError, PlainForms  # which hashes arrays by this module

    try:
        return json.dumps(PlainForms({}).of(values)).encode()
    except NoPlainFormError:  # nothing tells it from another: what is made of it is not found again
        return os.urandom(32)

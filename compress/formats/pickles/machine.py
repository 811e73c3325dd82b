"""A stack machine for pickles that imports nothing and calls nothing.

A pickle is a program, which may import and call anything. Here it runs on a machine that knows the names below: it
rebuilds plain containers and tensors itself (every size, stride and offset against the bytes that are there), and keeps
any other object as a description of it.
"""

from __future__ import annotations

import pickletools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

import torch
from torch import nn

from compress.errors import first_line
from compress.formats.pickles.archive import (
    LARGEST_PICKLE,
    DamagedError,
    LegacyStorages,
    OtherTensorError,
    ZipStorages,
    view_of,
)
from compress.formats.pickles.names import (
    DTYPES,
    KEPT,
    KEPT_FAMILIES,
    OTHER_TENSORS,
    PYTHON_2,
    STORAGES,
    Global,
    Instance,
)

__all__ = ["Machine"]

_OPCODES = 2_000_000  # 10,000 tensors take 400,000
_COPIES = 10_000_000
_VIEWS = 64


class Machine:
    """Runs pickles of protocols 2 to 5 on plain data alone.

    Args:
        storages: gives a storage by key, dtype and count.

    Attributes:
        foreign: names that the pickle wants to import and that are not known here.
    """

    def __init__(self, storages: ZipStorages | LegacyStorages) -> None:
        self.storages = storages
        self.foreign: set[str] = set()
        self._copied = self._described = self._opcodes = 0
        self._calls: dict[str, Callable[..., Any]] = {
            "collections.OrderedDict": lambda pairs=(): OrderedDict(self._pairs(pairs)),
            "collections.defaultdict": lambda _factory=None, pairs=(): dict(self._pairs(pairs)),
            "collections.Counter": lambda pairs=(): self._dict(pairs),
            "builtins.set": lambda items=(): set(map(_key, self._items(items))),
            "builtins.frozenset": lambda items=(): frozenset(map(_key, self._items(items))),
            "_codecs.encode": self._encode,
            "torch.Size": lambda sizes=(): tuple(self._items(sizes)),
            "torch._utils._rebuild_tensor": self._tensor,
            "torch._utils._rebuild_tensor_v2": self._tensor_v2,
            "torch._utils._rebuild_tensor_v3": self._tensor_v3,
            "torch._utils._rebuild_parameter": _parameter,
            "torch._utils._rebuild_parameter_with_state": _parameter,
            "torch._tensor._rebuild_from_type_v2": self._of_type,
        }  # fmt: skip

    def run(self, file: IO[bytes]) -> Any:
        """The object of the next pickle in a file.

        Raises:
            DamagedError: it is no pickle, or does what torch.save's never do.
        """
        try:
            return self._run(file)
        except DamagedError:
            raise
        except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError, AttributeError) as err:
            raise DamagedError(f"its pickle is damaged: {first_line(err)[:200]}") from err
        except (RuntimeError, MemoryError) as err:  # of torch, building a tensor
            raise DamagedError(f"a tensor of it can't be built: {first_line(err)[:200]}") from err

    def _run(self, file: IO[bytes]) -> Any:
        stack: list[Any] = []
        marks: list[int] = []
        memo: dict[int, Any] = {}

        def popped() -> list[Any]:
            at = marks.pop()
            items = stack[at:]
            del stack[at:]
            return items

        def top(*kinds: type) -> Any:
            if type(stack[-1]) not in kinds:
                raise DamagedError(f"its pickle changes a {type(stack[-1]).__name__}")
            return stack[-1]

        arg: Any
        for opcode, arg, position in pickletools.genops(file):
            if position is not None and position > LARGEST_PICKLE:
                raise DamagedError(f"its pickle has more than {LARGEST_PICKLE:,} bytes")
            self._opcodes += 1
            if self._opcodes > _OPCODES:
                raise DamagedError(f"its pickle has more than {_OPCODES:,} opcodes")
            match opcode.name:
                case "PROTO" | "FRAME":
                    pass
                case "STOP":
                    return stack.pop()
                case "MARK":
                    marks.append(len(stack))
                case "POP":
                    stack.pop()
                case "NONE":
                    stack.append(None)
                case "NEWTRUE":
                    stack.append(True)
                case "NEWFALSE":
                    stack.append(False)
                case (
                    "BININT" | "BININT1" | "BININT2" | "LONG1" | "LONG4" | "BINFLOAT" | "BINUNICODE"
                    | "SHORT_BINUNICODE" | "BINUNICODE8" | "BINSTRING" | "SHORT_BINSTRING"
                    | "BINBYTES" | "SHORT_BINBYTES" | "BINBYTES8"
                ):  # fmt: skip
                    stack.append(arg)
                case "EMPTY_LIST":
                    stack.append([])
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_SET":
                    stack.append(set())
                case "EMPTY_TUPLE":
                    stack.append(())
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    size = int(opcode.name[-1])
                    items = [stack.pop() for _ in range(size)]
                    stack.append(tuple(reversed(items)))
                case "TUPLE":
                    stack.append(tuple(popped()))
                case "LIST":
                    stack.append(popped())
                case "FROZENSET":
                    stack.append(frozenset(map(_key, popped())))
                case "APPEND":
                    item = stack.pop()
                    top(list).append(item)
                case "APPENDS":
                    items = popped()
                    top(list).extend(items)
                case "ADDITEMS":
                    items = popped()
                    top(set).update(map(_key, items))
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    top(dict, OrderedDict)[_key(key)] = value
                case "SETITEMS":
                    items = popped()
                    mapping = top(dict, OrderedDict)
                    for key, value in zip(items[::2], items[1::2], strict=True):
                        mapping[_key(key)] = value
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[arg])
                case "BINPUT" | "LONG_BINPUT":
                    memo[arg] = stack[-1]
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "GLOBAL":
                    stack.append(self._global(*arg.split(" ", 1)))
                case "STACK_GLOBAL":
                    name, module = stack.pop(), stack.pop()
                    stack.append(self._global(module, name))
                case "REDUCE":
                    args, function = stack.pop(), stack.pop()
                    stack.append(self._call(function, args))
                case "NEWOBJ":
                    args, kind = stack.pop(), stack.pop()
                    stack.append(self._call(kind, args))
                case "BUILD":
                    state = stack.pop()
                    if type(stack[-1]) is Instance:
                        stack[-1].state = state
                    else:
                        top(OrderedDict, dict)  # its `_metadata`: versions of layers
                case "BINPERSID":
                    stack.append(self._storage(stack.pop()))
                case _:
                    raise DamagedError(f"its pickle has the opcode {opcode.name}, which torch.save does not write")
        raise DamagedError("its pickle is truncated")

    def _global(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise DamagedError("its pickle names something by no name")
        full = f"{PYTHON_2.get(module, module)}.{name}"
        if full in DTYPES:
            return DTYPES[full]
        known = full in self._calls or full in KEPT or full in STORAGES or full.startswith(KEPT_FAMILIES)
        if full in OTHER_TENSORS or (full.startswith("torch.") and full.endswith("Storage") and not known):
            raise OtherTensorError(f"it holds a quantized, sparse or otherwise special tensor ({full})")
        if not known:
            self.foreign.add(full)
        return Global(full)

    def _call(self, function: Any, args: Any) -> Any:
        if type(function) is not Global or type(args) is not tuple:
            raise DamagedError("its pickle calls what is no function")
        if function.name in self._calls:
            return self._calls[function.name](*args)
        if function.name.startswith("torch.nn.functional."):
            self.foreign.add(function.name)
        return Instance(function.name, args)

    def _storage(self, pid: Any) -> Any:
        match pid:
            case ("storage", Global(name=kind), str(key), str(), int(numel)) | (
                "storage", Global(name=kind), str(key), str(), int(numel), None,
            ) if kind in STORAGES and 0 <= numel < 1 << 62:  # fmt: skip
                return _Storage(key, STORAGES[kind], numel)
            case ("module", Global() as kind, *_):
                return kind
        if self.foreign:
            return None
        raise DamagedError("its pickle refers to something that is no storage of tensors")

    def _pairs(self, pairs: Any) -> list[tuple[Any, Any]]:
        return [(_key(key), value) for key, value in self._items(pairs)]

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        return dict(self._items(list(pairs.items()))) if type(pairs) is dict else dict(self._pairs(pairs))

    def _items(self, items: Any) -> list[Any] | tuple[Any, ...]:
        """What is copied, counted: one long list of a file could be copied once for each of its bytes."""
        if type(items) not in (list, tuple):
            raise DamagedError(f"its pickle makes a container of a {type(items).__name__}")
        self._copied += len(items)
        if self._copied > _COPIES:
            raise DamagedError("its pickle copies the same items again and again")
        return items  # type: ignore[no-any-return]

    def _encode(self, text: Any, encoding: Any = "latin1") -> bytes:
        if type(text) is not str or encoding != "latin1":
            raise DamagedError("its pickle holds bytes of another encoding")
        self._items([None] * (len(text) // 8))
        return text.encode("latin1")

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any, dtype: Any = None) -> torch.Tensor:
        if type(storage) is not _Storage:
            raise DamagedError("a tensor of it has no storage")
        memory = self.storages(storage.key, storage.dtype, storage.numel)
        if dtype is not None:
            memory = memory.view(dtype)
        found = view_of(memory, offset, size, stride)
        self._described += found.numel()
        if self._described > _VIEWS * self.storages.size:
            raise DamagedError("its tensors show the same numbers again and again")
        return found

    def _tensor_v2(
        self, storage: Any, offset: Any, size: Any, stride: Any, _grad: Any, _hooks: Any, metadata: Any = None
    ) -> torch.Tensor:
        if metadata:
            raise OtherTensorError("it holds a conjugated or negated view of a tensor")
        return self._tensor(storage, offset, size, stride)

    def _tensor_v3(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        _grad: Any,
        _hooks: Any,
        dtype: Any,
        metadata: Any = None,
    ) -> torch.Tensor:
        if metadata or not isinstance(dtype, torch.dtype):
            raise OtherTensorError("it holds a view of a tensor that is not plain")
        return self._tensor(storage, offset, size, stride, dtype)

    def _of_type(self, function: Any, kind: Any, args: Any, _state: Any) -> Any:
        """A tensor with attributes of its own, which are left behind."""
        if type(kind) is not Global or kind.name not in ("torch.Tensor", "torch.nn.parameter.Parameter"):
            raise OtherTensorError("it holds a tensor of a class of its own")
        return self._call(function, args)


@dataclass(frozen=True, eq=False)
class _Storage:
    key: str
    dtype: torch.dtype
    numel: int


def _parameter(data: Any, requires_grad: Any, _hooks: Any, _state: Any = None) -> nn.Parameter:
    if type(data) is not torch.Tensor:
        raise DamagedError("a parameter of it is no tensor")
    return nn.Parameter(data, requires_grad=requires_grad is True and data.dtype.is_floating_point)


def _key(value: Any) -> Any:
    """What may be a key or stand in a set: no tuples, nested as deep as they go, nor numbers that hash alike."""
    if type(value) in (str, bool, bytes, type(None), Global, torch.dtype) or (
        type(value) is int and abs(value) < 1 << 60
    ):
        return value
    raise DamagedError(f"its pickle has a {type(value).__name__} as a key")
